"""KVFerryConnector where something goes wrong between live engines: peers that must not be read, stopped processes, a
partition, damaged bytes, a long queue. In NIXL's flow without a router.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from kvferry_e2e.client import Answer, Tokens, abandonable, complete, get
from kvferry_e2e.instance import MAX_MODEL_TOKENS, Instance
from kvferry_e2e.pair import eventually, mismatch
from kvferry_e2e.phases.connector import BLOCKS_BACK_S, UNCLAIMED_S, Cluster, expect_right, offer
from kvferry_e2e.prompts import Prompts
from kvferry_e2e.relay import Damage, Relay
from kvferry_e2e.report import Report, ensure

PROMPT_TOKENS = 1500
# Slow enough that the faults happen while the KV of that prompt (6 MB) moves.
SLOW_BYTES_PER_S = 128 << 10
UNDER_WAY_BYTES = 256 << 10
# A silent peer is reported within 3 s by default. Here kvferry's threads share cores with engines that poll.
SILENT_S = 3 * 3.0
DAMAGED_BYTES = 1
# A part of each secret.
HIDDEN = "kept-to-themselves"
# What a prefill logs of a decode that it refuses, by the reason that decode gives.
REFUSED = {
    "the secrets differ": "the secrets differ",
    "models do not match": r"refused as a consumer .*model.* at the producer and",
    "layouts do not match": r"refused as a consumer .*producer stores",
}


@dataclass
class Link:
    """A prefill, a decode that recomputes what it can't load, and all their connections go through the relay."""

    prefill: Instance
    decode: Instance
    relay: Relay

    @property
    def cluster(self) -> Cluster:
        return Cluster([self.prefill], [self.decode])

    def hand_over(self, prompt: Tokens) -> Answer:
        return complete(self.decode.port, prompt, params=offer(self.prefill, prompt))

    def works(self, prompts: Prompts) -> None:
        prompt, before = prompts.fresh(600), self.cluster.sources()
        expect_right(self.cluster, prompt, self.hand_over(prompt))
        self.cluster.expect_loaded(before, 1, len(prompt))

    @contextmanager
    def under_way(self, prompt: Tokens) -> Iterator[Future[Answer]]:
        """Inside the block, a part of the prompt's KV has passed the relay, and more is to come."""
        params = offer(self.prefill, prompt)
        relay, carried = self.relay, self.relay.carried
        relay.bytes_per_s = SLOW_BYTES_PER_S
        with ThreadPoolExecutor(1) as pool:
            try:
                answer = pool.submit(complete, self.decode.port, prompt, params=params)
                moves = eventually(lambda: relay.carried - carried > UNDER_WAY_BYTES, 30, 0.01)
                ensure(moves, f"{relay.carried - carried} bytes went through the relay")
                yield answer
            finally:
                relay.bytes_per_s, relay.held = None, False


def failures(decode: Instance) -> int:
    """Loads that decode's log says failed."""
    return len(re.findall(r"was not loaded", decode.log_text()))


def beside_example(report: Report, link: Link, prompts: Prompts) -> None:
    """Both instances have KVFerryConnector and ExampleConnector in MultiConnector."""
    prompt = prompts.fresh(700)
    with report.check("MultiConnector: decode loads the prompt with KVFerryConnector") as note:
        expect_right(link.cluster, prompt, link.hand_over(prompt))
        for length in (1, 128, 129, PROMPT_TOKENS):
            other, before = prompts.fresh(length), link.cluster.sources()
            expect_right(link.cluster, other, link.hand_over(other))
            link.cluster.expect_loaded(before, 1, length)
        note.text = link.cluster.expect_blocks_back()
    with report.check("MultiConnector: KVFerryConnector's metrics are served") as note:
        loads = int(link.decode.metric("vllm:kvferry_load_bytes_count"))
        offers = int(link.prefill.metric("vllm:kvferry_offered_requests_total"))
        ensure(loads >= 4 and offers >= 5, f"{loads} loads, {offers} offers")
        note.text = f"{loads} loads, {offers} offers"
    with report.check("MultiConnector: without parameters, decode loads what ExampleConnector stored"):
        ensure(any(link.decode.stored.iterdir()), "ExampleConnector stored nothing")
        expect_right(link.cluster, prompt, complete(link.decode.port, prompt))
        ensure(link.decode.log_has("Inject KV cache of 640 tokens"), "ExampleConnector loaded nothing")


