// TensorRT-LLM's declarations that the agent needs: names and layouts of executor/transferAgent.h, as they
// have been since 2025-09. With KVFERRY_TRTLLM_HEADERS the real header is compiled instead.
#pragma once

#ifdef KVFERRY_TRTLLM_HEADERS
#include "tensorrt_llm/executor/transferAgent.h"
#else

#include <fcntl.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace tensorrt_llm::executor::kv_cache {

enum class MemoryType : std::uint8_t { kDRAM, kVRAM, kBLK, kOBJ, kFILE };

class MemoryDesc {
public:
    MemoryDesc(void *address, std::size_t len, std::uint32_t device)
        : address_(reinterpret_cast<std::uintptr_t>(address)), len_(len), device_(device) {}

    std::uintptr_t getAddr() const noexcept { return address_; }
    std::size_t getLen() const noexcept { return len_; }
    std::uint32_t getDeviceId() const noexcept { return device_; }

private:
    std::uintptr_t address_;
    std::size_t len_;
    std::uint32_t device_;
};

class MemoryDescs {
public:
    MemoryDescs(MemoryType type, std::vector<MemoryDesc> descs) : type_(type), descs_(std::move(descs)) {}

    MemoryType getType() const noexcept { return type_; }
    std::vector<MemoryDesc> const &getDescs() const noexcept { return descs_; }

private:
    MemoryType type_;
    std::vector<MemoryDesc> descs_;
};

// Owns its descriptor.
class FileDesc {
public:
    FileDesc(std::string const &path, int flags, mode_t mode, std::size_t len)
        : fd_(::open(path.c_str(), flags, mode)), len_(len) {
        if (fd_ < 0) throw std::runtime_error("can't open " + path);
    }
    FileDesc(FileDesc &&other) noexcept : fd_(std::exchange(other.fd_, -1)), len_(std::exchange(other.len_, 0)) {}
    FileDesc &operator=(FileDesc &&other) noexcept {
        std::swap(fd_, other.fd_);
        std::swap(len_, other.len_);
        return *this;
    }
    ~FileDesc() {
        if (fd_ != -1) ::close(fd_);
    }

    std::uint64_t getFd() const noexcept { return static_cast<std::uint64_t>(fd_); }
    std::size_t getLen() const noexcept { return len_; }

private:
    int fd_;
    std::size_t len_;
};

class FileDescs {
public:
    explicit FileDescs(std::vector<FileDesc> &&descs) : descs_(std::move(descs)) {}

    std::vector<FileDesc> const &getDescs() const noexcept { return descs_; }

private:
    std::vector<FileDesc> descs_;
};

// The part that all versions have. Newer ones go on behind it, and the oldest has only the first two flags:
// so never copy a configuration that TensorRT-LLM made.
struct BaseAgentConfig {
    std::string mName;
    bool useProgThread;
    bool multiThread;
    bool useListenThread;
    bool enableTelemetry;
};

class BaseLoopbackAgent {
public:
    virtual ~BaseLoopbackAgent() = default;
    virtual void executeLoopbackRequest(MemoryDescs const &memory, FileDescs const &files, bool isOffload) = 0;
};

}  // namespace tensorrt_llm::executor::kv_cache

#endif

// What the compiled TensorRT-LLM has: x86-64 or aarch64, libstdc++ with its C++11 ABI.
namespace tensorrt_llm::executor::kv_cache {
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Winvalid-offsetof"
static_assert(sizeof(std::string) == 32, "compile with -D_GLIBCXX_USE_CXX11_ABI=1");
static_assert(sizeof(MemoryType) == 1 && sizeof(MemoryDesc) == 24 && sizeof(MemoryDescs) == 32);
static_assert(sizeof(FileDesc) == 16 && sizeof(FileDescs) == 24);
static_assert(sizeof(BaseAgentConfig) >= 40 && offsetof(BaseAgentConfig, mName) == 0);
static_assert(offsetof(BaseAgentConfig, useProgThread) == 32 && offsetof(BaseAgentConfig, multiThread) == 33);
static_assert(sizeof(BaseLoopbackAgent) == sizeof(void *) && sizeof(std::shared_ptr<BaseLoopbackAgent>) == 16);
#pragma GCC diagnostic pop
}  // namespace tensorrt_llm::executor::kv_cache
