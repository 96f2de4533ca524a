// Tasks between two processes that both live. The numbers are those of the table in README.md.
#pragma once

#include <atomic>

#include "cases.h"

namespace test {

// S1
inline void memory_is_registered_by_both_halves_and_only_as_it_is() {
    Side side;
    CHECK(side.sender().regMem(side.at({0, kMemory})) && side.receiver().regMem(side.at({0, kMemory})));
    CHECK(!side.sender().regMem(side.at({0, kBlock})) && !side.receiver().regMem({}));
    BlockInfo device = side.at({0, kMemory});
    device.is_cuda = true;
    CHECK(!side.sender().regMem(device));
}

// S3, V2, V9, V10, V14
inline void both_orders_of_arrival_bring_the_bytes_that_the_receiver_asks_for() {
    for (const char* transport : {"tcp", "local"}) {
        setenv("KVFERRY_TRANSPORTS", transport, 1);
        Side side;
        Peer peer;
        // 128 blocks of three parts, one of them not there; the receiver wants every other block and not the last part.
        Blocks from, to;
        for (size_t i = 0; i < 128; i++) {
            const size_t at = 3 * i * kBlock;
            from[static_cast<int64_t>(i) - 64] = {{at, kBlock}, {0, 0}, {at + kBlock, kBlock / 2}};
            if (i % 2 == 0) to[static_cast<int64_t>(i) - 64] = {{at, kBlock}, {0, 0}, {0, 0}};
        }
        for (const bool sender_first : {true, false}) {
            std::memset(side.memory(), 0, kMemory);
            IKVCacheRecvTaskPtr task;
            if (!sender_first) task = side.recv("k", to);
            CHECK(sender_first || !task->done());
            peer.send(sender_first ? "a" : "b", side.address(), "k", from);
            if (sender_first) {
                CHECK(eventually([&] { return side.held().parked == 1; }));
                task = side.recv("k", to);
            }
            CHECK(endOf(task) == Code::OK && task->errorMessage().empty());
            const Outcome outcome = peer.outcome(sender_first ? "a" : "b");
            CHECK(outcome.code == Code::OK && outcome.calls == 1 && outcome.text.empty());
            for (size_t i = 0; i < 128; i++) {
                const size_t at = 3 * i * kBlock;
                CHECK(side.filled(at, kBlock, 1) == (i % 2 == 0));
                CHECK(side.memory()[at + kBlock] == 0);
            }
            // An end is final.
            task->cancel();
            task->forceCancel();
            CHECK(task->success() && task->errorCode() == Code::OK);
            end(side, peer, "k", task);
        }
    }
}

// S4, S5, S6, S7, V14, V17
inline void a_mismatch_names_the_block_and_both_ends_say_the_same() {
    Side side;
    Peer peer;
    const std::vector<std::pair<Blocks, std::string>> cases = {
        {{{1, {{0, kBlock + 1}}}}, "block 1"},
        {{{1, {{0, kBlock}}}, {42, {{kBlock, kBlock}}}}, "block 42"},
        {{{1, {{0, kBlock}, {kBlock, kBlock}}}}, "part 1 of block 1"},
        {{{1, {{0, 0}}}}, "no bytes"},
        {{}, "no bytes"},
    };
    int number = 0;
    for (const auto& [wanted, text] : cases) {
        const std::string name = "mismatch-" + std::to_string(number++);
        auto task = side.recv(name, wanted);
        peer.send(name, side.address(), name, kOne);
        CHECK(endOf(task) == Code::BUFFER_MISMATCH && task->errorMessage().find(text) != std::string::npos);
        const Outcome outcome = peer.outcome(name);
        CHECK(outcome.code == Code::BUFFER_MISMATCH && outcome.text == task->errorMessage() && outcome.calls == 1);
        end(side, peer, name, task);
    }
}

// S8, S12, V3
inline void either_side_alone_ends_at_its_deadline() {
    Side side;
    Peer peer;
    auto task = side.recv("nobody-sends", kOne, 100);
    peer.send("s", side.address(), "nobody-receives", kOne, 100);
    CHECK(peer.outcome("s").code == Code::TIMEOUT);
    CHECK(endOf(task) == Code::TIMEOUT && task->errorMessage().find("nobody-sends") != std::string::npos);
    end(side, peer, "nobody-sends", task);
    auto late = side.recv("k", kOne, -5);
    CHECK(late->done() && late->errorCode() == Code::TIMEOUT && side.receiver().getTask("k") == nullptr);
    side.send("late", peer.address(), "k", kOne, -5);
    CHECK(side.outcome("late").code == Code::TIMEOUT && side.outcome("late").calls == 1);
}

// S2, S15, S16, V8
inline void requests_that_cannot_be_sent_or_received_fail_with_a_reason() {
    Side side;
    side.send("nobody", "127.0.0.1:1", "k", kOne);
    CHECK(side.outcome("nobody").code == Code::CONNECTION_FAILED && !side.outcome("nobody").text.empty());
    rtp_llm::transfer::SendRequest request;
    request.ip = "127.0.0.1";
    request.unique_key = "k";
    request.deadline_ms = wallClockMs() + kLongMs;
    request.block_info = side.map(kOne);
    for (const uint32_t port : {0u, 70000u}) {
        request.port = port;
        side.send("port" + std::to_string(port), request);
        CHECK(side.outcome("port" + std::to_string(port)).code == Code::CONNECTION_FAILED);
    }
    request.port = 1;
    request.block_info.clear();
    side.send("empty", request);
    request.block_info = side.map({{1, {{0, 0}}}});
    side.send("parts without bytes", request);
    request.block_info = {{1, nullptr}};
    side.send("null block", request);
    request.block_info = side.map(kOne);
    request.unique_key = "";
    side.send("no key", request);
    auto foreign = std::make_shared<KeyBlockInfo>();
    foreign->blocks.push_back(BlockInfo{false, 0, 0, &request, 8});
    request.unique_key = "k";
    request.block_info = {{1, foreign}};
    side.send("not registered", request);
    foreign = std::make_shared<KeyBlockInfo>();
    foreign->blocks.push_back(BlockInfo{true, 0, 0, side.memory(), 8});
    request.block_info = {{1, foreign}};
    side.send("device", request);
    for (const char* name : {"empty", "parts without bytes", "null block", "no key", "not registered", "device"}) {
        const Outcome outcome = side.outcome(name);
        CHECK(outcome.code == Code::BUILD_REQUEST_FAILED && !outcome.text.empty() && outcome.calls == 1);
    }
    for (const char* key : {"", "k"}) {
        auto task = side.receiver().recv({key, request.block_info, request.deadline_ms});
        CHECK(task && task->done() && task->errorCode() == Code::BUILD_REQUEST_FAILED);
        CHECK(!task->errorMessage().empty() && side.receiver().getTask(key) == nullptr);
    }
    side.sender().send(request, nullptr);
    CHECK(holdsNothing(side));
}

// V1, V12, V16
inline void a_key_has_one_task_and_one_sender() {
    Side side;
    Peer first, second;
    auto task = side.recv("k", kOne);
    CHECK(task && side.recv("k", kOne) == nullptr && side.receiver().getTask("k") == task);
    CHECK(side.receiver().getTask("other") == nullptr);
    first.send("s", side.address(), "k", kOne);
    CHECK(endOf(task) == Code::OK && first.outcome("s").code == Code::OK);
    second.send("s", side.address(), "k", kOne);
    const Outcome refused = second.outcome("s");
    CHECK(refused.code == Code::UNKNOWN && refused.text.find("k has been received") != std::string::npos);
    CHECK(side.recv("k", kOne) == nullptr);
    side.receiver().stealTask("k");
    CHECK(side.receiver().getTask("k") == nullptr && task->success());
    side.receiver().stealTask("k");
    task = side.recv("k", kOne);
    CHECK(task && side.receiver().getTask("k") == task);
    second.send("again", side.address(), "k", kOne);
    CHECK(endOf(task) == Code::OK && second.outcome("again").code == Code::OK);
    end(side, first, "k", task);
    CHECK(second.holdsNothing());
}

// V16
inline void a_second_sender_is_refused_while_the_first_one_is_read_or_waits() {
    useTcp();
    Side side;
    Peer first, second;
    first.send("waits", side.address(), "early", kOne);
    CHECK(eventually([&] { return side.held().parked == 1; }));
    second.send("waits", side.address(), "early", kOne);
    CHECK(second.outcome("waits").text.find("another sender") != std::string::npos);
    auto early = side.recv("early", kOne);
    CHECK(endOf(early) == Code::OK && first.outcome("waits").code == Code::OK);
    end(side, first, "early", early);
    auto task = stalled(side, first);
    second.send("s", side.address(), "k", kBig);
    CHECK(second.outcome("s").text.find("another sender") != std::string::npos);
    first.resume();
    CHECK(endOf(task) == Code::OK && first.outcome("s").code == Code::OK);
    end(side, first, "k", task);
    CHECK(second.holdsNothing());
}

// V4, V5
inline void a_sender_that_comes_after_a_steal_or_a_cancel_is_refused() {
    Side side;
    Peer peer;
    auto stolen = side.recv("stolen", kOne);
    side.receiver().stealTask("stolen");
    CHECK(stolen->done() && stolen->errorCode() == Code::CANCELLED);
    auto cancelled = side.recv("cancelled", kOne);
    cancelled->cancel();
    CHECK(cancelled->done() && !cancelled->success() && cancelled->errorCode() == Code::CANCELLED);
    for (const char* key : {"stolen", "cancelled"}) {
        peer.send(key, side.address(), key, kOne);
        CHECK(peer.outcome(key).code == Code::CANCELLED);
    }
    stolen.reset();
    end(side, peer, "cancelled", cancelled);
    peer.send("later", side.address(), "cancelled", kOne);
    CHECK(peer.outcome("later").code == Code::CANCELLED);
    CHECK(side.memory()[0] == 0);
}

// V6, V13
inline void a_cancel_during_the_transfer_ends_the_task_when_its_memory_is_quiet_and_beats_success() {
    useTcp();
    for (const bool force : {false, true}) {
        Side side;
        Peer peer;
        auto task = stalled(side, peer);
        force ? task->forceCancel() : task->cancel();
        peer.resume();
        CHECK(endOf(task) == Code::CANCELLED && side.held().reads == 0);
        side.fill(0, kMemory, 9);
        CHECK(peer.outcome("s").code == Code::CANCELLED);
        // Bytes of another task follow those that were under way.
        auto next = side.recv("next", kOne);
        peer.send("next", side.address(), "next", {{1, {{kBlock, kBlock}}}});
        CHECK(endOf(next) == Code::OK);
        side.fill(0, kBlock, 9);
        CHECK(side.filled(0, kMemory, 9));
        side.receiver().stealTask("next");
        next.reset();
        end(side, peer, "k", task);
    }
}

// V7, S12
inline void a_deadline_during_the_transfer_beats_success_and_cancel() {
    useTcp();
    for (const bool cancels : {false, true}) {
        Side side;
        Peer peer;
        auto task = stalled(side, peer, 8000);
        const int64_t until = wallClockMs() + 8050;
        if (cancels) task->cancel();
        CHECK(eventually([&] { return wallClockMs() > until; }));
        CHECK(task->errorCode() == Code::TIMEOUT);
        peer.resume();
        CHECK(endOf(task) == Code::TIMEOUT && !task->success() && side.held().reads == 0);
        CHECK(peer.outcome("s").code != Code::OK);
        end(side, peer, "k", task);
    }
}

// V1
inline void a_task_that_is_stolen_during_the_transfer_ends_as_the_transfer_does() {
    useTcp();
    Side side;
    Peer peer;
    auto task = stalled(side, peer);
    side.receiver().stealTask("k");
    CHECK(side.receiver().getTask("k") == nullptr && !task->done());
    peer.resume();
    CHECK(endOf(task) == Code::OK && side.filled(0, kMemory, 1));
    CHECK(peer.outcome("s").code == Code::OK);
    end(side, peer, "k", task);
}

inline void dropping_a_task_during_the_transfer_waits_until_its_memory_is_quiet() {
    useTcp();
    // The transfer may end before the task is dropped.
    for (Code sent = Code::OK; sent != Code::CANCELLED;) {
        Side side;
        Peer peer;
        auto task = stalled(side, peer);
        side.receiver().stealTask("k");
        std::thread later([&] { peer.resume(); });
        task.reset();
        CHECK(side.held().reads == 0 && side.held().receives == 0);
        later.join();
        side.fill(0, kMemory, 9);
        sent = peer.outcome("s").code;
        CHECK(sent == Code::CANCELLED || sent == Code::OK);
        CHECK(holdsNothing(side) && peer.holdsNothing() && side.filled(0, kMemory, 9));
    }
}

inline void dropping_a_task_during_the_transfer_in_a_callback_waits_too() {
    useTcp();
    // The transfer may end before the task is dropped.
    for (Code sent = Code::OK; sent != Code::CANCELLED;) {
        Side side;
        Peer peer;
        auto task = stalled(side, peer);
        rtp_llm::transfer::SendRequest request;
        request.ip = "127.0.0.1";
        request.port = 1;
        request.unique_key = "nobody";
        request.block_info = side.map(kOne);
        request.deadline_ms = wallClockMs() + kLongMs;
        std::atomic<bool> quiet{false}, called{false};
        std::thread later([&] { peer.resume(); });
        side.sender().send(request, [&](Code, const std::string&) {
            side.receiver().stealTask("k");
            task.reset();
            quiet = side.held().reads == 0 && side.held().receives == 0;
            side.fill(0, kMemory, 9);
            called = true;
        });
        CHECK(eventually([&] { return called.load(); }));
        later.join();
        sent = peer.outcome("s").code;
        CHECK(quiet && (sent == Code::CANCELLED || sent == Code::OK));
        CHECK(holdsNothing(side) && peer.holdsNothing() && side.filled(0, kMemory, 9));
    }
}

// S13, V9
inline void both_ends_agree_when_the_senders_deadline_and_the_end_of_the_read_meet() {
    Side side;
    Peer peer;
    for (int round = 0; round < 60; round++) {
        const std::string key = "k" + std::to_string(round);
        auto task = side.recv(key, kBig);
        peer.send(key, side.address(), key, kBig, 1 + round / 2);
        const Code sent = peer.outcome(key).code;
        CHECK(sent == Code::OK || sent == Code::TIMEOUT);
        if (sent == Code::OK) CHECK(endOf(task) == Code::OK);
        // Without an offer, the task waits for another sender.
        if (sent != Code::OK) task->cancel();
        CHECK((endOf(task) == Code::OK) == (sent == Code::OK));
        side.receiver().stealTask(key);
    }
    CHECK(holdsNothing(side) && peer.holdsNothing());
}

// V13
inline void a_cancel_that_races_with_the_transfer_always_ends() {
    Side side;
    Peer peer;
    int done = 0, cancelled = 0;
    for (int round = 0; round < 500; round++) {
        const std::string key = "k" + std::to_string(round);
        side.memory()[0] = 0;
        auto task = side.recv(key, kOne);
        peer.send(key, side.address(), key, kOne);
        for (int i = 0; i < round % 50; i++) std::this_thread::yield();
        task->cancel();
        const Code code = endOf(task);
        CHECK(code == Code::OK || code == Code::CANCELLED);
        CHECK(code != Code::OK || side.filled(0, kBlock, 1));
        const Outcome outcome = peer.outcome(key);
        // A cancel after the last byte may leave the sender with success, never the other way round.
        CHECK((outcome.code == code || outcome.code == Code::OK) && outcome.calls == 1);
        (code == Code::OK ? done : cancelled)++;
        side.receiver().stealTask(key);
    }
    CHECK(done + cancelled == 500);
    CHECK(holdsNothing(side) && peer.holdsNothing());
}

// V1, and the end-to-end case with several keys
inline void threads_add_steal_and_receive_keys_at_once() {
    Side side;
    Peer peer;
    for (int i = 0; i < 64; i++) {
        const std::string key = "k" + std::to_string(i);
        const size_t at = static_cast<size_t>(i) * kBlock;
        peer.send(key, side.address(), key, {{i, {{at, kBlock}}}});
    }
    std::atomic<int> received{0}, added{0};
    std::vector<std::thread> threads;
    for (int thread = 0; thread < 8; thread++)
        threads.emplace_back([&, thread] {
            for (int i = thread; i < 64; i += 8) {
                const size_t at = static_cast<size_t>(i) * kBlock;
                const auto task = side.recv("k" + std::to_string(i), {{i, {{at, kBlock}}}});
                if (endOf(task) == Code::OK && side.filled(at, kBlock, 1)) received++;
                // All threads want this key; one at a time has it.
                if (auto both = side.recv("shared", kOne)) {
                    added++;
                    CHECK(side.receiver().getTask("shared") == both);
                    side.receiver().stealTask("shared");
                }
                side.receiver().stealTask("k" + std::to_string(i));
            }
        });
    for (auto& thread : threads) thread.join();
    CHECK(received == 64 && added > 0);
    for (int i = 0; i < 64; i++) CHECK(peer.outcome("k" + std::to_string(i)).code == Code::OK);
    CHECK(holdsNothing(side) && peer.holdsNothing());
}

// V15
inline void callbacks_are_called_once_also_when_the_back_end_is_destroyed() {
    Peer peer;
    std::atomic<int> calls{0};
    IKVCacheRecvTaskPtr left;
    {
        Side side;
        rtp_llm::transfer::SendRequest request;
        request.ip = "127.0.0.1";
        request.port = static_cast<uint32_t>(std::stoul(peer.address().substr(peer.address().rfind(':') + 1)));
        request.block_info = side.map(kOne);
        request.deadline_ms = wallClockMs() + kLongMs;
        for (int i = 0; i < 20; i++) {
            request.unique_key = "k" + std::to_string(i);
            side.sender().send(request, [&](Code code, const std::string&) {
                CHECK(code == Code::CANCELLED);
                calls++;
            });
        }
        side.sender().send(request, [](Code, const std::string&) { throw std::runtime_error("not kvferry's"); });
    }
    CHECK(calls == 20);
    CHECK(peer.holdsNothing());
}

inline std::vector<Case> taskCases() {
    return {
        CASE(memory_is_registered_by_both_halves_and_only_as_it_is),
        CASE(both_orders_of_arrival_bring_the_bytes_that_the_receiver_asks_for),
        CASE(a_mismatch_names_the_block_and_both_ends_say_the_same),
        CASE(either_side_alone_ends_at_its_deadline),
        CASE(requests_that_cannot_be_sent_or_received_fail_with_a_reason),
        CASE(a_key_has_one_task_and_one_sender),
        CASE(a_second_sender_is_refused_while_the_first_one_is_read_or_waits),
        CASE(a_sender_that_comes_after_a_steal_or_a_cancel_is_refused),
        CASE(a_cancel_during_the_transfer_ends_the_task_when_its_memory_is_quiet_and_beats_success),
        CASE(a_deadline_during_the_transfer_beats_success_and_cancel),
        CASE(a_task_that_is_stolen_during_the_transfer_ends_as_the_transfer_does),
        CASE(dropping_a_task_during_the_transfer_waits_until_its_memory_is_quiet),
        CASE(dropping_a_task_during_the_transfer_in_a_callback_waits_too),
        CASE(both_ends_agree_when_the_senders_deadline_and_the_end_of_the_read_meet),
        CASE(a_cancel_that_races_with_the_transfer_always_ends),
        CASE(threads_add_steal_and_receive_keys_at_once),
        CASE(callbacks_are_called_once_also_when_the_back_end_is_destroyed),
    };
}

}  // namespace test
