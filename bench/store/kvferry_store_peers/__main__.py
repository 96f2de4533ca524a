"""kvferry's store, or its tier below vLLM, beside vLLM's fs tier and LMCache's disk: exit code 1 if it is short.

All stores take turns in one run. In every round each of them moves the same blocks, or replays the same trace, in a
new store in an empty folder of the same file system, in a new random order.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import random
import shutil
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from kvferry_e2e.environment import vllm_environment
from kvferry_e2e.overlay import kvferry_overlay, newest_wheel
from kvferry_e2e.progress import Progress

from kvferry_store_peers.judge import Rounds, Row, as_json, judged, table
from kvferry_store_peers.processes import TurnTaker, lmcache_overlay
from kvferry_store_peers.turns import DISK, Answer, Asked, forget

CHECKOUT = Path(__file__).resolve().parents[3]
STORES = ("kvferry", "kvferry-tier")
PEERS = ("vllm-fs", "lmcache-disk")
MODES = ("buffered", "direct")
PAGE = 4096
ROUNDS = 7
# Of a store whose bound must not matter. Only what is put takes space.
CAPACITY_BYTES = 64 << 30
KEPT_FREE_BYTES = 4 << 30
# ext4 does not use the inode of a deleted file for 5 seconds, and meanwhile looks for others each time a file is made.
# So the folders of a case are removed at its end.
RECENTLY_DELETED_S = 6.0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench/store/run", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk to measure [the working folder]")
    parser.add_argument("--trace", type=Path, help="a trace of requests with hash_ids, to replay as well")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"7 or more to judge by [{ROUNDS}]")
    parser.add_argument("--mib", type=int, default=512, help="to put and get in a turn, 0 for the trace only [512]")
    parser.add_argument(
        "--trace-mib", type=int, default=1024, help="distinct blocks of the trace, from its begin [1024]"
    )
    parser.add_argument("--per-call", type=int, default=16, help="blocks of a call [16]")
    parser.add_argument("--block-kib", type=int, nargs="+", default=[128, 2048], help="block sizes [128 2048]")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument(
        "--store", choices=STORES, default=STORES[0], help="what is judged: kvferry.Store or KVFerryTier"
    )
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=PEERS)
    parser.add_argument("--seed", type=int, default=1, help="of the order of the turns [1]")
    parser.add_argument("--wheel", type=Path, help="the kvferry wheel [the newest in target/wheels]")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    options = parser.parse_args()
    if any(kib <= 0 or kib * 1024 % PAGE for kib in options.block_kib):
        parser.error("a block is a multiple of 4 KiB")
    return options


@dataclass(frozen=True)
class Case:
    """What all stores do in a round."""

    name: str
    asked: Asked
    stores: tuple[str, ...]
    # On disk after a turn.
    needed_bytes: int


def cases(options: argparse.Namespace) -> list[Case]:
    found = []
    for kib, mode in itertools.product(options.block_kib, options.modes):
        size, direct = kib << 10, mode == "direct"
        name, all_stores = f"{mode} {kib} KiB", (options.store, *options.peers)
        blocks = (options.mib << 20) // size
        asked = Asked("", size, direct, CAPACITY_BYTES, blocks, options.per_call)
        if blocks:
            found.append(Case(name, asked, (DISK, *all_stores), blocks * size))
        if options.trace:
            prompts, unique = first_prompts(options.trace, (options.trace_mib << 20) // size)
            asked = Asked("", size, direct, CAPACITY_BYTES, prompts=prompts)
            found.append(Case(f"{name} trace", asked, all_stores, unique * size))
            bound = unique * size // 2
            asked = Asked("", size, direct, bound, prompts=prompts)
            # vLLM's tier has no bound.
            bounded = tuple(it for it in all_stores if it != "vllm-fs")
            found.append(Case(f"{name} trace, bounded", asked, bounded, bound))
    return found


def first_prompts(path: Path, blocks_max: int) -> tuple[list[list[int]], int]:
    """As many requests of a trace as have so many distinct blocks, and how many these are."""
    prompts: list[list[int]] = []
    unique: set[int] = set()
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            prompt = json.loads(line)["hash_ids"]
            if prompts and len(unique.union(prompt)) > blocks_max:
                break
            unique.update(prompt)
            prompts.append(prompt)
    return prompts, len(unique)


class Bench:
    def __init__(self, options: argparse.Namespace, takers: dict[str, TurnTaker], progress: Progress) -> None:
        self._options, self._takers, self._progress = options, takers, progress
        self._chance = random.Random(options.seed)
        self.failed: list[str] = []
        self.skipped: list[str] = []
        self.notes: dict[str, str] = {}

    def run(self, case: Case) -> list[Row]:
        """The first round does not count: it loads libraries and takes memory from the system."""
        needed = case.needed_bytes * (self._options.rounds + 1) * len(case.stores)
        free = shutil.disk_usage(self._options.folder).free - KEPT_FREE_BYTES
        if needed > free:
            self.skipped.append(f"{case.name}: needs {needed} bytes on disk, {max(free, 0)} may be used")
            return []
        with tempfile.TemporaryDirectory(prefix="kvferry-bench-store-", dir=self._options.folder) as folder:
            rounds = self._rounds(case, Path(folder))
        time.sleep(RECENTLY_DELETED_S)
        rows = judged(case.name, rounds, case.asked.direct, self._options.store)
        self._progress.say(f"{case.name}: done\n{table(rows)}")
        return rows

    def _rounds(self, case: Case, folder: Path) -> Rounds:
        rounds: Rounds = {store: {} for store in case.stores}
        stores = list(case.stores)
        for number in range(self._options.rounds + 1):
            self._chance.shuffle(stores)
            for store in list(stores):
                answer = self._turn(case, store, folder / f"{number}-{store}")
                if answer.failed or answer.skipped:
                    # Its earlier rounds don't count: the rounds of all stores are compared one by one.
                    rounds.pop(store)
                    stores.remove(store)
                elif number > 0:
                    for what, figure in answer.figures.items():
                        rounds[store].setdefault(what, []).append(figure)
        return rounds

    def _turn(self, case: Case, store: str, folder: Path) -> Answer:
        folder.mkdir()
        answer = self._takers[store].take(dataclasses.replace(case.asked, folder=str(folder)))
        # Neither what is to be written nor what is in the page cache is left to the next turn.
        forget(folder)
        if answer.failed:
            self.failed.append(f"{case.name}, {store}: {answer.failed}")
        elif answer.skipped:
            self.skipped.append(f"{case.name}, {store}: {answer.skipped}")
        elif answer.version:
            self.notes[store] = f"{store} {answer.version}: {answer.note}"
        return answer


def main() -> None:
    options = arguments()
    progress = Progress()
    wheel = options.wheel or newest_wheel(CHECKOUT)
    if wheel is None:
        sys.exit("no wheel in target/wheels: run `make wheel` first")
    options.folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        environment = stack.enter_context(vllm_environment(progress.say))
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-bench-")))
        sites = {options.store: kvferry_overlay(environment, wheel, scratch / "site", progress.say)}
        if "lmcache-disk" in options.peers:
            sites["lmcache-disk"] = lmcache_overlay(environment, progress.say)
        names = (DISK, options.store, *options.peers)
        takers = {it: TurnTaker(it, environment, sites.get(it), scratch / f"{it}.log") for it in names}
        for taker in takers.values():
            stack.callback(taker.stop)
        bench = Bench(options, takers, progress)
        rows: list[Row] = []
        try:
            for case in cases(options):
                rows += bench.run(case)
        except KeyboardInterrupt:
            bench.failed.append("interrupted")
        sys.exit(report(options, rows, bench))


def report(options: argparse.Namespace, rows: list[Row], bench: Bench) -> int:
    ok = bool(rows) and all(row.ok for row in rows) and not bench.failed
    if options.json:
        said = {"rows": as_json(rows), "failed": bench.failed, "skipped": bench.skipped, "stores": bench.notes}
        print(
            json.dumps({"schema": "kvferry.bench-store-peers/1", "ok": ok, "rounds": options.rounds} | said, indent=1)
        )
    else:
        print(table(rows))
        for title, lines in (("", bench.notes.values()), ("FAILED ", bench.failed), ("SKIPPED ", bench.skipped)):
            for line in lines:
                print(f"{title}{line}")
    return 0 if ok else 1


if __name__ == "__main__":
    main()
