// What RTP-LLM's tests expect of a transfer back-end, on two processes.
// `rtp_llm_test` runs every case on host memory, `rtp_llm_test NAME` one, `rtp_llm_test gpu` those on a GPU.
#include "gpu_cases.h"
#include "peer_cases.h"
#include "task_cases.h"

int main(int count, char** arguments) {
    if (count > 1 && std::string(arguments[1]) == "peer") return test::servePeer();
    std::string only = count > 1 ? arguments[1] : "";
    auto cases = test::taskCases();
    for (const test::Case& one : test::peerCases()) cases.push_back(one);
    if (only == "gpu") {
        cases = test::gpuCases();
        only.clear();
    }
    int ran = 0;
    for (const test::Case& one : cases) {
        if (!only.empty() && only != one.name) continue;
        setenv("KVFERRY_LISTEN", "127.0.0.1:0", 1);
        unsetenv("KVFERRY_TRANSPORTS");
        setenv("KVFERRY_SILENCE_MS", test::kNoSilenceMs, 1);
        const int64_t began = test::wallClockMs();
        one.run();
        std::printf("%5lld ms  %s\n", static_cast<long long>(test::wallClockMs() - began), one.name);
        std::fflush(stdout);
        ran++;
    }
    CHECK(ran > 0);
    return 0;
}
