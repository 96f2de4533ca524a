// How TensorRT-LLM gets at the agent: dlopen by a fixed name, dlsym, and dlclose when the process ends.
#pragma once

#include <dlfcn.h>

#include <stdexcept>
#include <string>
#include <unordered_map>

#include "../src/interface.h"

namespace trt = tensorrt_llm::executor::kv_cache;

constexpr const char *kLibrary = "libtensorrt_llm_nixl_wrapper.so";

class Loader {
public:
    static Loader &instance() {
        static Loader loader;
        return loader;
    }

    ~Loader() {
        for (auto const &entry : handles_) dlclose(entry.second);
    }

    // NULL if neither the library nor what it depends on has the function.
    template <typename Function>
    Function find(const char *name) {
        return reinterpret_cast<Function>(dlsym(handle(kLibrary), name));
    }

    void *handle(std::string const &name) {
        const auto known = handles_.find(name);
        if (known != handles_.end()) return known->second;
        void *const handle = dlopen(name.c_str(), RTLD_LAZY);
        if (handle == nullptr) throw std::runtime_error(dlerror());
        handles_[name] = handle;
        return handle;
    }

private:
    std::unordered_map<std::string, void *> handles_;
};

using Agent = std::shared_ptr<trt::BaseLoopbackAgent>;

inline Agent make_agent(bool multi_thread, const char *name = "GDSAgent") {
    const auto create = Loader::instance().find<Agent (*)(trt::BaseAgentConfig const *)>("createNixlLoopbackAgent");
    if (create == nullptr) throw std::runtime_error("createNixlLoopbackAgent is not in the library");
    const trt::BaseAgentConfig config{name, true, multi_thread, false, false};
    return create(&config);
}
