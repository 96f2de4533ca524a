// Blocks in memory of a GPU, on the fake driver that KVFERRY_LIBCUDA names.
#pragma once

#include <dlfcn.h>

#include "cases.h"

namespace test {

// The driver, which the adapter loads as well.
class Gpu {
public:
    Gpu() {
        const char* path = std::getenv("KVFERRY_LIBCUDA");
        CHECK(path != nullptr);
        driver_ = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        CHECK(driver_ != nullptr);
        void* context = nullptr;
        call<unsigned>("cuInit", 0u);
        call<void**, int>("cuDevicePrimaryCtxRetain", &context, 0);
        call<void*>("cuCtxPushCurrent_v2", context);
        call<uint64_t*, size_t>("cuMemAlloc_v2", &memory_, kMemory);
    }
    Gpu(const Gpu&) = delete;
    Gpu& operator=(const Gpu&) = delete;
    ~Gpu() {
        call<uint64_t>("cuMemFree_v2", memory_);
        char text[4096] = "";
        size_t len = 0;
        call<char*, size_t, size_t*>("fakecuda_findings", text, sizeof text, &len);
        CHECK(text[0] == '\0');
    }

    BlockInfo at(Range range) const {
        BlockInfo info;
        info.is_cuda = true;
        info.addr = reinterpret_cast<void*>(static_cast<uintptr_t>(memory_ + range.offset));
        info.size_bytes = range.len;
        return info;
    }

    void fill(size_t offset, size_t len, unsigned seed) {
        const auto bytes = expected(offset, len, seed);
        call<uint64_t, const unsigned char*, size_t>("fakecuda_write", memory_ + offset, bytes.data(), len);
    }

    bool filled(size_t offset, size_t len, unsigned seed) {
        std::vector<unsigned char> bytes(len);
        call<uint64_t, unsigned char*, size_t>("fakecuda_read", memory_ + offset, bytes.data(), len);
        return bytes == expected(offset, len, seed);
    }

private:
    static std::vector<unsigned char> expected(size_t offset, size_t len, unsigned seed) {
        const auto repeated = pattern(seed);
        std::vector<unsigned char> bytes(len);
        for (size_t i = 0; i < len; i++) bytes[i] = repeated[(offset + i) % repeated.size()];
        return bytes;
    }

    template <typename... Types>
    void call(const char* name, Types... arguments) {
        void* found = dlsym(driver_, name);
        CHECK(found != nullptr);
        int (*function)(Types...) = nullptr;
        static_assert(sizeof function == sizeof found, "functions have another size than objects");
        std::memcpy(&function, &found, sizeof function);
        CHECK(function(arguments...) == 0);
    }

    void* driver_ = nullptr;
    uint64_t memory_ = 0;
};

// S1, V14
inline void blocks_in_memory_of_a_gpu_are_received_and_sent_beside_parts_in_memory_of_the_host() {
    // `local` alone has no path to a peer's memory of a GPU.
    for (const char* transport : {"tcp", "tcp,local"}) {
        setenv("KVFERRY_TRANSPORTS", transport, 1);
        Gpu gpu;
        Side side;
        Peer peer;
        for (int twice = 0; twice < 2; twice++)
            CHECK(side.sender().regMem(gpu.at({0, kMemory})) && side.receiver().regMem(gpu.at({0, kMemory})));
        BlockInfo as_host = gpu.at({kBlock, kBlock});
        as_host.is_cuda = false;
        CHECK(!side.sender().regMem(as_host));

        // Blocks of a part in memory of the GPU and a part in memory of the host; between those of the GPU are gaps.
        constexpr size_t kBlocks = 64;
        const auto first = [](size_t i) { return Range{2 * i * kBlock, kBlock}; };
        const auto second = [](size_t i) { return Range{(2 * i + 1) * kBlock, kBlock}; };
        Blocks theirs;
        KeyBlockInfoMap ours;
        for (size_t i = 0; i < kBlocks; i++) {
            const auto key = static_cast<int64_t>(i);
            theirs[key] = {first(i), second(i)};
            auto info = std::make_shared<KeyBlockInfo>();
            info->cache_key = key;
            info->blocks = {gpu.at(first(i)), side.at(second(i))};
            ours[key] = info;
        }
        gpu.fill(0, kMemory, 7);
        auto task = side.receiver().recv({"k", ours, wallClockMs() + kLongMs});
        peer.send("s", side.address(), "k", theirs);
        CHECK(endOf(task) == Code::OK && task->errorMessage().empty());
        CHECK(peer.outcome("s").code == Code::OK);
        for (size_t i = 0; i < kBlocks; i++) {
            CHECK(gpu.filled(first(i).offset, kBlock, 1) && gpu.filled(second(i).offset, kBlock, 7));
            CHECK(side.filled(second(i).offset, kBlock, 1));
        }
        end(side, peer, "k", task);

        // The other way.
        for (size_t i = 0; i < kBlocks; i++) {
            gpu.fill(first(i).offset, kBlock, 2);
            side.fill(second(i).offset, kBlock, 3);
        }
        peer.recv("back", theirs);
        rtp_llm::transfer::SendRequest request;
        const size_t colon = peer.address().rfind(':');
        request.ip = peer.address().substr(0, colon);
        request.port = static_cast<uint32_t>(std::stoul(peer.address().substr(colon + 1)));
        request.unique_key = "back";
        request.block_info = ours;
        request.deadline_ms = wallClockMs() + kLongMs;
        side.send("back", request);
        CHECK(side.outcome("back").code == Code::OK && peer.task("back").code == Code::OK);
        for (size_t i = 0; i < kBlocks; i++) {
            const auto is_filled = [&](Range range, const char* seed) {
                const std::string place = std::to_string(range.offset) + ' ' + std::to_string(range.len);
                return peer.ask("filled - " + place + ' ' + seed) == "1";
            };
            CHECK(is_filled(first(i), "2") && is_filled(second(i), "3"));
        }
        CHECK(peer.ask("drop back") == "ok" && holdsNothing(side) && peer.holdsNothing());

        // A part that is said to be in the other kind of memory.
        auto wrong = std::make_shared<KeyBlockInfo>();
        wrong->blocks = {as_host};
        auto refused = side.receiver().recv({"wrong", {{1, wrong}}, wallClockMs() + kLongMs});
        CHECK(refused->done() && refused->errorCode() == Code::BUILD_REQUEST_FAILED);
    }
}

inline std::vector<Case> gpuCases() {
    return {CASE(blocks_in_memory_of_a_gpu_are_received_and_sent_beside_parts_in_memory_of_the_host)};
}

}  // namespace test
