#include "request.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstring>
#include <stdexcept>

namespace kvferry_loopback {

namespace {

// A further transfer is worth its start from this many bytes on.
constexpr std::uint64_t kPartBytesMin = 4u << 20;
// Bytes of the host memory that blocks of device memory go through.
constexpr std::uint64_t kStageBytes = 64u << 20;
// Blocks are cut at pages of their files, so that both sides may go past the page cache.
constexpr std::uint64_t kPageBytes = 4096;

// A file without its name, which the caller does not tell. Opening it again gives kvferry a descriptor of its
// own with the access that it needs: the caller's is often write-only.
std::string path_of(int descriptor) { return "/proc/self/fd/" + std::to_string(descriptor); }

std::string name_of(int descriptor) {
    char name[4096];
    const ssize_t len = ::readlink(path_of(descriptor).c_str(), name, sizeof name);
    if (len <= 0) return "descriptor " + std::to_string(descriptor);
    return std::string(name, static_cast<std::size_t>(len));
}

void replace(std::string &text, std::string const &from, std::string const &to) {
    for (std::size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size())
        text.replace(at, from.size(), to);
}

// Pairs are counted per transfer: the number says nothing to the caller.
void remove_pair(std::string &text) {
    const std::size_t begin = text.find(", pair=");
    if (begin == std::string::npos) return;
    const std::size_t end = text.find_first_not_of("0123456789", begin + std::strlen(", pair="));
    text.erase(begin, end == std::string::npos ? end : end - begin);
}

std::string advice(int code, bool is_offload) {
    switch (code) {
        case KVFERRY_OUT_OF_BOUNDS:
            return "the file does not hold the whole block: remove it, and compute the block again";
        case KVFERRY_FORKED:
            return "the agent belongs to the parent process: create one after the fork";
        case KVFERRY_DEADLINE:
            return "the device is too slow or does not answer: check it, or set KVFERRY_TIMEOUT_MS";
        case KVFERRY_IO:
            return is_offload ? "check free space, quota and permissions of its folder, and its disk"
                              : "check the permissions of the file, and its disk";
        default:
            return "see KVFERRY_LOG=debug for more";
    }
}

}  // namespace

Request::Request(kvferry_agent const *agent, trt::MemoryDescs const &memory, trt::FileDescs const &files,
                 bool is_offload, unsigned parts_max)
    : agent_(agent),
      blocks_(memory.getDescs()),
      descs_(files.getDescs()),
      type_(memory.getType()),
      is_offload_(is_offload),
      parts_max_(parts_max) {}

void Request::run() {
    check();
    files_.resize(blocks_.size());
    for (std::size_t index = 0; index < blocks_.size(); index++)
        if (blocks_[index].getLen() != 0) open_file(index);
    register_memory();
    if (type_ == trt::MemoryType::kVRAM) return transfer_through_stage();
    fill_batches();
    transfer();
}

void Request::check() const {
    if (blocks_.size() != descs_.size())
        throw std::runtime_error(std::to_string(blocks_.size()) + " blocks of memory and " +
                                 std::to_string(descs_.size()) + " files: pass one file for each block");
    if (!blocks_.empty() && type_ != trt::MemoryType::kDRAM && type_ != trt::MemoryType::kVRAM)
        throw std::runtime_error("memory of type " + std::to_string(static_cast<int>(type_)) +
                                 ": pass host memory (kDRAM) or device memory (kVRAM)");
    for (std::size_t index = 0; index < blocks_.size(); index++) {
        const auto &block = blocks_[index];
        if (block.getLen() == 0) continue;
        if (block.getAddr() == 0) fail(index, "its block has the address 0: pass the block's memory");
        if (block.getLen() > UINTPTR_MAX - block.getAddr())
            fail(index, "its block ends beyond the address space: pass its length in bytes");
        check_descriptor(index);
    }
}

// For all files before one is opened: a file that kvferry opens takes the number of one that was closed.
void Request::check_descriptor(std::size_t index) const {
    const int flags = ::fcntl(descriptor(index), F_GETFL);
    if (flags < 0)
        fail(index, std::string("the descriptor is not open (") + std::strerror(errno) +
                        "): keep the FileDescs until the call returns");
    if ((flags & O_ACCMODE) == (is_offload_ ? O_RDONLY : O_WRONLY))
        fail(index, is_offload_ ? "opened for reading: open it with O_WRONLY or O_RDWR"
                                : "opened for writing: open it with O_RDONLY or O_RDWR");
}

void Request::open_file(std::size_t index) {
    kvferry_file_options options{};
    options.size = sizeof options;
    options.write = is_offload_;
    options.len = blocks_[index].getLen();
    Error error;
    kvferry_file *file = nullptr;
    const std::string path = path_of(descriptor(index));
    if (kvferry_file_open(agent_, path.c_str(), &options, &file, &error) != KVFERRY_OK) fail(error);
    files_[index].reset(file);
}

// Only for this request: the caller may reuse its addresses for other memory afterwards.
void Request::register_memory() {
    for (const auto &block : blocks_)
        if (block.getLen() != 0) regions_.push_back({block.getAddr(), block.getAddr() + block.getLen(), nullptr});
    std::sort(regions_.begin(), regions_.end(), [](auto const &a, auto const &b) { return a.begin < b.begin; });
    std::size_t used = 0;
    for (auto const &region : regions_) {
        if (used != 0 && region.begin < regions_[used - 1].end)
            regions_[used - 1].end = std::max(regions_[used - 1].end, region.end);
        else
            regions_[used++] = region;
    }
    regions_.resize(used);
    for (auto &region : regions_) {
        Error error;
        void *const memory = reinterpret_cast<void *>(region.begin);
        const std::size_t len = region.end - region.begin;
        if (type_ == trt::MemoryType::kVRAM) {
            if (kvferry_region_register_cuda(agent_, region.begin, len, -1, KVFERRY_ACCESS_NONE, nullptr,
                                             &region.handle, &error) != KVFERRY_OK)
                throw std::runtime_error(std::string("the blocks are not in device memory (kVRAM) that the CUDA driver "
                                                     "knows: ") +
                                         error.text + "; for host memory set the transfer mode to DRAM");
        } else if (kvferry_region_register(agent_, memory, len, KVFERRY_ACCESS_NONE, nullptr, &region.handle,
                                           &error) != KVFERRY_OK) {
            fail(error);
        }
    }
}

Request::Region const &Request::region_of(std::size_t index) const {
    const auto is_before = [](std::uintptr_t address, Region const &region) { return address < region.begin; };
    const auto after = std::upper_bound(regions_.begin(), regions_.end(), blocks_[index].getAddr(), is_before);
    return *std::prev(after);
}

void Request::fill_batches() {
    std::uint64_t total = 0;
    for (const auto &block : blocks_) total += block.getLen();
    const std::uint64_t parts = std::clamp<std::uint64_t>(total / kPartBytesMin, 1, parts_max_);
    const std::uint64_t share = total / parts;
    std::uint64_t room = 0;
    for (std::size_t index = 0; index < blocks_.size(); index++) {
        const std::uint64_t len = blocks_[index].getLen();
        for (std::uint64_t at = 0; at < len;) {
            Error error;
            if (room == 0) {
                kvferry_batch *batch = nullptr;
                if (kvferry_batch_new(blocks_.size(), &batch, &error) != KVFERRY_OK) fail(error);
                batches_.emplace_back(batch);
                room = batches_.size() < parts ? share : UINT64_MAX;
            }
            std::uint64_t take = std::min(len - at, room);
            if (take < len - at) take -= take % kPageBytes;
            if (take == 0) {
                room = 0;
                continue;
            }
            kvferry_remote remote{};
            if (kvferry_file_remote(files_[index].get(), &remote, &error) != KVFERRY_OK) fail(error);
            const Region &region = region_of(index);
            const kvferry_range range{blocks_[index].getAddr() - region.begin + at, at, take};
            if (kvferry_batch_push(batches_.back().get(), region.handle, &remote, &range, 1, &error) != KVFERRY_OK)
                fail(error);
            at += take;
            room -= take;
        }
    }
}

// The caller's thread moves the first part, threads of the agent move the others.
void Request::transfer() {
    if (batches_.empty()) return;
    const auto start = is_offload_ ? kvferry_file_write_async : kvferry_file_read_async;
    const auto move = is_offload_ ? kvferry_file_write : kvferry_file_read;
    has_begun_ = true;
    for (std::size_t part = 1; part < batches_.size(); part++) {
        Error error;
        kvferry_transfer *transfer = nullptr;
        if (start(agent_, batches_[part].get(), nullptr, &transfer, &error) != KVFERRY_OK) fail(error);
        transfers_.emplace_back(transfer);
    }
    Error first;
    int code = move(agent_, batches_[0].get(), nullptr, nullptr, &first);
    for (auto const &transfer : transfers_) {
        Error error;
        const int ended = kvferry_transfer_wait(transfer.get(), UINT64_MAX, nullptr, &error);
        if (code == KVFERRY_OK && ended != KVFERRY_OK) {
            code = ended;
            first = error;
        }
    }
    if (code != KVFERRY_OK) fail(first);
}

void Request::open_stage() {
    std::uint64_t total = 0;
    for (const auto &block : blocks_) total += (block.getLen() + kPageBytes - 1) / kPageBytes * kPageBytes;
    Error error;
    char address[300];
    kvferry_peer *self = nullptr;
    if (kvferry_region_allocate(agent_, std::min(total, kStageBytes), KVFERRY_ACCESS_READ | KVFERRY_ACCESS_WRITE,
                                nullptr, &stage_, &error) != KVFERRY_OK ||
        kvferry_region_remote(stage_, &stage_remote_, &error) != KVFERRY_OK ||
        kvferry_agent_address(agent_, address, sizeof address, &error) != KVFERRY_OK ||
        kvferry_peer_open(agent_, address, &self, &error) != KVFERRY_OK)
        fail(error);
    self_.reset(self);
}

// Moves blocks of device memory to or from files through host memory: there is no direct way.
void Request::transfer_through_stage() {
    if (regions_.empty()) return;
    open_stage();
    has_begun_ = true;
    std::uint64_t used = 0;
    for (std::size_t index = 0; index < blocks_.size(); index++) {
        const std::uint64_t len = blocks_[index].getLen();
        for (std::uint64_t at = 0; at < len;) {
            if (used == kStageBytes) {
                move_staged();
                used = 0;
            }
            const std::uint64_t take = std::min(len - at, kStageBytes - used);
            staged_.push_back({index, at, take, used});
            at += take;
            used += (take + kPageBytes - 1) / kPageBytes * kPageBytes;
        }
    }
    move_staged();
}

// Moves the parts in the stage's list. The caller has waited for the work that uses the device memory, as for NIXL's
// agent.
void Request::move_staged() {
    Error error;
    kvferry_batch *made[2] = {};
    for (auto &batch : made) {
        if (kvferry_batch_new(staged_.size(), &batch, &error) != KVFERRY_OK) fail(error);
        batches_.emplace_back(batch);
    }
    for (auto const &part : staged_) {
        const Region &region = region_of(part.index);
        const kvferry_range on_device{blocks_[part.index].getAddr() - region.begin + part.at, part.place, part.len};
        const kvferry_range in_file{part.place, part.at, part.len};
        kvferry_remote file{};
        if (kvferry_file_remote(files_[part.index].get(), &file, &error) != KVFERRY_OK ||
            kvferry_batch_push(made[0], region.handle, &stage_remote_, &on_device, 1, &error) != KVFERRY_OK ||
            kvferry_batch_push(made[1], stage_, &file, &in_file, 1, &error) != KVFERRY_OK)
            fail(error);
    }
    const kvferry_after host{KVFERRY_AFTER_HOST, 0, 0};
    kvferry_transfer_options options{};
    options.size = sizeof options;
    options.after = &host;
    options.after_count = 1;
    const int code =
        is_offload_ ? (kvferry_write(self_.get(), made[0], &options, nullptr, &error) != KVFERRY_OK ||
                       kvferry_file_write(agent_, made[1], nullptr, nullptr, &error) != KVFERRY_OK)
                    : (kvferry_file_read(agent_, made[1], nullptr, nullptr, &error) != KVFERRY_OK ||
                       kvferry_read(self_.get(), made[0], &options, nullptr, &error) != KVFERRY_OK);
    if (code != 0) fail(error);
    batches_.clear();
    staged_.clear();
}

std::string Request::release(std::vector<kvferry_region *> &left) {
    transfers_.clear();
    batches_.clear();
    self_.reset();
    std::string problem;
    for (auto &region : regions_) {
        Error error;
        if (region.handle == nullptr || kvferry_region_unregister(region.handle, &error) == KVFERRY_OK) continue;
        problem = std::string("; the memory could not be released, do not reuse it: ") + error.text;
    }
    // The handle of a quarantined region stays, and keeps the memory.
    if (stage_ != nullptr && kvferry_region_unregister(stage_, nullptr) == KVFERRY_QUARANTINED) left.push_back(stage_);
    stage_ = nullptr;
    regions_.clear();
    files_.clear();
    return problem;
}

std::string Request::discard() {
    if (!is_offload_ || !has_begun_) return {};
    std::string problem;
    for (std::size_t index = 0; index < descs_.size(); index++) {
        struct stat facts;
        const int fd = descriptor(index);
        if (blocks_[index].getLen() == 0 || ::fstat(fd, &facts) != 0 || !S_ISREG(facts.st_mode)) continue;
        if (::ftruncate(fd, 0) != 0) problem += "; remove " + describe(index) + ": it may hold a part of a block";
    }
    return problem.empty() ? "; the files of the request were emptied" : problem;
}

int Request::descriptor(std::size_t index) const { return static_cast<int>(descs_[index].getFd()); }

std::string Request::describe(std::size_t index) const {
    return "the file at index " + std::to_string(index) + " (" + name_of(descriptor(index)) + ")";
}

void Request::fail(std::size_t index, std::string const &reason) const {
    throw std::runtime_error(describe(index) + ": " + reason);
}

// kvferry's text names the path that we gave it.
void Request::fail(kvferry_error const &error) const {
    std::string text = error.text;
    remove_pair(text);
    std::string which;
    for (std::size_t index = 0; index < descs_.size() && which.empty(); index++) {
        const std::string path = path_of(descriptor(index));
        const std::size_t at = text.find(path);
        if (at == std::string::npos || std::isdigit(static_cast<unsigned char>(text[at + path.size()]))) continue;
        which = describe(index) + ": ";
        replace(text, "file=" + path + ", ", "");
        replace(text, "(file=" + path + ")", "");
        replace(text, path, name_of(descriptor(index)));
    }
    throw std::runtime_error(which + text + ": " + advice(error.code, is_offload_));
}

}  // namespace kvferry_loopback
