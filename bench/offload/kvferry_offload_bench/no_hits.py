"""What a store costs an engine that never finds anything in it: processor time per token, store on beside off.

Two servers with the same model and options, one without a connector. They answer the same new prompts, one prompt at a
time in random order, so that what else the machine does meets both; the one that is not in turn is stopped. Each block
is new, so it is looked up and stored. What the processes of a server use until they are idle again counts, user and
system time; what the kernel does later to write pages to the disk does not.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator
from contextlib import contextmanager

from kvferry_e2e.client import Tokens, complete
from kvferry_e2e.instance import Instance
from kvferry_e2e.pair import METRICS_SETTLE_S, eventually
from kvferry_e2e.phases.offload import BLOCK_TOKENS
from kvferry_e2e.prompts import Prompts
from kvferry_vllm_bench.rows import Row, figure, interval, none_of, shown

from kvferry_offload_bench.bench import HEADS, PUT_BLOCKS, Bench
from kvferry_offload_bench.processes import cpu_seconds_when_idle

PART = "without hits, store on / off"
# Of a round.
LENGTHS = (400,) * 6
NEW_TOKENS = 8
TOKENS = sum(LENGTHS) + NEW_TOKENS * len(LENGTHS)
PERCENT = 2.0
# Of the store: one per block of the engine and KV head.
BLOCKS = HEADS * sum(length // BLOCK_TOKENS for length in LENGTHS)


def measure(bench: Bench) -> Iterator[Row]:
    prompts, chance = Prompts(seed=7), random.Random(7)
    kept = {"disk": str(bench.folder("no-hits") / "kv"), "disk_gib": 4}
    same = {"model": bench.large, "prefix_caching": True, "cache_mib": 256}
    bench.say("starting vLLM twice, with and without a store")
    on, off = bench.start("store-on", store=kept, **same), bench.start("store-off", store=None, **same)
    bench.ready(on, off)
    taken: dict[str, list[float]] = {on.name: [], off.name: []}
    answers: dict[str, list[list[Tokens]]] = {on.name: [], off.name: []}
    for server in (on, off):
        server.pause()
    for number in range(-1, bench.rounds):
        used = {on.name: 0.0, off.name: 0.0}
        said: dict[str, list[Tokens]] = {on.name: [], off.name: []}
        for length in LENGTHS:
            prompt = prompts.fresh(length)
            for server in chance.sample((on, off), 2):
                seconds, tokens = _answer(server, prompt)
                used[server.name] += seconds
                said[server.name].append(tokens)
        # The first round takes memory from the system, and does not count.
        for name in taken if number >= 0 else ():
            taken[name].append(1e6 * used[name] / TOKENS)
            answers[name].append(said[name])
        if number >= 0:
            last = ", ".join(f"{name} {each[-1]:.0f}" for name, each in taken.items())
            bench.say(f"round {number + 1} of {bench.rounds}: microseconds of processor time per token: {last}")
    on.resume()
    stored = _stored(on, BLOCKS * (bench.rounds + 1))
    more = [100 * (with_store / without - 1) for with_store, without in zip(*taken.values(), strict=True)]
    reached = statistics.median(more)
    within = reached <= PERCENT
    yield Row(PART, "more processor time per token", "%", f"≤ {figure(PERCENT)}", reached, interval(more), within)
    yield none_of(PART, "blocks that were not stored", BLOCKS * (bench.rounds + 1) - stored)
    wrong = sum(one != other for one, other in zip(*answers.values(), strict=True))
    yield none_of(PART, f"of {bench.rounds} rounds, with different tokens", wrong)
    for server, what in ((on, "store on"), (off, "store off")):
        yield shown(PART, f"processor time per token, {what}", "µs", taken[server.name])


@contextmanager
def _running(server: Instance) -> Iterator[None]:
    """Inside the block, its processes run."""
    server.resume()
    try:
        yield
    finally:
        server.pause()


def _stored(server: Instance, expected: int) -> int:
    def stored() -> float:
        return server.metric(PUT_BLOCKS, 'outcome="stored"')

    eventually(lambda: stored() >= expected, METRICS_SETTLE_S)
    return int(stored())


def _answer(server: Instance, prompt: Tokens) -> tuple[float, Tokens]:
    with _running(server):
        before = cpu_seconds_when_idle(server)
        answer = complete(server.port, prompt, NEW_TOKENS)
        if answer.status != 200:
            raise RuntimeError(f"{server.name}: {answer}")
        return cpu_seconds_when_idle(server) - before, answer.tokens
