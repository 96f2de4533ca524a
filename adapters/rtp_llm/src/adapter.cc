#include "adapter.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>

using rtp_llm::BlockInfo;
using rtp_llm::transfer::IKVCacheRecvTask;
using rtp_llm::transfer::IKVCacheRecvTaskPtr;
using rtp_llm::transfer::KeyBlockInfoMap;
using rtp_llm::transfer::RecvRequest;
using rtp_llm::transfer::SendRequest;
using rtp_llm::transfer::TransferErrorCode;

namespace kvferry_rtp_llm {
namespace {

using Callback = std::function<void(TransferErrorCode, const std::string&)>;

template <typename T>
T sized() {
    T value{};
    value.size = sizeof value;
    return value;
}

TransferErrorCode translate(int code) {
    switch (code) {
        case KVFERRY_OK:
            return TransferErrorCode::OK;
        case KVFERRY_CANCELLED:
            return TransferErrorCode::CANCELLED;
        case KVFERRY_DEADLINE:
            return TransferErrorCode::TIMEOUT;
        case KVFERRY_MISMATCH:
            return TransferErrorCode::BUFFER_MISMATCH;
        case KVFERRY_INVALID_ARGUMENT:
        case KVFERRY_NOT_REGISTERED:
        case KVFERRY_TOO_LARGE:
        case KVFERRY_BUSY:
            return TransferErrorCode::BUILD_REQUEST_FAILED;
        case KVFERRY_UNREACHABLE:
            return TransferErrorCode::CONNECTION_FAILED;
        case KVFERRY_PEER_RESET:
        case KVFERRY_IO:
            return TransferErrorCode::RPC_FAILED;
        default:
            return TransferErrorCode::UNKNOWN;
    }
}

// RTP-LLM's deadlines are wall clock; kvferry's times are relative. 0 if it has passed.
uint64_t leftMs(int64_t deadline_ms) {
    using namespace std::chrono;
    const int64_t now = duration_cast<milliseconds>(system_clock::now().time_since_epoch()).count();
    return deadline_ms > now ? static_cast<uint64_t>(deadline_ms - now) : 0;
}

const char* const kWrongMemory = "a block is in another kind of memory (host, device) than it was registered as";

// RTP-LLM has waited for the events of the blocks that it sends, and gives a task pages that no kernel uses.
const kvferry_after kHasWaited = {KVFERRY_AFTER_HOST, 0, 0};

std::vector<kvferry_task_part> parts(const KeyBlockInfoMap& blocks) {
    std::vector<int64_t> keys;
    for (const auto& entry : blocks)
        if (entry.second) keys.push_back(entry.first);
    std::sort(keys.begin(), keys.end());
    std::vector<kvferry_task_part> list;
    for (int64_t key : keys)
        for (const BlockInfo& part : blocks.at(key)->blocks) list.push_back({key, part.addr, part.size_bytes});
    return list;
}

// The end of a send. Nothing that the engine throws goes further.
void sendEnded(void* user, const kvferry_error* error) {
    const std::unique_ptr<Callback> callback(static_cast<Callback*>(user));
    try {
        (*callback)(error ? translate(error->code) : TransferErrorCode::OK, error ? error->text : "");
    } catch (...) {
    }
}

class Task : public IKVCacheRecvTask {
public:
    Task(std::shared_ptr<Endpoint> endpoint, kvferry_recv_task* task, int64_t deadline_ms)
        : endpoint_(std::move(endpoint)), task_(task), deadline_ms_(deadline_ms) {}
    // Waits until nothing writes to the task's memory any more.
    ~Task() override { kvferry_recv_task_free(task_, nullptr); }
    bool done() const override { return ask(nullptr) != KVFERRY_PENDING; }
    bool success() const override { return ask(nullptr) == KVFERRY_OK; }
    void cancel() override { kvferry_recv_task_cancel(task_, nullptr); }
    // A task is never done while its memory is written, so there is no faster end than that of cancel.
    void forceCancel() override { cancel(); }
    TransferErrorCode errorCode() const override {
        const int code = ask(nullptr);
        if (code != KVFERRY_PENDING) return translate(code);
        return leftMs(deadline_ms_) == 0 ? TransferErrorCode::TIMEOUT : TransferErrorCode::OK;
    }
    std::string errorMessage() const override {
        auto error = sized<kvferry_error>();
        ask(&error);
        return error.text;
    }

private:
    int ask(kvferry_error* error) const { return kvferry_recv_task_wait(task_, 0, error); }
    std::shared_ptr<Endpoint> endpoint_;
    kvferry_recv_task* task_;
    int64_t deadline_ms_;
};

// A task that could not be started.
class FailedTask : public IKVCacheRecvTask {
public:
    FailedTask(TransferErrorCode code, std::string text) : code_(code), text_(std::move(text)) {}
    bool done() const override { return true; }
    bool success() const override { return false; }
    void cancel() override {}
    TransferErrorCode errorCode() const override { return code_; }
    std::string errorMessage() const override { return text_; }

private:
    TransferErrorCode code_;
    std::string text_;
};

std::string& reason() {
    thread_local std::string text;
    return text;
}

}  // namespace

const std::string& lastError() { return reason(); }

Endpoint::Endpoint(const std::string& listen) {
    auto error = sized<kvferry_error>();
    auto options = sized<kvferry_agent_options>();
    options.name = "rtp-llm";
    options.listen = listen.empty() ? nullptr : listen.c_str();
    if (kvferry_agent_start(&options, &agent_, &error) != KVFERRY_OK) throw std::runtime_error(error.text);
    if (kvferry_tasks_start(agent_, &tasks_, &error) != KVFERRY_OK) {
        kvferry_agent_free(agent_, nullptr);
        throw std::runtime_error(error.text);
    }
}

Endpoint::~Endpoint() {
    kvferry_tasks_free(tasks_, nullptr);
    // The engine may free its memory once this returns. A call ends after some seconds while a copier hangs in it.
    for (const auto& entry : regions_)
        while (kvferry_region_unregister(entry.second.region, nullptr) == KVFERRY_QUARANTINED) continue;
    kvferry_agent_free(agent_, nullptr);
}

bool Endpoint::registerMemory(const BlockInfo& block) {
    if (block.addr == nullptr || block.size_bytes == 0) return false;
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto known = regions_.find(block.addr);
    if (known != regions_.end())
        return known->second.nbytes == block.size_bytes && known->second.is_cuda == block.is_cuda;
    // Peers read what is sent. Nobody but this process writes what is received.
    kvferry_region* region = nullptr;
    const auto address = reinterpret_cast<uintptr_t>(block.addr);
    const int code = block.is_cuda ? kvferry_region_register_cuda(agent_, address, block.size_bytes, -1,
                                                                  KVFERRY_ACCESS_READ, nullptr, &region, nullptr)
                                   : kvferry_region_register(agent_, block.addr, block.size_bytes,
                                                             KVFERRY_ACCESS_READ, nullptr, &region, nullptr);
    if (code != KVFERRY_OK) return false;
    regions_[block.addr] = {block.size_bytes, block.is_cuda, region};
    return true;
}

bool Endpoint::areAsRegistered(const KeyBlockInfoMap& blocks) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [key, block] : blocks)
        for (const BlockInfo& part : block ? block->blocks : std::vector<BlockInfo>()) {
            if (part.addr == nullptr || part.size_bytes == 0) continue;
            const auto after = regions_.upper_bound(part.addr);
            // A block that is in no region is refused elsewhere, with its address.
            if (after != regions_.begin() && std::prev(after)->second.is_cuda != part.is_cuda) return false;
        }
    return true;
}

