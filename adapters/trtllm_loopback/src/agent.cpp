// The agent that TensorRT-LLM loads by name to offload blocks to files and to onboard them.
#include <algorithm>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <vector>

#include "request.h"

namespace kvferry_loopback {

namespace {

// Transfers of one request at a time, if the configuration asks for several threads. One runs on the caller's.
constexpr unsigned kPartsMax = 4;
// The most stages that devices which do not answer may keep: 256 MiB.
constexpr std::size_t kLeftMax = 4;

class LoopbackAgent final : public trt::BaseLoopbackAgent {
public:
    explicit LoopbackAgent(trt::BaseAgentConfig const &config)
        : name_(config.mName), parts_max_(config.multiThread ? kPartsMax : 1) {
        kvferry_agent_options options{};
        options.size = sizeof options;
        options.name = name_.empty() ? nullptr : name_.c_str();
        // Nobody connects to this agent: it does not take the port that the environment has for another one.
        options.listen = "127.0.0.1:0";
        options.io_threads = parts_max_ > 1 ? parts_max_ - 1 : 1;
        Error error;
        kvferry_agent *agent = nullptr;
        if (kvferry_agent_start(&options, &agent, &error) != KVFERRY_OK)
            throw std::runtime_error("kvferry's agent '" + name_ + "' can't start: " + error.text);
        agent_.reset(agent);
    }

    void executeLoopbackRequest(trt::MemoryDescs const &memory, trt::FileDescs const &files, bool is_offload) override {
        // One request at a time: two that name the same memory could not both register it.
        const std::lock_guard<std::mutex> lock(mutex_);
        release_left();
        if (memory.getType() == trt::MemoryType::kVRAM && left_.size() >= kLeftMax)
            throw std::runtime_error("kvferry's agent '" + name_ + "' has host memory for " +
                                     std::to_string(kLeftMax) +
                                     " requests of device memory, and files that do not answer keep all of it: check "
                                     "their disk");
        Request request(agent_.get(), memory, files, is_offload, parts_max_);
        std::string reason;
        try {
            request.run();
        } catch (std::exception const &problem) {
            reason = problem.what();
        }
        const bool has_failed = !reason.empty();
        reason += request.release(left_);
        if (has_failed) reason += request.discard();
        if (reason.empty()) return;
        throw std::runtime_error("kvferry's agent '" + name_ + "' can't " + (is_offload ? "offload " : "onboard ") +
                                 std::to_string(memory.getDescs().size()) + " blocks: " + reason);
    }

private:
    // Releases the stages whose device has answered since. Does not wait.
    void release_left() {
        const auto is_released = [](kvferry_region *stage) {
            kvferry_region_info info{};
            info.size = sizeof info;
            if (kvferry_region_facts(stage, &info, nullptr) != KVFERRY_OK) return true;
            return info.quarantined == 0 && kvferry_region_unregister(stage, nullptr) == KVFERRY_OK;
        };
        left_.erase(std::remove_if(left_.begin(), left_.end(), is_released), left_.end());
    }

    std::string const name_;
    unsigned const parts_max_;
    std::mutex mutex_;
    Agent agent_;
    // Stages of failed requests, which files that do not answer still use.
    std::vector<kvferry_region *> left_;
};

}  // namespace

}  // namespace kvferry_loopback

#ifdef __clang__
#pragma clang diagnostic ignored "-Wreturn-type-c-linkage"
#endif

namespace tensorrt_llm::executor::kv_cache {

extern "C" __attribute__((visibility("default"))) std::shared_ptr<BaseLoopbackAgent> createNixlLoopbackAgent(
    BaseAgentConfig const *config) {
    if (config == nullptr) throw std::runtime_error("createNixlLoopbackAgent: the configuration is NULL");
    return std::make_shared<kvferry_loopback::LoopbackAgent>(*config);
}

}  // namespace tensorrt_llm::executor::kv_cache
