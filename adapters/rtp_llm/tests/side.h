// One rank of the test: a back-end, and memory that it sends from and receives to.
#pragma once

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <chrono>
#include <map>
#include <thread>

#include "adapter.h"

#define CHECK(condition)                                                                   \
    do {                                                                                   \
        if (!(condition)) {                                                                \
            std::fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
            std::exit(1);                                                                  \
        }                                                                                  \
    } while (0)

namespace test {

using rtp_llm::BlockInfo;
using rtp_llm::transfer::IKVCacheRecvTaskPtr;
using rtp_llm::transfer::KeyBlockInfo;
using rtp_llm::transfer::KeyBlockInfoMap;
using Code = rtp_llm::transfer::TransferErrorCode;

constexpr size_t kMemory = 16u << 20;
// Fault bound: nothing that is waited for takes this long.
constexpr int64_t kLongMs = 180000;
// A silence limit that ends no session: a loaded machine delays heartbeats.
constexpr const char* kNoSilenceMs = "300000";
// A silence limit that ends the sessions of a stopped process, and not those of one that waits for a processor.
constexpr const char* kSomeSilenceMs = "8000";

inline int64_t wallClockMs() {
    using namespace std::chrono;
    return duration_cast<milliseconds>(system_clock::now().time_since_epoch()).count();
}

// The bytes that fill memory: these, again and again, beginning at offset 0.
inline std::array<unsigned char, 256> pattern(unsigned seed) {
    std::array<unsigned char, 256> bytes{};
    for (size_t i = 0; i < bytes.size(); i++) bytes[i] = static_cast<unsigned char>(i * 31u + seed * 7u + 1u);
    return bytes;
}

// Looks every 2 ms until `holds` is true, within the fault bound.
template <typename Condition>
bool eventually(Condition holds) {
    for (const int64_t until = wallClockMs() + kLongMs; wallClockMs() < until;) {
        if (holds()) return true;
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    return holds();
}

// A part of a block: an offset in the side's memory and a length; length 0 is a part that is not there.
struct Range {
    size_t offset, len;
};
using Blocks = std::map<int64_t, std::vector<Range>>;

struct Outcome {
    Code code;
    std::string text;
    int calls;
};

class Side {
public:
    Side() : memory_(kMemory) {
        // As the engine's worker does: one buffer, registered by both halves.
        pair_ = rtp_llm::transfer::createTransferBackend(rtp_llm::transfer::TransferBackend::kTcp, {});
        CHECK(pair_.sender && pair_.receiver);
        CHECK(pair_.sender->regMem(at({0, kMemory})) && pair_.receiver->regMem(at({0, kMemory})));
    }

    std::string address() const { return endpoint().address(); }
    kvferry_task_gauges held() const { return endpoint().held(); }
    rtp_llm::transfer::IKVCacheSender& sender() { return *pair_.sender; }
    rtp_llm::transfer::IKVCacheReceiver& receiver() { return *pair_.receiver; }
    unsigned char* memory() { return memory_.data(); }

    BlockInfo at(Range range) {
        BlockInfo info;
        info.addr = range.len > 0 ? memory() + range.offset : nullptr;
        info.size_bytes = range.len;
        return info;
    }

    KeyBlockInfoMap map(const Blocks& blocks) {
        KeyBlockInfoMap map;
        for (const auto& [key, ranges] : blocks) {
            auto info = std::make_shared<KeyBlockInfo>();
            info->cache_key = key;
            for (const Range& range : ranges) info->blocks.push_back(at(range));
            map[key] = info;
        }
        return map;
    }

    void fill(size_t offset, size_t len, unsigned seed) {
        forPieces(offset, len, seed, [](unsigned char* at, const unsigned char* bytes, size_t count) {
            std::memcpy(at, bytes, count);
            return true;
        });
    }

    bool filled(size_t offset, size_t len, unsigned seed) {
        return forPieces(offset, len, seed, [](unsigned char* at, const unsigned char* bytes, size_t count) {
            return std::memcmp(at, bytes, count) == 0;
        });
    }

    IKVCacheRecvTaskPtr recv(const std::string& key, const Blocks& blocks, int64_t timeout_ms = kLongMs) {
        return receiver().recv({key, map(blocks), wallClockMs() + timeout_ms});
    }

    // `name` is what outcome() asks for.
    void send(const std::string& name, const std::string& address, const std::string& key, const Blocks& blocks,
              int64_t timeout_ms = kLongMs) {
        rtp_llm::transfer::SendRequest request;
        const size_t colon = address.rfind(':');
        request.ip = address.substr(0, colon);
        request.port = static_cast<uint32_t>(std::stoul(address.substr(colon + 1)));
        request.unique_key = key;
        request.block_info = map(blocks);
        request.deadline_ms = wallClockMs() + timeout_ms;
        send(name, request);
    }

    void send(const std::string& name, const rtp_llm::transfer::SendRequest& request) {
        auto ends = ends_;
        sender().send(request, [ends, name](Code code, const std::string& text) {
            const std::lock_guard<std::mutex> lock(ends->mutex);
            Outcome& outcome = ends->of[name];
            outcome = {code, text, outcome.calls + 1};
            ends->changed.notify_all();
        });
    }

    // Waits for the end of a send.
    Outcome outcome(const std::string& name) {
        std::unique_lock<std::mutex> lock(ends_->mutex);
        const auto ended = [&] { return ends_->of.count(name) > 0; };
        CHECK(ends_->changed.wait_for(lock, std::chrono::milliseconds(kLongMs), ended));
        return ends_->of[name];
    }

    bool ended(const std::string& name) {
        const std::lock_guard<std::mutex> lock(ends_->mutex);
        return ends_->of.count(name) > 0;
    }

private:
    // Calls `each` with a place in memory, with what fills it and with its length, while that is true. A loop over single
    // bytes takes long under a sanitizer.
    template <typename Each>
    bool forPieces(size_t offset, size_t len, unsigned seed, Each each) {
        const auto bytes = pattern(seed);
        for (size_t at = offset; at < offset + len;) {
            const size_t skipped = at % bytes.size();
            const size_t count = std::min(bytes.size() - skipped, offset + len - at);
            if (!each(memory() + at, bytes.data() + skipped, count)) return false;
            at += count;
        }
        return true;
    }

    struct Ends {
        std::mutex mutex;
        std::condition_variable changed;
        std::map<std::string, Outcome> of;
    };

    const kvferry_rtp_llm::Endpoint& endpoint() const {
        return static_cast<const kvferry_rtp_llm::Receiver&>(*pair_.receiver).endpoint();
    }

    std::vector<unsigned char> memory_;
    std::shared_ptr<Ends> ends_ = std::make_shared<Ends>();
    rtp_llm::transfer::TransferBackendPair pair_;
};

}  // namespace test
