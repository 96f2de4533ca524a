// kvferry's handles as owners.
#pragma once

#include <kvferry.h>

#include <memory>

namespace kvferry_loopback {

struct Error : kvferry_error {
    Error() : kvferry_error{} { size = sizeof(kvferry_error); }
};

struct Release {
    // In a forked child the call is refused; the threads and the memory are the parent's.
    void operator()(kvferry_agent *agent) const { kvferry_agent_free(agent, nullptr); }
    void operator()(kvferry_file *file) const { kvferry_file_close(file, nullptr); }
    void operator()(kvferry_peer *peer) const { kvferry_peer_free(peer, nullptr); }
    void operator()(kvferry_batch *batch) const { kvferry_batch_free(batch, nullptr); }
    // The memory of a transfer belongs to it until it has ended.
    void operator()(kvferry_transfer *transfer) const {
        kvferry_transfer_wait(transfer, UINT64_MAX, nullptr, nullptr);
        kvferry_transfer_free(transfer, nullptr);
    }
};

using Agent = std::unique_ptr<kvferry_agent, Release>;
using File = std::unique_ptr<kvferry_file, Release>;
using Peer = std::unique_ptr<kvferry_peer, Release>;
using Batch = std::unique_ptr<kvferry_batch, Release>;
using Transfer = std::unique_ptr<kvferry_transfer, Release>;

}  // namespace kvferry_loopback
