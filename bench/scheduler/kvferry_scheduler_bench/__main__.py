"""Measures the name of a prompt and the conversion of a list of blocks. A row is the median of the rounds.

In each round everything is measured once, with lists made anew, as an engine's are. The row with a bound is measured
right after the list was read, so that it says what the call costs and not what the machine's memory does. Before the
calls of other rows 64 MiB are copied, which drives the lists out of the caches. Rows with scattered ints have rounds of
their own at the end, since what they leave behind scatters the ints of later lists, too.

Then look-ups of a prompt in a store, which need no copies of memory in between: see `lookups.py`.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kvferry
from kvferry._kvferry import READS_INTS_DIRECTLY
from kvferry.connector import SchedulerHalf, prompt_id

from kvferry_scheduler_bench import lookups

TOKENS = 128 << 10
VOCABULARY = 150_000
BLOCK_TOKENS = 16
BLOCKS = TOKENS // BLOCK_TOKENS
COPIED = 64 << 20
# TensorRT-LLM's look-up without the names of the blocks, which vLLM has hashed before, of vLLM's look-up.
OF_VLLM = 1.0


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


def timed(call: Callable[[], Any]) -> float:
    """In milliseconds."""
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e3


def look_ups(rounds: int, rng: random.Random) -> bool:
    """Measures and prints them. True if a ratio is above its bound."""
    with tempfile.TemporaryDirectory() as directory:
        ours, vllm = lookups.TensorRTLLM(Path(directory) / "kv"), lookups.VLLM(Path(directory) / "kv")
        is_over = False
        for seed, what in ((0, "all in the store"), (1, "none in the store")):
            tokens = lookups.prompt(seed)
            expected = 0 if seed else lookups.BLOCKS
            found = (ours.found(tokens), vllm.look_up(seed)())
            if found != (expected, expected):
                raise SystemExit(f"{found} blocks were found, not {expected}")
            times: dict[str, list[float]] = {"get": [], "naming": [], "vllm": []}
            for _ in range(rounds):
                taken = {"get": ours.look_up(tokens), "naming": lookups.naming(tokens), "vllm": vllm.look_up(seed)}
                for name in rng.sample(list(taken), len(taken)):
                    times[name].append(timed(taken[name]))
            ratios = [
                (get - naming) / theirs
                for get, naming, theirs in zip(times["get"], times["naming"], times["vllm"], strict=True)
            ]
            get, naming, theirs = (statistics.median(times[name]) for name in ("get", "naming", "vllm"))
            print(f"{lookups.TOKENS} tokens, {lookups.BLOCKS} blocks, {what}:")
            print(f"  TensorRT-LLM, get_num_new_matched_tokens  {get:6.3f} ms, of which the names {naming:.3f}")
            print(f"  vLLM, KVFerryOffloadingManager.lookup     {theirs:6.3f} ms")
            if seed == 0:
                ratio = statistics.median(ratios)
                low, high = (statistics.quantiles(ratios, n=10)[at] for at in (0, -1))
                over = ": OVER" if ratio > OF_VLLM else ""
                is_over |= ratio > OF_VLLM
                spread = f"10 %: {low:.2f}, 90 %: {high:.2f}"
                print(f"  without the names, of vLLM's  {ratio:.2f} ({spread}), bound {OF_VLLM}{over}")
        ours.close()
        vllm.close()
    return is_over


def calls(rounds: int, rng: random.Random) -> bool:
    """Measures and prints the rows. True if one is over its bound."""
    measured, copies = rows(rng), []
    source, target = bytearray(COPIED), bytearray(COPIED)
    copied_gb_s(source, target)
    for are_scattered in (False, True):
        together = [row for row in measured if row.is_scattered == are_scattered]
        for _ in range(rounds):
            for row in rng.sample(together, len(together)):
                copies.append(copied_gb_s(source, target))
                call = row.make()
                if not row.is_cached:
                    copied_gb_s(source, target)
                row.ms.append(timed(call))
    print(f"memcpy of {COPIED >> 20} MiB: {statistics.median(copies):.1f} GB/s; medians of {rounds} rounds")
    width = max(len(row.name) for row in measured)
    for row in measured:
        low, high = (statistics.quantiles(row.ms, n=10)[at] for at in (0, -1))
        bound = "" if row.bound is None else f", bound {row.bound} ms" + (": OVER" if row.is_over else "")
        print(f"{row.name:{width}}  {row.median:6.3f} ms (10 %: {low:.3f}, 90 %: {high:.3f}){bound}")
    return any(row.is_over for row in measured)


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench/scheduler/run", description=__doc__)
    parser.add_argument("--rounds", type=int, default=41, help="at least 21 (default: %(default)s)")
    parser.add_argument("--check", action="store_true", help="fail if a row is over its bound")
    parser.add_argument("--only", choices=("calls", "look-ups"), help="measure a part")
    options = parser.parse_args()
    if options.rounds < 21:
        parser.error("--rounds must be at least 21")
    rng = random.Random(22)
    python = f"{platform.python_implementation()} {platform.python_version()}"
    print(f"kvferry {kvferry.__version__}, {python}, ints read {'directly' if READS_INTS_DIRECTLY else 'by calls'}")
    is_over = options.only != "look-ups" and calls(options.rounds, rng)
    is_over |= options.only != "calls" and look_ups(options.rounds, rng)
    return int(options.check and is_over)


if __name__ == "__main__":
    sys.exit(main())
