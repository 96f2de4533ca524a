// What the cases share.
#pragma once

#include "peer.h"

namespace test {

struct Case {
    const char* name;
    void (*run)();
};
#define CASE(name) {#name, name}

constexpr size_t kBlock = 4096;
inline const Blocks kOne = {{1, {{0, kBlock}}}};
inline const Blocks kBig = {{1, {{0, kMemory}}}};

// The only transfers in the program that the kernel does not finish while the peer is stopped.
inline void useTcp() { setenv("KVFERRY_TRANSPORTS", "tcp", 1); }

inline bool holdsNothing(Side& side) {
    return eventually([&] {
        const kvferry_task_gauges held = side.held();
        return held.sends + held.receives + held.parked + held.reads == 0;
    });
}

// Drops a task and checks that neither process holds anything.
inline void end(Side& side, Peer& peer, const std::string& key, IKVCacheRecvTaskPtr& task) {
    side.receiver().stealTask(key);
    task.reset();
    CHECK(holdsNothing(side) && peer.holdsNothing());
}

inline bool isDone(const IKVCacheRecvTaskPtr& task) {
    return eventually([&] { return task->done(); });
}

inline Code endOf(const IKVCacheRecvTaskPtr& task) {
    CHECK(isDone(task));
    CHECK(task->success() == (task->errorCode() == Code::OK));
    return task->errorCode();
}

// A receive task whose memory is being written, by reads from a process that is stopped.
inline IKVCacheRecvTaskPtr stalled(Side& side, Peer& sender, int64_t timeout_ms = kLongMs) {
    sender.send("s", side.address(), "k", kBig);
    CHECK(eventually([&] { return side.held().parked == 1; }));
    sender.stop();
    auto task = side.recv("k", kBig, timeout_ms);
    CHECK(eventually([&] { return side.held().reads == 1; }));
    CHECK(!task->done() && !task->success());
    return task;
}

}  // namespace test
