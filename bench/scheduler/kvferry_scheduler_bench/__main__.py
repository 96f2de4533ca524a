"""Measures the name of a prompt and the conversion of a list of blocks. A row is the median of the rounds.

In each round everything is measured once, with lists made anew, as an engine's are. The row with a bound is measured
right after the list was read, so that it says what the call costs and not what the machine's memory does. Before the
calls of other rows 64 MiB are copied, which drives the lists out of the caches. Rows with scattered ints have rounds of
their own at the end, since what they leave behind scatters the ints of later lists, too.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import kvferry
from kvferry._kvferry import READS_INTS_DIRECTLY
from kvferry.connector import SchedulerHalf, prompt_id

TOKENS = 128 << 10
VOCABULARY = 150_000
BLOCK_TOKENS = 16
BLOCKS = TOKENS // BLOCK_TOKENS
COPIED = 64 << 20


@dataclass
class Row:
    name: str
    # In milliseconds; None: measured for comparison.
    bound: float | None
    make: Callable[[], Callable[[], Any]]
    is_cached: bool = False
    is_scattered: bool = False
    ms: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.ms)

    @property
    def is_over(self) -> bool:
        return self.bound is not None and self.median > self.bound


def rows(rng: random.Random) -> list[Row]:
    half = SchedulerHalf([("full", 0, BLOCK_TOKENS)], ranks=1, timeout=60)

    text = json.dumps([rng.randrange(VOCABULARY) for _ in range(TOKENS)])

    def tokens() -> list[int]:
        # Every int is a new object.
        found: list[int] = json.loads(text)
        return found

    def read() -> Callable[[], Any]:
        prompt = tokens()
        sum(prompt)
        return lambda: prompt_id(prompt)

    def decoded() -> Callable[[], Any]:
        # vLLM hashes the blocks of a request before its scheduler gets it.
        prompt = tokens()
        for at in range(0, TOKENS, BLOCK_TOKENS):
            hash(tuple(prompt[at : at + BLOCK_TOKENS]))
        return lambda: prompt_id(prompt)

    def ordered() -> Callable[[], Any]:
        prompt = tokens()
        return lambda: prompt_id(prompt)

    def scattered() -> Callable[[], Any]:
        prompt = tokens()
        rng.shuffle(prompt)
        return lambda: prompt_id(prompt)

    def by_calls() -> Callable[[], Any]:
        prompt = tuple(tokens())
        return lambda: prompt_id(prompt)

    def step() -> Callable[[], Any]:
        blocks: list[int] = json.loads(json.dumps(rng.sample(range(10 * BLOCKS), BLOCKS)))
        # The half does not know the request, so that only the conversion is measured.
        return lambda: half.step([("unknown", 0, TOKENS, True, [blocks])], [])

    return [
        Row(f"prompt_id, {TOKENS} tokens, read just before", 0.3, read, is_cached=True),
        Row("the same, decoded and its blocks hashed just before", None, decoded, is_cached=True),
        Row("the same, by a call of the interpreter for each token", None, by_calls, is_cached=True),
        Row(f"prompt_id, {TOKENS} tokens, in no cache", None, ordered),
        Row("the same, ints scattered over the memory", None, scattered, is_scattered=True),
        Row(f"SchedulerHalf.step, {BLOCKS} blocks of an unknown request", None, step),
    ]


def copied_gb_s(source: bytearray, target: bytearray) -> float:
    began = time.perf_counter()
    memoryview(target)[:] = source
    return len(source) / (time.perf_counter() - began) / 1e9


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench/scheduler/run", description=__doc__)
    parser.add_argument("--rounds", type=int, default=41, help="at least 21 (default: %(default)s)")
    parser.add_argument("--check", action="store_true", help="fail if a row is over its bound")
    options = parser.parse_args()
    if options.rounds < 21:
        parser.error("--rounds must be at least 21")
    rng = random.Random(22)
    measured, copies = rows(rng), []
    source, target = bytearray(COPIED), bytearray(COPIED)
    copied_gb_s(source, target)
    for are_scattered in (False, True):
        together = [row for row in measured if row.is_scattered == are_scattered]
        for _ in range(options.rounds):
            for row in rng.sample(together, len(together)):
                copies.append(copied_gb_s(source, target))
                call = row.make()
                if not row.is_cached:
                    copied_gb_s(source, target)
                began = time.perf_counter()
                call()
                row.ms.append((time.perf_counter() - began) * 1e3)
    python = f"{platform.python_implementation()} {platform.python_version()}"
    print(f"kvferry {kvferry.__version__}, {python}, ints read {'directly' if READS_INTS_DIRECTLY else 'by calls'}")
    print(f"memcpy of {COPIED >> 20} MiB: {statistics.median(copies):.1f} GB/s; medians of {options.rounds} rounds")
    width = max(len(row.name) for row in measured)
    for row in measured:
        low, high = (statistics.quantiles(row.ms, n=10)[at] for at in (0, -1))
        bound = "" if row.bound is None else f", bound {row.bound} ms" + (": OVER" if row.is_over else "")
        print(f"{row.name:{width}}  {row.median:6.3f} ms (10 %: {low:.3f}, 90 %: {high:.3f}){bound}")
    return int(options.check and any(row.is_over for row in measured))


if __name__ == "__main__":
    sys.exit(main())
