"""Helpers of the tests of handoffs: an engine that prefills and one that decodes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from kit import PATIENCE
from trtllm_kit import BLOCK, Bench, Served
from trtllm_reference import Request, Shape, here


def until(is_so: Callable[[], bool], why: Callable[[], Any] = lambda: None) -> None:
    deadline = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < deadline, why()
        time.sleep(0.005)


class Pair:
    """An engine that prefills and one that decodes, of one rank each unless `tp` says more."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.prefills: list[Served] = []
        bench.settings(load_wait=20, handoff_gib=1 / 64)

    def prefill(self, shape: Shape | None = None, rank: int = 0, tp: int = 1, **changes: Any) -> Served:
        made = self._make("prefill", shape, rank, tp, handoff="prefill", listen="127.0.0.1:0", **changes)
        if rank == 0:
            self.prefills.append(made)
        return made

    def decode(self, shape: Shape | None = None, rank: int = 0, tp: int = 1, **changes: Any) -> Served:
        """Known to the engines that prefill."""
        addresses = ",".join(it.worker._local.handoff.address for it in self.prefills)
        made = self._make("decode", shape, rank, tp, handoff="decode", prefill=addresses, **changes)
        if rank == 0:
            for it in self.prefills:
                until(lambda it=it: it.worker._local.handoff.followers == 1)  # type: ignore[misc]
        return made

    def _make(self, name: str, shape: Shape | None, rank: int, tp: int, **changes: Any) -> Served:
        settings = {key: changes.pop(key) for key in ("handoff", "listen", "prefill", "handoff_gib") if key in changes}
        folder = self.bench.directory.with_name("kv-" + name)
        if tp > 1:
            # Each rank has read the settings of the engine before.
            here.gather(None)
        if rank == 0:
            self.bench.settings(disk=folder, **settings)
        if tp > 1:
            here.gather(None)
        return self.bench.rank(shape or Shape(), rank, tp, **changes)


def handoff(served: Served) -> Any:
    return served.worker._local.handoff


def settled(*served: Served) -> None:
    """Nothing is under way, and no slot is taken."""

    def left() -> list[dict[str, int]]:
        for it in served:
            it.scheduler.build_connector_meta(type("Output", (), {}))
        return [{name: value for name, value in handoff(it).gauges().items() if value} for it in served]

    until(lambda: not any(left()), left)


def hears(decode: Served, prefilled: list[Request]) -> None:
    """A router's second request is later than what the engines tell each other; these are in one thread."""
    offers = sum(it.prompt_len > BLOCK for it in prefilled)
    until(lambda: bool(handoff(decode).gauges()["heard"] == offers), lambda: handoff(decode).gauges())


def hand_over(prefill: Served, decode: Served, made: Callable[..., list[Request]]) -> list[Request]:
    """Each prompt is prefilled, then decoded, as a router does it."""
    prefilled = prefill.engine.run(made(max_new_tokens=1))
    if decode.scheduler is not None and handoff(prefill).followers:
        hears(decode, prefilled)
    return decode.engine.run(made())
