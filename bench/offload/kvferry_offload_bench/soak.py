"""Many requests by an engine that is restarted again and again on one directory, twice by SIGKILL while it serves.

The store has room for a third of the prompts' blocks. Answers are compared with those of a server without a store and
without a cache. Memory is that of all processes of a server, without pages of files; it is compared inside of the
longest life, from its second quarter on, because a server takes memory with its first requests.
"""

from __future__ import annotations

import http.client
import json
import random
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal

from kvferry_e2e.client import Tokens, complete
from kvferry_e2e.instance import Instance
from kvferry_e2e.phases.offload import BLOCK_TOKENS, from_disk
from kvferry_e2e.prompts import Prompts
from kvferry_vllm_bench.rows import Row, none_of, shown

from kvferry_offload_bench.bench import MIB, Bench, token_bytes
from kvferry_offload_bench.disk import Sampled
from kvferry_offload_bench.processes import memory_bytes

PART = "soak"
STEMS, LEAVES = 12, 5
STEM_TOKENS = (200, 400, 700, 1000)
LEAF_TOKENS = (30, 130, 260, 400)
NEW_TOKENS = 12
AT_ONCE = 8
PARTS = 3
# For eight requests at once, not for all prompts.
CACHE_MIB = 40
# Shares of the requests, and how each life ends.
LIVES: tuple[tuple[float, Literal["SIGTERM", "SIGKILL"]], ...] = (
    (0.1, "SIGTERM"),
    (0.1, "SIGKILL"),
    (0.6, "SIGTERM"),
    (0.1, "SIGKILL"),
    (0.1, "SIGTERM"),
)
# Requests between two readings of a server's memory.
READ_EVERY = 20
SAY_EVERY = 5
# The last quarter of the longest life, of the second one.
GROWTH = 1.02


@dataclass
class _Run:
    prompts: list[Tokens]
    references: list[Tokens]
    wrong: int = 0
    answered: int = 0
    refused: int = 0
    memory: list[list[int]] = field(default_factory=list)
    loaded: list[float] = field(default_factory=list)


def measure(bench: Bench) -> Iterator[Row]:
    count = bench.options.requests
    prompts, blocks = _prompts()
    plain = bench.start("soak-plain", store=None)
    bench.ready(plain)
    run = _Run(prompts, [complete(plain.port, prompt, NEW_TOKENS).tokens for prompt in prompts])
    plain.kill()
    bound = blocks * BLOCK_TOKENS * token_bytes(bench.environment.model) // PARTS
    directory = bench.folder("soak") / "kv"
    settings = {"disk": str(directory), "disk_gib": bound / 2**30, "segment_mib": 1, "host_gib": 8 / 1024}
    with Sampled(directory) as sampled:
        for number, (share, ending) in enumerate(LIVES):
            server = bench.start(f"soak-{number}", store=settings, prefix_caching=True, cache_mib=CACHE_MIB)
            bench.ready(server)
            _life(bench, run, server, range(run.answered, run.answered + round(share * count)), ending)
    longest = max(run.memory, key=len)
    ratio = _late(longest) / _early(longest)
    yield none_of(PART, f"of {run.answered} answers, with other tokens than without a store", run.wrong)
    yield none_of(PART, f"requests that were not answered, except by {_kills()} engines that were killed", run.refused)
    yield none_of(PART, f"of {len(LIVES)} starts, that loaded nothing", sum(not tokens for tokens in run.loaded))
    yield sampled.row(PART, bound)
    what = f"memory, last quarter of {len(longest) * READ_EVERY} requests / second quarter"
    yield Row(PART, what, "", f"≤ {GROWTH:g}", ratio, (ratio, ratio), ratio <= GROWTH)
    for number, readings in enumerate(run.memory):
        yield shown(PART, f"memory of start {number + 1}, at its end", "MiB", [readings[-1] / MIB])


def _prompts() -> tuple[list[Tokens], int]:
    """Prompts of several with a common beginning, and how many blocks they have, equal ones counted once."""
    source, prompts, blocks = Prompts(seed=12), [], 0
    for stem_number in range(STEMS):
        stem = source.fresh(STEM_TOKENS[stem_number % len(STEM_TOKENS)])
        blocks += len(stem) // BLOCK_TOKENS
        for leaf_number in range(LEAVES):
            prompt = stem + source.fresh(LEAF_TOKENS[leaf_number % len(LEAF_TOKENS)])
            blocks += len(prompt) // BLOCK_TOKENS - len(stem) // BLOCK_TOKENS
            prompts.append(prompt)
    return prompts, blocks


def _life(bench: Bench, run: _Run, server: Instance, numbers: range, ending: str) -> None:
    readings: list[int] = []
    run.memory.append(readings)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for begin in range(numbers.start, numbers.stop, READ_EVERY):
            some = range(begin, min(begin + READ_EVERY, numbers.stop))
            ended = list(pool.map(lambda number: _request(run, server, number), some))
            _count(run, ended, server)
            readings.append(memory_bytes(server))
            if len(readings) % SAY_EVERY == 0:
                some_mib = ", ".join(f"{reading / MIB:.0f}" for reading in readings[-SAY_EVERY:])
                bench.say(f"{run.answered} answers, {some_mib} MiB of memory")
        run.loaded.append(from_disk(server))
        bench.say(
            f"{run.answered} answers, {run.wrong} wrong; {server.name}: {run.loaded[-1]:.0f} tokens from the store, "
            f"{readings[-1] / MIB:.0f} MiB of memory; {ending}"
        )
        if ending == "SIGKILL":
            under_way = [pool.submit(_request, run, server, number) for number in range(AT_ONCE)]
            # Some of them have been answered, the others are being loaded, computed or stored.
            under_way[0].result()
            server.kill()
            seen = [each.result() for each in under_way]
            run.wrong += seen.count("wrong")
        else:
            server.stop()


def _request(run: _Run, server: Instance, number: int) -> str:
    at = random.Random(number).randrange(len(run.prompts))
    try:
        answer = complete(server.port, run.prompts[at], NEW_TOKENS)
    except (OSError, http.client.HTTPException, json.JSONDecodeError):
        return "refused"
    if answer.status != 200:
        return "refused"
    return "right" if answer.tokens == run.references[at] else "wrong"


def _count(run: _Run, ended: Sequence[str], server: Instance) -> None:
    run.answered += len(ended) - ended.count("refused")
    run.wrong += ended.count("wrong")
    run.refused += ended.count("refused")
    if not server.alive():
        raise RuntimeError(f"{server.name} died; its log ends:\n{server.log_tail()}")


def _kills() -> int:
    return sum(ending == "SIGKILL" for _, ending in LIVES)


def _early(readings: Sequence[int]) -> float:
    quarter = len(readings) // 4
    return statistics.median(readings[quarter : 2 * quarter] or readings[:1])


def _late(readings: Sequence[int]) -> float:
    quarter = len(readings) // 4
    return statistics.median(readings[-quarter:] if quarter else readings[-1:])