std::string Endpoint::address() const {
    char text[300] = "";
    kvferry_agent_address(agent_, text, sizeof text, nullptr);
    return text;
}

kvferry_task_gauges Endpoint::held() const {
    auto gauges = sized<kvferry_task_gauges>();
    kvferry_tasks_held(tasks_, &gauges, nullptr);
    return gauges;
}

bool Sender::regMem(const BlockInfo& block, uint64_t) { return endpoint_->registerMemory(block); }

void Sender::send(const SendRequest& request, Callback callback) {
    if (!callback) callback = [](TransferErrorCode, const std::string&) {};
    auto options = sized<kvferry_task_options>();
    options.after = &kHasWaited;
    options.after_count = 1;
    options.timeout_ms = leftMs(request.deadline_ms);
    if (options.timeout_ms == 0) return callback(TransferErrorCode::TIMEOUT, "the deadline has passed");
    if (request.ip.empty() || request.port == 0 || request.port > 65535)
        return callback(TransferErrorCode::CONNECTION_FAILED, "the receiver's address is not ip and port");
    if (!endpoint_->areAsRegistered(request.block_info))
        return callback(TransferErrorCode::BUILD_REQUEST_FAILED, kWrongMemory);
    const bool v6 = request.ip.find(':') != std::string::npos && request.ip[0] != '[';
    const std::string host = v6 ? "[" + request.ip + "]" : request.ip;
    const std::string address = host + ":" + std::to_string(request.port);
    const auto list = parts(request.block_info);
    auto waiting = std::make_unique<Callback>(std::move(callback));
    options.done = sendEnded;
    options.user = waiting.get();
    auto error = sized<kvferry_error>();
    const int code = kvferry_send_task_start(endpoint_->tasks(), address.c_str(), request.unique_key.c_str(),
                                             list.data(), list.size(), &options, nullptr, &error);
    if (code != KVFERRY_OK) return (*waiting)(translate(code), error.text);
    waiting.release();  // sendEnded has it.
}

