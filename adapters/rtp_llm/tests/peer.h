// The other process: a side that does what lines on its standard input say, and answers with lines.
#pragma once

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <iostream>
#include <sstream>

#include "side.h"

namespace test {

inline std::string spelled(const Blocks& blocks) {
    std::ostringstream text;
    text << blocks.size();
    for (const auto& [key, ranges] : blocks) {
        text << ' ' << key << ' ' << ranges.size();
        for (const Range& range : ranges) text << ' ' << range.offset << ' ' << range.len;
    }
    return text.str();
}

inline Blocks parsed(std::istream& text) {
    Blocks blocks;
    size_t count = 0, ranges = 0;
    int64_t key = 0;
    text >> count;
    while (count-- > 0) {
        text >> key >> ranges;
        auto& parts = blocks[key];
        for (; ranges > 0; ranges--) {
            Range range{};
            text >> range.offset >> range.len;
            parts.push_back(range);
        }
    }
    CHECK(!text.fail());
    return blocks;
}

// What the other process runs.
inline int servePeer() {
    Side side;
    side.fill(0, kMemory, 1);
    std::map<std::string, IKVCacheRecvTaskPtr> tasks;
    std::cout << side.address() << std::endl;
    for (std::string line; std::getline(std::cin, line);) {
        std::istringstream words(line);
        std::string verb, name, address, key;
        int64_t timeout_ms = 0;
        words >> verb >> name;
        if (verb == "send") {
            words >> address >> key >> timeout_ms;
            side.send(name, address, key, parsed(words), timeout_ms);
            std::cout << "ok";
        } else if (verb == "outcome") {
            const Outcome outcome = side.outcome(name);
            std::cout << static_cast<int>(outcome.code) << ' ' << outcome.calls << ' ' << outcome.text;
        } else if (verb == "recv") {
            words >> timeout_ms;
            tasks[name] = side.recv(name, parsed(words), timeout_ms);
            std::cout << (tasks[name] ? "ok" : "none");
        } else if (verb == "cancel") {
            tasks.at(name)->cancel();
            std::cout << "ok";
        } else if (verb == "task") {
            CHECK(eventually([&] { return tasks.at(name)->done(); }));
            const auto& task = tasks.at(name);
            std::cout << static_cast<int>(task->errorCode()) << " 1 " << task->errorMessage();
        } else if (verb == "drop") {
            side.receiver().stealTask(name);
            tasks.erase(name);
            std::cout << "ok";
        } else if (verb == "filled") {
            size_t offset = 0, len = 0;
            unsigned seed = 0;
            words >> offset >> len >> seed;
            std::cout << side.filled(offset, len, seed);
        } else if (verb == "held") {
            const kvferry_task_gauges held = side.held();
            std::cout << held.sends << ' ' << held.receives << ' ' << held.parked << ' ' << held.reads;
        } else {
            std::cout << "unknown";
        }
        std::cout << std::endl;
    }
    return 0;
}

// The other process as the test sees it.
class Peer {
public:
    Peer() {
        int in[2], out[2];
        CHECK(pipe2(in, O_CLOEXEC) == 0 && pipe2(out, O_CLOEXEC) == 0);
        pid_ = fork();
        CHECK(pid_ >= 0);
        if (pid_ == 0) {
            dup2(in[0], 0);
            dup2(out[1], 1);
            execl("/proc/self/exe", "rtp_llm_test", "peer", static_cast<char*>(nullptr));
            _exit(127);
        }
        close(in[0]);
        close(out[1]);
        to_ = fdopen(in[1], "w");
        from_ = fdopen(out[0], "r");
        CHECK(to_ && from_);
        address_ = line();
    }
    Peer(const Peer&) = delete;
    Peer& operator=(const Peer&) = delete;
    ~Peer() {
        std::fclose(to_);
        std::fclose(from_);
        int status = 0;
        if (pid_ > 0) CHECK(waitpid(pid_, &status, 0) == pid_ && status == 0);
    }

    const std::string& address() const { return address_; }

    std::string ask(const std::string& command) {
        CHECK(std::fprintf(to_, "%s\n", command.c_str()) > 0 && std::fflush(to_) == 0);
        return line();
    }

    void send(const std::string& name, const std::string& address, const std::string& key, const Blocks& blocks,
              int64_t timeout_ms = kLongMs) {
        const std::string time = std::to_string(timeout_ms);
        CHECK(ask("send " + name + ' ' + address + ' ' + key + ' ' + time + ' ' + spelled(blocks)) == "ok");
    }
    Outcome outcome(const std::string& name) { return end(ask("outcome " + name)); }
    void recv(const std::string& key, const Blocks& blocks, int64_t timeout_ms = kLongMs) {
        CHECK(ask("recv " + key + ' ' + std::to_string(timeout_ms) + ' ' + spelled(blocks)) == "ok");
    }
    Outcome task(const std::string& key) { return end(ask("task " + key)); }
    // Sends, receive tasks, offers without a task and reads that the process holds.
    bool holdsNothing() {
        return eventually([&] { return ask("held -") == "0 0 0 0"; });
    }

    void stop() {
        int status = 0;
        CHECK(::kill(pid_, SIGSTOP) == 0 && waitpid(pid_, &status, WUNTRACED) == pid_ && WIFSTOPPED(status));
    }
    void resume() { CHECK(::kill(pid_, SIGCONT) == 0); }
    void kill() {
        int status = 0;
        CHECK(::kill(pid_, SIGKILL) == 0 && waitpid(pid_, &status, 0) == pid_ && WIFSIGNALED(status));
        pid_ = 0;
    }

private:
    std::string line() {
        std::string text;
        for (int next = std::fgetc(from_); next != '\n'; next = std::fgetc(from_)) {
            CHECK(next != EOF);
            text.push_back(static_cast<char>(next));
        }
        return text;
    }
    static Outcome end(const std::string& text) {
        std::istringstream words(text);
        int code = -1;
        Outcome outcome{};
        words >> code >> outcome.calls;
        std::getline(words >> std::ws, outcome.text);
        outcome.code = static_cast<Code>(code);
        return outcome;
    }

    pid_t pid_ = 0;
    FILE* to_ = nullptr;
    FILE* from_ = nullptr;
    std::string address_;
};

}  // namespace test
