// RTP-LLM's transfer back-end on kvferry's tasks. Translates types; kvferry_tasks.h has the rules.
#pragma once

#include <map>
#include <mutex>

#include "declarations.h"
#include "kvferry_tasks.h"

namespace kvferry_rtp_llm {

// One agent and its tasks, shared by the sender and the receiver of a rank.
class Endpoint {
public:
    // Throws std::runtime_error. `listen` is `host:port`; empty is what KVFERRY_LISTEN says.
    explicit Endpoint(const std::string& listen);
    ~Endpoint();
    Endpoint(const Endpoint&) = delete;
    Endpoint& operator=(const Endpoint&) = delete;

    // Memory of the host or of a GPU. The same range again is fine; another range that overlaps is not.
    bool registerMemory(const rtp_llm::BlockInfo& block);
    // Whether no block is said to be in another kind of memory than it was registered as.
    bool areAsRegistered(const rtp_llm::transfer::KeyBlockInfoMap& blocks);
    // `host:port` that senders connect to.
    std::string address() const;
    kvferry_task_gauges held() const;
    kvferry_tasks* tasks() const { return tasks_; }

private:
    kvferry_agent* agent_ = nullptr;
    kvferry_tasks* tasks_ = nullptr;
    std::mutex mutex_;
    struct Registered {
        size_t nbytes;
        bool is_cuda;
        kvferry_region* region;
    };
    std::map<void*, Registered> regions_;
};

class Sender : public rtp_llm::transfer::IKVCacheSender {
public:
    explicit Sender(std::shared_ptr<Endpoint> endpoint) : endpoint_(std::move(endpoint)) {}
    bool regMem(const rtp_llm::BlockInfo& block, uint64_t aligned_size = 0) override;
    // The callback is called once, by a thread of kvferry or within this call. It must not release the
    // last reference to the back-end.
    void send(const rtp_llm::transfer::SendRequest& request,
              std::function<void(rtp_llm::transfer::TransferErrorCode, const std::string&)> callback) override;

private:
    std::shared_ptr<Endpoint> endpoint_;
};

class Receiver : public rtp_llm::transfer::IKVCacheReceiver {
public:
    explicit Receiver(std::shared_ptr<Endpoint> endpoint) : endpoint_(std::move(endpoint)) {}
    bool regMem(const rtp_llm::BlockInfo& block, uint64_t aligned_size = 0) override;
    // NULL if the key has a task.
    rtp_llm::transfer::IKVCacheRecvTaskPtr recv(const rtp_llm::transfer::RecvRequest& request) override;
    void stealTask(const std::string& unique_key) override;
    rtp_llm::transfer::IKVCacheRecvTaskPtr getTask(const std::string& unique_key) override;
    const Endpoint& endpoint() const { return *endpoint_; }

private:
    void dropEnded();
    std::shared_ptr<Endpoint> endpoint_;
    std::mutex mutex_;
    std::map<std::string, rtp_llm::transfer::IKVCacheRecvTaskPtr> tasks_;
};

// Why the last createTransferBackend of this thread returned no back-end.
const std::string& lastError();

}  // namespace kvferry_rtp_llm