def refused(report: Report, link: Link, stranger: Instance, prompts: Prompts, reason: str) -> None:
    """A decode that must not read this prefill, and a prefill that this decode must not read."""
    what, prompt = stranger.name, prompts.fresh(400)
    with report.check(f"{what}: the request fails, as the policy says") as note:
        start = time.monotonic()
        answer = complete(stranger.port, prompt, params=offer(link.prefill, prompt))
        ensure(answer.status >= 500, f"instead of an error: {answer}")
        note.text = f"HTTP {answer.status} after {time.monotonic() - start:.1f} s"
        _counted(stranger, reason)
    with report.check(f"{what}: the other way, the request is computed, as the policy says") as note:
        before, start = link.cluster.sources(), time.monotonic()
        answer = complete(link.decode.port, prompt, params=offer(stranger, prompt))
        expect_right(link.cluster, prompt, answer)
        note.text = f"after {time.monotonic() - start:.1f} s"
        _counted(link.decode, reason)
        loaded = link.cluster.sources()[2] - before[2]
        ensure(loaded == 0, f"{loaded} tokens were loaded")
    with report.check(f"{what}: both say so, and go on"):
        for decode in (link.decode, stranger):
            ensure(decode.log_has(f"was not loaded: {reason}"), f"the log of {decode.name} has no {reason!r}")
        for prefill in (link.prefill, stranger):
            said = prefill.log_has(REFUSED[reason])
            ensure(said, f"the log of {prefill.name} has no {REFUSED[reason]!r}")
        ensure(complete(stranger.port, prompts.fresh(300)).status == 200, "the other engine serves no request")
        link.works(prompts)


def refused_blocks_back(report: Report, link: Link, strangers: Sequence[Instance]) -> None:
    """Nobody may ask for what was offered to these peers, so that it expires."""
    with report.check("refused: all blocks are free again") as note:
        everyone = Cluster([link.prefill, *strangers], [link.decode])
        note.text = everyone.expect_blocks_back(UNCLAIMED_S + BLOCKS_BACK_S)


def no_secret_shown(report: Report, instances: Sequence[Instance]) -> None:
    with report.check("no log and no metric shows a secret"):
        for instance in instances:
            ensure(HIDDEN not in instance.log_text(), f"the log of {instance.name} does")
            ensure(HIDDEN not in get(instance.port, "/metrics"), f"the metrics of {instance.name} do")


def _counted(decode: Instance, reason: str) -> None:
    def count() -> float:
        return decode.metric("vllm:kvferry_failed_loads_total", f'reason="{reason}"')

    ensure(eventually(lambda: count() > 0, 5), f"{decode.name} counts no load that failed of {reason!r}")


def damaged(report: Report, link: Link, prompts: Prompts) -> None:
    """With checksums on. Decode asks again or computes; it never uses what was damaged."""
    with report.check("a byte is flipped: found, and the tokens are right") as note:
        prompt = prompts.fresh(900)
        before, failed = link.cluster.sources(), failures(link.decode)
        damage = link.relay.damage = Damage(skip=100_000, length=DAMAGED_BYTES)
        answer = link.hand_over(prompt)
        link.relay.damage = None
        ensure(damage.flipped == DAMAGED_BYTES, f"{damage.flipped} bytes were flipped")
        expect_right(link.cluster, prompt, answer)
        loaded = int(link.cluster.sources()[2] - before[2])
        ensure(link.decode.log_has("checksum") or link.prefill.log_has("checksum"), "no log says so")
        note.text = f"{failures(link.decode) - failed} loads failed, {loaded} tokens loaded"
        link.works(prompts)
        note.text += f"; {link.cluster.expect_blocks_back(UNCLAIMED_S + BLOCKS_BACK_S)}"


def prefill_stops(report: Report, link: Link, prompts: Prompts) -> None:
    with report.check("prefill stopped (SIGSTOP) while its KV is read: decode computes") as note:
        prompt = prompts.fresh(PROMPT_TOKENS)
        with link.under_way(prompt) as answer:
            with link.prefill.stopped():
                took = _reported(link)
                done = answer.result(60)
            expect_right(link.cluster, prompt, done)
        _counted(link.decode, "peer is silent")
        note.text = f"reported after {took:.1f} s"
    _goes_on(report, link, prompts, "prefill continues")


