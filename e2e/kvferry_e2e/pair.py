"""A prefill and a decode instance, and the checks of the two together."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvferry_e2e.client import Answer, Counters, Prompt, Route, Tokens, complete, handoff
from kvferry_e2e.instance import ABORT_TIMEOUT_S, Instance
from kvferry_e2e.relay import Relay
from kvferry_e2e.report import ensure

# Metrics are written a moment after the answer they belong to.
METRICS_SETTLE_S = 5.0
# Blocks are freed after the connector's time-out and one step of the engine; the rest is for slow
# machines.
BLOCKS_BACK_S = ABORT_TIMEOUT_S + 10.0


def eventually(holds: Callable[[], bool], within_s: float, every_s: float = 0.1) -> bool:
    deadline = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(every_s)
    return True


@dataclass
class Pair:
    prefill: Instance
    decode: Instance

    def route(self) -> Route:
        return Route.between(self.prefill.port, self.decode.port, self.prefill.bootstrap)

    def handoff(self, prompt: Tokens) -> Answer:
        return handoff(self.route(), prompt)

    def alone(self, prompt: Tokens) -> Tokens:
        """The reference: the prefill instance computes the prompt and generates without the decode."""
        answer = complete(self.prefill.port, prompt)
        ensure(answer.status == 200, f"the prefill instance alone: {answer}")
        return answer.tokens

    def check_handoff(self, prompt: Tokens) -> None:
        """One handoff ends with the tokens that the prefill instance generates alone."""
        answer = self.handoff(prompt)
        if answer.status != 200:
            last = self.prefill.records.last_write()
            ensure(False, f"{len(prompt)} tokens: {answer}; the prefill's write ended with {last}")
        reference = self.alone(prompt)
        ensure(answer.tokens == reference, mismatch(prompt, answer.tokens, reference))

    def expect_sources(self, before: Counters, expected: tuple[int, int, int]) -> None:
        """The decode's counters since `before`: tokens (computed, from its prefix cache,
        transferred).
        """
        eventually(lambda: self.decode.counters().since(before) == expected, METRICS_SETTLE_S)
        seen = self.decode.counters().since(before)
        ensure(
            seen == expected,
            f"prompt tokens (computed, cached, transferred): {seen}, expected {expected}",
        )

    def expect_blocks_back(self, within_s: float = BLOCKS_BACK_S) -> float:
        """Waits until both engines have freed all blocks. Returns the seconds it took."""
        start = time.monotonic()
        eventually(lambda: self._usage() == (0, 0), within_s)
        usage = self._usage()
        ensure(usage == (0, 0), f"KV cache usage {usage} (prefill, decode) after {within_s:.0f} s")
        return time.monotonic() - start

    def _usage(self) -> tuple[float, float]:
        return self.prefill.counters().usage, self.decode.counters().usage

    @contextmanager
    def relayed(self) -> Iterator[Relay]:
        """Inside the block, the prefill's engine reaches the decode's through a relay."""
        session = self.decode.records.session()
        host, port = session.rsplit(":", 1)
        relay = Relay(host, int(port))
        self.prefill.records.divert(session, f"{host}:{relay.port}")
        try:
            yield relay
        finally:
            self.prefill.records.divert_nothing()
            relay.close()


def mismatch(prompt: Prompt, seen: Tokens, reference: Tokens) -> str:
    at = next(
        (i for i, (a, b) in enumerate(zip(seen, reference, strict=False)) if a != b),
        min(len(seen), len(reference)),
    )
    return f"prompt of length {len(prompt)}: token {at} differs: {seen} instead of {reference}"
