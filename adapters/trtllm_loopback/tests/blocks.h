// Blocks of memory and their files.
#pragma once

#include <sys/stat.h>

#include <cstring>
#include <fstream>
#include <iterator>

#include "../../../crates/kvferry-capi/tests/c/check.h"
#include "loader.h"

using Bytes = std::vector<unsigned char>;

class Blocks {
public:
    // `shift` bytes behind an address that is aligned to pages.
    Blocks(std::string folder, std::vector<std::size_t> lens, std::size_t shift = 0)
        : folder_(std::move(folder)), lens_(std::move(lens)) {
        std::size_t total = shift;
        for (const std::size_t len : lens_) {
            offsets_.push_back(total);
            total += (len + 4095) / 4096 * 4096;
        }
        bytes_ = static_cast<unsigned char *>(std::aligned_alloc(4096, (total + 8191) / 4096 * 4096));
        CHECK(bytes_ != nullptr);
    }
    Blocks(Blocks const &) = delete;
    Blocks &operator=(Blocks const &) = delete;
    ~Blocks() { std::free(bytes_); }

    std::size_t size() const { return lens_.size(); }
    unsigned char *at(std::size_t index) const { return bytes_ + offsets_[index]; }
    std::string path(std::size_t index) const { return folder_ + "/block_" + std::to_string(index) + ".bin"; }

    trt::MemoryDescs memory(trt::MemoryType type = trt::MemoryType::kDRAM) const {
        std::vector<trt::MemoryDesc> descs;
        for (std::size_t i = 0; i < size(); i++) descs.emplace_back(at(i), lens_[i], 0);
        return {type, std::move(descs)};
    }

    // As TensorRT-LLM opens them.
    trt::FileDescs files(bool is_offload, std::size_t count = SIZE_MAX) const {
        std::vector<trt::FileDesc> descs;
        const int flags = is_offload ? O_CREAT | O_WRONLY : O_RDONLY;
        for (std::size_t i = 0; i < std::min(size(), count); i++) descs.emplace_back(path(i), flags, 0664, lens_[i]);
        return trt::FileDescs(std::move(descs));
    }

    void fill(unsigned seed) const {
        for (std::size_t i = 0; i < size(); i++) ::fill(at(i), lens_[i], seed + static_cast<unsigned>(i));
    }
    void clear() const {
        for (std::size_t i = 0; i < size(); i++) std::memset(at(i), 0xee, lens_[i]);
    }
    void check_memory(unsigned seed) const {
        for (std::size_t i = 0; i < size(); i++) CHECK(is_filled(at(i), lens_[i], seed + static_cast<unsigned>(i)));
    }
    void check_files(unsigned seed) const {
        for (std::size_t i = 0; i < size(); i++) {
            const Bytes bytes = contents(i);
            CHECK(bytes.size() == lens_[i] && is_filled(bytes.data(), lens_[i], seed + static_cast<unsigned>(i)));
        }
    }
    Bytes contents(std::size_t index) const {
        std::ifstream file(path(index), std::ios::binary);
        CHECK(file.good());
        return Bytes(std::istreambuf_iterator<char>(file), {});
    }
    void remove() const {
        for (std::size_t i = 0; i < size(); i++) CHECK(::unlink(path(i).c_str()) == 0);
    }

private:
    std::string folder_;
    std::vector<std::size_t> lens_, offsets_;
    unsigned char *bytes_;
};

// The exception's text; the request must fail.
inline std::string refusal(Agent const &agent, trt::MemoryDescs const &memory, trt::FileDescs const &files,
                           bool is_offload) {
    try {
        agent->executeLoopbackRequest(memory, files, is_offload);
    } catch (std::exception const &problem) {
        return problem.what();
    }
    return "no exception";
}

inline void check_says(std::string const &text, std::vector<std::string> const &words) {
    for (auto const &word : words) {
        if (text.find(word) != std::string::npos) continue;
        std::fprintf(stderr, "'%s' is not in: %s\n", word.c_str(), text.c_str());
        std::exit(1);
    }
}

inline std::size_t handles_in_use() {
    const auto count = Loader::instance().find<std::size_t (*)()>("kvferry_handles_in_use");
    CHECK(count != nullptr);
    return count();
}