def decode_stops(report: Report, link: Link, prompts: Prompts) -> None:
    with report.check("decode stopped (SIGSTOP) while it reads: prefill frees the blocks") as note:
        prompt = prompts.fresh(PROMPT_TOKENS)
        with link.under_way(prompt) as answer:
            with link.decode.stopped():
                link.relay.bytes_per_s, start = None, time.monotonic()
                free = eventually(lambda: link.prefill.counters().usage == 0, SILENT_S + 20)
                took = time.monotonic() - start
            done = answer.result(60)
            ensure(free, f"the blocks are in use after {took:.0f} s")
            ensure(took <= SILENT_S, f"it took {took:.1f} s")
            expect_right(link.cluster, prompt, done)
        note.text = f"after {took:.1f} s"
    _goes_on(report, link, prompts, "decode continues")


def partition(report: Report, link: Link, prompts: Prompts) -> None:
    with report.check("partition while KV is read: decode computes, prefill frees the blocks") as note:
        prompt = prompts.fresh(PROMPT_TOKENS)
        with link.under_way(prompt) as answer:
            link.relay.held = True
            took = _reported(link)
            expect_right(link.cluster, prompt, answer.result(60))
            note.text = f"reported after {took:.1f} s; {link.cluster.expect_blocks_back(SILENT_S)}"
    _goes_on(report, link, prompts, "the partition ends")


def _reported(link: Link) -> float:
    """Seconds until decode reports a load that failed."""
    link.relay.bytes_per_s = None
    start, before = time.monotonic(), failures(link.decode)
    said = eventually(lambda: failures(link.decode) > before, SILENT_S + 20, 0.05)
    took = time.monotonic() - start
    ensure(said, f"decode has reported nothing after {took:.0f} s")
    ensure(took <= SILENT_S, f"decode reported after {took:.1f} s")
    return took


def _goes_on(report: Report, link: Link, prompts: Prompts, what: str) -> None:
    with report.check(f"{what}: the next requests are right, the blocks are free") as note:
        start, last = time.monotonic(), ""

        def works() -> bool:
            nonlocal last
            prompt, before = prompts.fresh(600), link.cluster.sources()
            answer = link.hand_over(prompt)
            expect_right(link.cluster, prompt, answer)
            loaded = link.cluster.sources()[2] - before[2]
            last = f"{loaded:.0f} tokens loaded"
            return loaded > 0

        ensure(eventually(works, 30, 0.5), f"no prompt is loaded in 30 s: {last}")
        took = time.monotonic() - start
        note.text = f"{took:.1f} s; {link.cluster.expect_blocks_back(UNCLAIMED_S + BLOCKS_BACK_S)}"


def queued(report: Report, link: Link, prompts: Prompts, seconds: float) -> None:
    """Decode runs one request at a time; others come first. `seconds`: longer than an offer waits for a consumer."""
    with report.check(f"decode queues for {seconds:.0f} s: the prompt's KV is still there") as note:
        prompt, before = prompts.fresh(700), link.cluster.sources()
        params = offer(link.prefill, prompt)
        first = [abandonable(link.decode.port, prompts.fresh(2), MAX_MODEL_TOKENS - 2) for _ in range(int(seconds))]
        eventually(lambda: link.decode.metric("vllm:num_requests_waiting") >= len(first) - 1, 10)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(complete, link.decode.port, prompt, params=params, timeout_s=seconds + 120)
            until = time.monotonic() + seconds
            try:
                while time.monotonic() < until:
                    ensure(not answer.done(), "the request did not wait")
                    time.sleep(0.2)
                held = link.prefill.counters().usage
            finally:
                for client in first:
                    client.close()
            done = answer.result(120)
        ensure(held > 0, "prefill holds no blocks")
        ensure(done.status == 200, str(done))
        reference = link.cluster.alone(prompt).tokens
        ensure(done.tokens == reference, mismatch(prompt, done.tokens, reference))
        loaded = int(link.cluster.sources()[2] - before[2])
        ensure(loaded >= len(prompt) - 1, f"{loaded} tokens loaded")
        note.text = f"{loaded} tokens loaded; {link.cluster.expect_blocks_back()}"
