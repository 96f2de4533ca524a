"""Many requests by an engine that is restarted again and again on one directory, twice by SIGKILL while it serves.

The store has room for a third of the prompts' blocks. Answers are compared with those of a server without a store, to
which the prompts were given one at a time. Memory is that of all processes of a server, without pages of files. vLLM's
own grows with the requests. So the growth inside of the longest incarnation, from the second quarter of its requests to
the last, is compared with that of the server without a store for the same requests.
"""

from __future__ import annotations

import http.client
import json
import random
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

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
# Shares of the requests, and how each incarnation ends.
INCARNATIONS: tuple[tuple[float, Literal["SIGTERM", "SIGKILL"]], ...] = (
    (0.1, "SIGTERM"),
    (0.1, "SIGKILL"),
    (0.6, "SIGTERM"),
    (0.1, "SIGKILL"),
    (0.1, "SIGTERM"),
)
# Requests between two readings of a server's memory.
READ_EVERY = 20
SAY_EVERY = 5
# Of the memory at the beginning. In 600 requests, one block of 512 KiB left behind by every second request is 4 %.
GROWTH_PERCENT = 3.0


@dataclass
class _Run:
    prompts: list[Tokens]
    references: list[Tokens]
    wrong: int = 0
    answered: int = 0
    refused: int = 0
    # Tokens from the store, by start.
    loaded: list[float] = field(default_factory=list)


def measure(bench: Bench) -> Iterator[Row]:
    count = bench.options.requests
    prompts, blocks = _prompts()
    bound = blocks * BLOCK_TOKENS * token_bytes(bench.environment.model) // PARTS
    directory = bench.folder("soak") / "kv"
    settings = {"disk": str(directory), "disk_gib": bound / 2**30, "segment_mib": 1, "host_gib": 8 / 1024}
    same: dict[str, Any] = {"prefix_caching": True, "cache_mib": CACHE_MIB}
    plain = bench.start("soak-plain", store=None, **same)
    server = bench.start("soak-0", store=settings, **same)
    bench.ready(plain, server)
    references = [complete(plain.port, prompt, NEW_TOKENS).tokens for prompt in prompts]
    beside = _Run(prompts, references)
    without_store = _serve(bench, beside, plain, range(round(max(share for share, _ in INCARNATIONS) * count)))
    plain.kill()
    run, memory = _Run(prompts, references), []
    with Sampled(directory) as sampled:
        for number, (share, ending) in enumerate(INCARNATIONS):
            if number > 0:
                server = bench.start(f"soak-{number}", store=settings, **same)
                bench.ready(server)
            # Each incarnation has the requests of the others, too: prompts that were stored.
            memory.append(_serve(bench, run, server, range(round(share * count))))
            _end(bench, run, server, ending)
    longest = max(memory, key=len)
    yield none_of(PART, f"of {run.answered} answers, with other tokens than without a store", run.wrong)
    yield none_of(PART, f"of {beside.answered} answers without a store, with other tokens at once", beside.wrong)
    yield none_of(PART, f"requests that were not answered, except by {_kills()} engines that were killed", run.refused)
    later = run.loaded[1:]
    yield none_of(PART, f"of {len(later)} restarts, that loaded nothing", later.count(0))
    yield sampled.row(PART, bound)
    with_growth, without_growth = _growth(longest), _growth(without_store)
    percent = 100 * (with_growth - without_growth) / longest[0]
    what = f"more memory in {len(longest) * READ_EVERY} requests, than without a store"
    yield Row(PART, what, "%", f"≤ {GROWTH_PERCENT:g}", percent, (percent, percent), percent <= GROWTH_PERCENT)
    for what, growth in (("", with_growth), (", without a store", without_growth)):
        yield shown(PART, f"memory, last quarter less second{what}", "MiB", [growth / MIB])
    for number, readings in enumerate(memory):
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


def _serve(bench: Bench, run: _Run, server: Instance, numbers: range) -> list[int]:
    """Returns readings of the server's memory, in bytes."""
    readings: list[int] = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for begin in range(numbers.start, numbers.stop, READ_EVERY):
            some = range(begin, min(begin + READ_EVERY, numbers.stop))
            ended = list(pool.map(lambda number: _request(run, server, number), some))
            _count(run, ended, server)
            readings.append(memory_bytes(server))
            if len(readings) % SAY_EVERY == 0:
                some_mib = ", ".join(f"{reading / MIB:.0f}" for reading in readings[-SAY_EVERY:])
                bench.say(f"{server.name}: {run.answered} answers, {run.wrong} wrong; {some_mib} MiB of memory")
    return readings


def _end(bench: Bench, run: _Run, server: Instance, ending: str) -> None:
    run.loaded.append(from_disk(server))
    bench.say(f"{server.name}: {run.loaded[-1]:.0f} tokens came from the store; {ending}")
    if ending == "SIGTERM":
        server.stop()
        return
    with ThreadPoolExecutor(AT_ONCE) as pool:
        under_way = [pool.submit(_request, run, server, number) for number in range(AT_ONCE)]
        # Some have been answered, the others are being loaded, computed or stored.
        under_way[0].result()
        server.kill()
        run.wrong += [each.result() for each in under_way].count("wrong")


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
    return sum(ending == "SIGKILL" for _, ending in INCARNATIONS)


def _growth(readings: Sequence[int]) -> float:
    """Bytes, from the second quarter to the last."""
    quarter = max(1, len(readings) // 4)
    return statistics.median(readings[-quarter:]) - statistics.median(readings[quarter : 2 * quarter] or readings[:1])
