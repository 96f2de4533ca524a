"""Processes that die: the other side fails the lost request in time and continues to serve."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from kvferry_e2e.client import Answer, Route, Tokens, handoff
from kvferry_e2e.instance import ABORT_TIMEOUT_S, DECODE_WAIT_S, Instance
from kvferry_e2e.pair import Pair, eventually
from kvferry_e2e.prompts import Prompts
from kvferry_e2e.relay import Relay
from kvferry_e2e.report import Report, ensure

PROMPT_TOKENS = 1500
# Slow enough that a transfer of that prompt (6 MB) takes far longer than the steps of the test.
SLOW_BYTES_PER_S = 256 << 10
UNDER_WAY_BYTES = 512 << 10
# A dead peer is noticed within a second of its connections being closed, if kvferry's threads run. Here they
# share a core with an engine that polls (see `ON_BUSY_CORES`): three times as long.
AT_ONCE_S = 3.0
_CRASH = r".*(panicked at|Fatal Python error|Segmentation fault|Error in _sender_worker).*"


def _transfer_under_way(pair: Pair, relay: Relay, begun: int) -> None:
    """Waits until the prefill's engine is inside a write and a part of it has passed the relay."""
    records = pair.prefill.records
    ensure(eventually(lambda: records.writes_begun() > begun, 30), "the prefill's write has not begun")
    ensure(eventually(lambda: relay.carried > UNDER_WAY_BYTES, 30), "no payload goes through the relay")
    ensure(len(records.writes()) < records.writes_begun(), "the prefill's write is over already")


def decode_dies_while_written_to(report: Report, pair: Pair, prompts: Prompts) -> None:
    """Kills the decode of the pair; the caller starts another."""
    with report.check("decode SIGKILLed while written to: prefill's call fails") as note:
        with pair.relayed() as relay, ThreadPoolExecutor(1) as pool:
            relay.bytes_per_s = SLOW_BYTES_PER_S
            finished, begun = (
                len(pair.prefill.records.writes()),
                pair.prefill.records.writes_begun(),
            )
            request = pool.submit(handoff, pair.route(), prompts.fresh(PROMPT_TOKENS))
            _transfer_under_way(pair, relay, begun)
            killed, gone = pair.decode.kill()
            ensure(request.exception(30) is not None, "the client of the dead decode got an answer")
            ensure(
                eventually(lambda: len(pair.prefill.records.writes()) > finished, 60),
                "the prefill's call has not returned after 60 s",
            )
        write = pair.prefill.records.writes()[-1]
        took, knowable = write["at"] - killed, gone - killed
        ensure(
            write.get("result") not in (0, None),
            f"the prefill's call ended with {write.get('result')!r}, not a failure",
        )
        ensure(
            took - knowable <= AT_ONCE_S,
            f"the prefill's call returned {took - knowable:.2f} s after the decode was gone",
        )
        ensure(
            pair.prefill.log_has(r"Sending to \S+ failed \(ret="),
            "the prefill's log does not show the failure",
        )
        note.text = f"{took:.2f} s after the kill ({knowable:.2f} s dying), {pair.prefill.records.last_write()}"
    with report.check("decode SIGKILLed: prefill continues, frees the blocks") as note:
        pair.alone(prompts.fresh(700))
        start = time.monotonic()
        ensure(
            eventually(lambda: pair.prefill.counters().usage == 0, ABORT_TIMEOUT_S + 10),
            "blocks stay in use",
        )
        note.text = f"blocks free after {time.monotonic() - start:.1f} s"


@dataclass
class Lost:
    """Requests whose prefill is dead: name, time of sending, and future answer."""

    requests: list[tuple[str, float, Future[tuple[Answer, float]]]]
    pool: ThreadPoolExecutor

    def send(self, what: str, route: Route, prompt: Tokens) -> None:
        def timed() -> tuple[Answer, float]:
            answer = handoff(route, prompt, timeout_s=DECODE_WAIT_S + 60)
            return answer, time.monotonic()

        self.requests.append((what, time.monotonic(), self.pool.submit(timed)))

    def check(self, report: Report) -> None:
        """Each ends with an error within the connector's own time-out after it was sent."""
        for what, sent, future in self.requests:
            with report.check(f"{what}: error in time") as note:
                answer, ended = future.result(DECODE_WAIT_S + 90)
                ensure(answer.status >= 500, f"instead of an error: {answer}")
                ensure(
                    ended - sent <= DECODE_WAIT_S + 10,
                    f"it took {ended - sent:.0f} s, the connector allows {DECODE_WAIT_S}",
                )
                note.text = f"HTTP {answer.status} after {ended - sent:.1f} s"


def prefill_dies(report: Report, pair: Pair, prompts: Prompts) -> Lost:
    """Kills the prefill of the pair during one request, and sends another after that; the caller
    starts a new prefill.
    """
    lost = Lost([], ThreadPoolExecutor(2))
    with (
        report.check("prefill SIGKILLed while it writes"),
        pair.relayed() as relay,
    ):
        relay.bytes_per_s = SLOW_BYTES_PER_S
        route, begun = pair.route(), pair.prefill.records.writes_begun()
        lost.send("prefill SIGKILLed during a request", route, prompts.fresh(PROMPT_TOKENS))
        _transfer_under_way(pair, relay, begun)
        pair.prefill.kill()
        lost.send("prefill SIGKILLed between requests", route, prompts.fresh(400))
        time.sleep(1)
        ensure(pair.decode.alive(), "the decode died too")
    return lost


def decode_recovered(report: Report, pair: Pair, prompts: Prompts) -> None:
    with report.check("prefill SIGKILLed: decode continues, frees the blocks") as note:
        ensure(pair.decode.alive(), "the decode is dead")
        note.text = f"blocks free after {pair.expect_blocks_back():.1f} s"
        pair.check_handoff(prompts.fresh(700))


def _has_no_process(instance: Instance) -> bool:
    return not instance.members()


def no_crash_in_logs(report: Report, instances: Sequence[Instance]) -> None:
    """A crash in a thread may affect no request."""
    with report.check("no crash in any log"):
        for instance in instances:
            found = re.search(_CRASH, instance.log_text())
            ensure(found is None, f"{instance.log}: {found and found.group()}")


def stops_when_asked(report: Report, instances: Sequence[Instance], within_s: float = 60) -> None:
    """An engine that hangs at exit blocks a deployment's roll-out."""
    start = time.monotonic()
    for instance in instances:
        instance.ask_to_stop()
    for instance in instances:
        with report.check(f"{instance.name} stops on SIGTERM") as note:
            gone = eventually(partial(_has_no_process, instance), within_s)
            ensure(gone, f"after {within_s:.0f} s these are left: {instance.members()}")
            note.text = f"after {time.monotonic() - start:.1f} s"