bool Receiver::regMem(const BlockInfo& block, uint64_t) { return endpoint_->registerMemory(block); }

IKVCacheRecvTaskPtr Receiver::recv(const RecvRequest& request) {
    dropEnded();
    auto options = sized<kvferry_task_options>();
    options.after = &kHasWaited;
    options.after_count = 1;
    options.timeout_ms = leftMs(request.deadline_ms);
    if (options.timeout_ms == 0)
        return std::make_shared<FailedTask>(TransferErrorCode::TIMEOUT, "the deadline has passed");
    if (!endpoint_->areAsRegistered(request.block_info))
        return std::make_shared<FailedTask>(TransferErrorCode::BUILD_REQUEST_FAILED, kWrongMemory);
    const auto list = parts(request.block_info);
    kvferry_recv_task* started = nullptr;
    auto error = sized<kvferry_error>();
    const std::lock_guard<std::mutex> lock(mutex_);
    const int code = kvferry_recv_task_start(endpoint_->tasks(), request.unique_key.c_str(), list.data(),
                                             list.size(), &options, &started, &error);
    if (code == KVFERRY_DUPLICATE) return nullptr;
    if (code != KVFERRY_OK) return std::make_shared<FailedTask>(translate(code), error.text);
    auto task = std::make_shared<Task>(endpoint_, started, request.deadline_ms);
    tasks_[request.unique_key] = task;
    return task;
}

void Receiver::stealTask(const std::string& unique_key) {
    IKVCacheRecvTaskPtr dropped;
    const std::lock_guard<std::mutex> lock(mutex_);
    kvferry_tasks_steal(endpoint_->tasks(), unique_key.c_str(), nullptr);
    const auto found = tasks_.find(unique_key);
    if (found == tasks_.end()) return;
    dropped = std::move(found->second);
    tasks_.erase(found);
}

IKVCacheRecvTaskPtr Receiver::getTask(const std::string& unique_key) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = tasks_.find(unique_key);
    return found == tasks_.end() ? nullptr : found->second;
}

// Tasks that have ended and that the engine has dropped.
void Receiver::dropEnded() {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto at = tasks_.begin(); at != tasks_.end();)
        at = at->second.use_count() == 1 && at->second->done() ? tasks_.erase(at) : std::next(at);
}

}  // namespace kvferry_rtp_llm

namespace rtp_llm {
namespace transfer {

// Either back-end that RTP-LLM knows is this one: kvferry chooses the transport.
TransferBackendPair createTransferBackend(TransferBackend, const TransferBackendConfig& config,
                                          const kmonitor::MetricsReporterPtr&) {
    kvferry_rtp_llm::reason().clear();
    try {
        const int64_t port = config.cache_store_listen_port;
        if (port < 0 || port > 65535)
            throw std::runtime_error("cache_store_listen_port is " + std::to_string(port) + ", which is no port");
        // Without a port, KVFERRY_LISTEN says where to listen.
        const auto listen = port == 0 ? std::string() : "0.0.0.0:" + std::to_string(port);
        auto endpoint = std::make_shared<kvferry_rtp_llm::Endpoint>(listen);
        return {std::make_shared<kvferry_rtp_llm::Sender>(endpoint),
                std::make_shared<kvferry_rtp_llm::Receiver>(endpoint)};
    } catch (const std::exception& failed) {
        kvferry_rtp_llm::reason() = failed.what();
        return {};
    }
}

}  // namespace transfer
}  // namespace rtp_llm
