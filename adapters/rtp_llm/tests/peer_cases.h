// A process that is killed, stopped or restarted.
#pragma once

#include "cases.h"

namespace test {

inline void a_sender_that_is_killed_during_the_transfer_ends_the_task_and_the_next_request_works() {
    useTcp();
    Side side;
    std::string address;
    {
        Peer sender;
        address = sender.address();
        auto task = stalled(side, sender);
        sender.kill();
        CHECK(endOf(task) == Code::RPC_FAILED && !task->errorMessage().empty() && side.held().reads == 0);
        side.receiver().stealTask("k");
        side.fill(0, kMemory, 9);
    }
    setenv("KVFERRY_LISTEN", address.c_str(), 1);
    Peer restarted;
    CHECK(restarted.address() == address && side.filled(0, kMemory, 9));
    auto task = side.recv("k", kBig);
    restarted.send("s", side.address(), "k", kBig);
    CHECK(endOf(task) == Code::OK && side.filled(0, kMemory, 1) && restarted.outcome("s").code == Code::OK);
    end(side, restarted, "k", task);
}

inline void a_sender_that_is_killed_with_a_waiting_offer_leaves_nothing_and_its_key_works_for_the_next_one() {
    Side side;
    {
        Peer sender;
        sender.send("s", side.address(), "k", kOne);
        CHECK(eventually([&] { return side.held().parked == 1; }));
        sender.kill();
        CHECK(holdsNothing(side));
    }
    Peer restarted;
    auto task = side.recv("k", kOne);
    restarted.send("s", side.address(), "k", kOne);
    CHECK(endOf(task) == Code::OK && restarted.outcome("s").code == Code::OK);
    end(side, restarted, "k", task);
}

inline void a_sender_that_stops_during_the_transfer_ends_the_task_long_before_its_deadline() {
    useTcp();
    setenv("KVFERRY_SILENCE_MS", kSomeSilenceMs, 1);
    Side side;
    Peer sender;
    auto task = stalled(side, sender, 10 * kLongMs);
    CHECK(endOf(task) == Code::RPC_FAILED && side.held().reads == 0);
    side.fill(0, kMemory, 9);
    sender.resume();
    CHECK(sender.outcome("s").code != Code::OK);
    CHECK(sender.holdsNothing() && side.filled(0, kMemory, 9));
    end(side, sender, "k", task);
}

inline void a_receiver_that_is_killed_ends_the_send_and_the_next_request_works_at_its_address() {
    Side side;
    side.fill(0, kBlock, 5);
    std::string address;
    {
        Peer receiver;
        address = receiver.address();
        side.send("waits", address, "k", kOne, 10 * kLongMs);
        CHECK(eventually([&] { return receiver.ask("held -") == "0 0 1 0"; }));
        CHECK(!side.ended("waits"));
        receiver.kill();
        const Outcome outcome = side.outcome("waits");
        CHECK(outcome.code == Code::RPC_FAILED && outcome.calls == 1 && !outcome.text.empty());
        side.send("nobody", address, "k", kOne);
        CHECK(side.outcome("nobody").code == Code::CONNECTION_FAILED);
    }
    setenv("KVFERRY_LISTEN", address.c_str(), 1);
    Peer restarted;
    CHECK(restarted.address() == address);
    restarted.recv("k", kOne);
    side.send("again", address, "k", kOne);
    CHECK(side.outcome("again").code == Code::OK && restarted.task("k").code == Code::OK);
    CHECK(restarted.ask("filled - 0 4096 5") == "1" && restarted.ask("drop k") == "ok");
    CHECK(holdsNothing(side) && restarted.holdsNothing());
}

// S12
inline void a_receiver_that_stops_ends_the_send_at_the_deadline_or_before() {
    setenv("KVFERRY_SILENCE_MS", kSomeSilenceMs, 1);
    Side side;
    Peer receiver;
    side.send("first", receiver.address(), "first", kOne, kLongMs);
    CHECK(eventually([&] { return receiver.ask("held -") == "0 0 1 0"; }));
    receiver.stop();
    side.send("s", receiver.address(), "k", kOne, 200);
    CHECK(side.outcome("s").code == Code::TIMEOUT);
    // Within the silence limit.
    CHECK(side.outcome("first").code == Code::RPC_FAILED);
    receiver.resume();
    receiver.recv("again", kOne);
    side.send("again", receiver.address(), "again", kOne);
    CHECK(side.outcome("again").code == Code::OK && receiver.task("again").code == Code::OK);
    CHECK(receiver.ask("drop again") == "ok" && holdsNothing(side) && receiver.holdsNothing());
}

inline void a_process_may_end_with_tasks_and_transfers_open() {
    useTcp();
    Side side;
    {
        // Ends when its standard input does.
        Peer peer;
        peer.recv("waits", kOne);
        peer.send("s", side.address(), "k", kBig);
        side.send("k", peer.address(), "other", kBig);
    }
    CHECK(side.outcome("k").code != Code::OK);
    CHECK(holdsNothing(side));
}

inline std::vector<Case> peerCases() {
    return {
        CASE(a_sender_that_is_killed_during_the_transfer_ends_the_task_and_the_next_request_works),
        CASE(a_sender_that_is_killed_with_a_waiting_offer_leaves_nothing_and_its_key_works_for_the_next_one),
        CASE(a_sender_that_stops_during_the_transfer_ends_the_task_long_before_its_deadline),
        CASE(a_receiver_that_is_killed_ends_the_send_and_the_next_request_works_at_its_address),
        CASE(a_receiver_that_stops_ends_the_send_at_the_deadline_or_before),
        CASE(a_process_may_end_with_tasks_and_transfers_open),
    };
}

}  // namespace test
