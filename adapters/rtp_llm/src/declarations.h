// What RTP-LLM declares for a transfer back-end: names, members and their order, restated.
// With KVFERRY_RTPLLM_HEADERS the headers of RTP-LLM itself are included instead, and the checks below
// hold for them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <vector>

#ifdef KVFERRY_RTPLLM_HEADERS
#include "rtp_llm/cpp/cache/connector/p2p/transfer/TransferBackendFactory.h"
#else
namespace kmonitor {
class MetricsReporter;
using MetricsReporterPtr = std::shared_ptr<MetricsReporter>;
}  // namespace kmonitor

namespace rtp_llm {

struct BlockInfo {
    bool is_cuda = false;
    int32_t device_index = 0;
    int32_t scalar_type = 0;
    void* addr = nullptr;
    size_t size_bytes = 0;
};

namespace transfer {

struct KeyBlockInfo {
    int64_t cache_key = 0;
    std::vector<BlockInfo> blocks;
};
using KeyBlockInfoPtr = std::shared_ptr<const KeyBlockInfo>;
using KeyBlockInfoMap = std::unordered_map<int64_t, KeyBlockInfoPtr>;

enum class TransferErrorCode {
    OK = 0,
    CANCELLED,
    TIMEOUT,
    BUILD_REQUEST_FAILED,
    CONNECTION_FAILED,
    RPC_FAILED,
    BUFFER_MISMATCH,
    RDMA_FAILED,
    UNKNOWN,
};

struct SendRequest {
    std::string ip;
    uint32_t port = 0;
    std::string unique_key;
    KeyBlockInfoMap block_info;
    int64_t deadline_ms = 0;  // wall clock
};

class IKVCacheSender {
public:
    virtual ~IKVCacheSender() = default;
    virtual bool regMem(const BlockInfo& block_info, uint64_t aligned_size = 0) = 0;
    virtual void send(const SendRequest& request,
                      std::function<void(TransferErrorCode, const std::string&)> callback) = 0;
};
using IKVCacheSenderPtr = std::shared_ptr<IKVCacheSender>;

class IKVCacheRecvTask {
public:
    virtual ~IKVCacheRecvTask() = default;
    virtual bool done() const = 0;
    virtual bool success() const = 0;
    virtual void cancel() = 0;
    virtual void forceCancel() { cancel(); }
    virtual TransferErrorCode errorCode() const = 0;
    virtual std::string errorMessage() const = 0;
};
using IKVCacheRecvTaskPtr = std::shared_ptr<IKVCacheRecvTask>;

struct RecvRequest {
    std::string unique_key;
    KeyBlockInfoMap block_info;
    int64_t deadline_ms = 0;  // wall clock
};

class IKVCacheReceiver {
public:
    virtual ~IKVCacheReceiver() = default;
    virtual bool regMem(const BlockInfo& block_info, uint64_t aligned_size = 0) = 0;
    virtual IKVCacheRecvTaskPtr recv(const RecvRequest& request) = 0;
    virtual void stealTask(const std::string& unique_key) = 0;
    virtual IKVCacheRecvTaskPtr getTask(const std::string& unique_key) = 0;
};
using IKVCacheReceiverPtr = std::shared_ptr<IKVCacheReceiver>;

struct TransferBackendConfig {
    bool cache_store_rdma_mode = false;
    int64_t rdma_transfer_wait_timeout_ms = 180 * 1000;
    int messager_io_thread_count = 2;
    int messager_worker_thread_count = 16;
    int rdma_max_block_pairs_per_connection = 0;
    int64_t cache_store_listen_port = 0;
    int cache_store_tcp_anet_rpc_thread_num = 3;
    int cache_store_tcp_anet_rpc_queue_num = 100;
    int64_t tcp_channel_idle_ttl_ms = 0;
    int64_t tcp_channel_sweep_interval_calls = 0;
    int64_t transfer_wait_check_interval_us = 1000;
};

enum class TransferBackend { kTcp, kBarexRdma };

struct TransferBackendPair {
    IKVCacheSenderPtr sender;
    IKVCacheReceiverPtr receiver;
};
TransferBackendPair createTransferBackend(TransferBackend backend, const TransferBackendConfig& config,
                                          const kmonitor::MetricsReporterPtr& metrics_reporter = nullptr);

}  // namespace transfer
}  // namespace rtp_llm
#endif

static_assert(offsetof(rtp_llm::BlockInfo, addr) == 16 && offsetof(rtp_llm::BlockInfo, size_bytes) == 24 &&
                  sizeof(rtp_llm::BlockInfo) == 32,
              "BlockInfo has another layout");
static_assert(static_cast<int>(rtp_llm::transfer::TransferErrorCode::UNKNOWN) == 8, "other error codes");
static_assert(std::is_same<decltype(rtp_llm::transfer::SendRequest::deadline_ms), int64_t>::value &&
                  std::is_same<decltype(rtp_llm::transfer::SendRequest::port), uint32_t>::value &&
                  std::is_same<decltype(rtp_llm::transfer::RecvRequest::deadline_ms), int64_t>::value,
              "requests have other members");
static_assert(offsetof(rtp_llm::transfer::TransferBackendConfig, cache_store_listen_port) == 32 &&
                  sizeof(rtp_llm::transfer::TransferBackendConfig) == 72,
              "TransferBackendConfig has another layout");
static_assert(std::has_virtual_destructor<rtp_llm::transfer::IKVCacheRecvTask>::value &&
                  std::is_same<rtp_llm::transfer::KeyBlockInfoMap::mapped_type,
                               std::shared_ptr<const rtp_llm::transfer::KeyBlockInfo>>::value,
              "tasks or block lists have other types");
