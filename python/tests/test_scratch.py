"""What adapters share: memory that is used again, and warnings that come seldom."""

from __future__ import annotations

import logging

import kvferry
import pytest
from kvferry._engine import log
from kvferry._engine.log import Seldom
from kvferry._engine.memory import Scratch

MIB = 1 << 20


def test_memory_that_was_given_back_is_used_again_and_little_of_it_is_kept() -> None:
    with kvferry.Agent(listen="127.0.0.1:0") as agent:
        scratch = Scratch(agent, free_bytes_max=4 * MIB)
        first = [scratch.take(MIB) for _ in range(4)]
        assert len(set(first)) == 4
        for region in first:
            scratch.give(region)
        assert {scratch.take(MIB) for _ in range(4)} == set(first)
        for region in first:
            scratch.give(region)
        other = scratch.take(2 * MIB)
        assert len(agent.regions()) == 5
        scratch.give(other)
        assert agent.regions() == [other]
        # More than is kept of all.
        large = scratch.take(8 * MIB)
        scratch.give(large)
        assert agent.regions() == [large]
        assert scratch.take(8 * MIB) == large


def test_of_many_warnings_one_is_said_every_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 5.0
    monkeypatch.setattr(log.time, "monotonic", lambda: now)
    say = Seldom(logging.getLogger("kvferry.test"), "test: ").say
    with caplog.at_level(logging.WARNING, "kvferry.test"):
        for number in range(4):
            say("%d blocks", number)
            now += 5
    assert caplog.messages == ["test: 0 blocks", "test: 2 blocks"]
