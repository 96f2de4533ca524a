"""A connector's memory does not grow with the requests that it has served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvferry.connector import SchedulerHalf, prompt_id
from kvferry.vllm._siblings import KEPT, Siblings
from test_connector import PROMPT, Engine

FEW, MANY = 20_000, 100_000
# What the allocator of libc may keep; a byte for each request would be less than a tenth of it.
NOISE = 1 << 20


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def serve(half: SchedulerHalf, number: int, offered: dict[str, Any], identity: bytes) -> None:
    """A request that ends in one of the ways that need no other engine."""
    request, tokens, blocks = f"request-{number}", len(PROMPT), [[1, 2, 3]]
    produces = number % 5 < 2
    params = {"do_remote_decode": True} if produces else offered | {"transfer_id": request}
    if number % 5 == 4:
        # Rejected before it was scheduled.
        assert half.finished(request, "error", None) is None
        half.arrived(request, tokens, 1, params, identity)
        half.finished(request, "error", None)
        half.step([], [])
        return
    half.arrived(request, tokens, 1, params, identity)
    computed = tokens if number % 5 == 3 else 0
    matched = half.matched(request, computed) or 0
    if produces:
        half.step([(request, 0, tokens, True, blocks)], [])
        held, _ = half.finished(request, "length" if number % 5 else "abort", blocks) or (False, None)
        half.step([], [])
        if held:
            half.sent([request])
    else:
        # Loaded, or in the cache of this engine already.
        half.allocated(request, matched, blocks)
        half.step([], [])
        if matched:
            half.received([request])
        half.finished(request, "length", None)
        half.step([], [])


def test_memory_after_100_000_requests_is_that_after_20_000() -> None:
    engine = Engine()
    half, identity = engine.scheduler, prompt_id(PROMPT)
    half.arrived("first", len(PROMPT), 1, {"do_remote_decode": True}, identity)
    half.step([("first", 0, len(PROMPT), True, [[1, 2, 3]])], [])
    held, offered = half.finished("first", "length", [[1, 2, 3]]) or (False, None)
    assert held
    assert offered is not None
    half.sent(["first"])
    siblings, after = Siblings(), {}
    for number in range(MANY + 1):
        if number in (FEW, MANY):
            after[number] = resident()
        serve(half, number, offered, identity)
        siblings.owns(f"0_{number}")
        siblings.ended(f"0_{number}", {"number": number})
    assert after[MANY] <= after[FEW] + NOISE
    assert set(half.gauges().values()) == {0}
    assert len(siblings._owners) == len(siblings._params) == KEPT
    engine.worker.close()
    engine.agent.shutdown()
