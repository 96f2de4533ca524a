// One request: blocks of host or device memory, each to or from the beginning of its file.
#pragma once

#include <string>
#include <vector>

#include "handles.h"
#include "interface.h"

namespace kvferry_loopback {

namespace trt = tensorrt_llm::executor::kv_cache;

class Request {
public:
    // `parts_max`: transfers that move the request at the same time.
    Request(kvferry_agent const *agent, trt::MemoryDescs const &memory, trt::FileDescs const &files, bool is_offload,
            unsigned parts_max);

    // Throws std::exception with the reason. Afterwards no transfer is under way.
    void run();

    // Releases memory and files; waits for a device that still uses the memory. What went wrong, or nothing.
    // `left` gets a stage that a device still uses at the end, to be released later.
    std::string release(std::vector<kvferry_region *> &left);

    // After a failed offload: empties the files, so that no later onboard reads a part of a block. What was
    // done, as text.
    std::string discard();

private:
    struct Region {
        std::uintptr_t begin, end;
        kvferry_region *handle;
    };

    void check() const;
    void check_descriptor(std::size_t index) const;
    void open_file(std::size_t index);
    void register_memory();
    Region const &region_of(std::size_t index) const;
    void fill_batches();
    void transfer();
    void open_stage();
    void transfer_through_stage();
    void move_staged();

    int descriptor(std::size_t index) const;
    std::string describe(std::size_t index) const;
    [[noreturn]] void fail(std::size_t index, std::string const &reason) const;
    [[noreturn]] void fail(kvferry_error const &error) const;

    kvferry_agent const *agent_;
    std::vector<trt::MemoryDesc> const &blocks_;
    std::vector<trt::FileDesc> const &descs_;
    trt::MemoryType const type_;
    bool const is_offload_;
    unsigned const parts_max_;
    bool has_begun_ = false;

    // Sorted by address, without overlaps.
    std::vector<Region> regions_;
    std::vector<File> files_;
    std::vector<Batch> batches_;
    std::vector<Transfer> transfers_;

    // A part of a block of device memory, and its place in the stage.
    struct Staged {
        std::size_t index;
        std::uint64_t at, len, place;
    };

    // For device memory: host memory that the agent copies to and from itself.
    kvferry_region *stage_ = nullptr;
    kvferry_remote stage_remote_{};
    Peer self_;
    std::vector<Staged> staged_;
};

}  // namespace kvferry_loopback
