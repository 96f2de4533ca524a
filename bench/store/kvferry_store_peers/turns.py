"""A process of a store's environment: takes a turn for each line of JSON that it reads, and answers with one."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import mmap
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvferry_store_peers.stores import Call, Kvferry, LmcacheDisk, Spent, Store, UnavailableError
from kvferry_store_peers.tiers import KvferryTier, VllmFs

KINDS: dict[str, type[Store]] = {
    "kvferry": Kvferry,
    "kvferry-tier": KvferryTier,
    "vllm-fs": VllmFs,
    "lmcache-disk": LmcacheDisk,
}

# Blocks in memory at a time. kvferry refuses puts where more than 256 MiB wait.
STAGING_BYTES = 256 << 20
# Threads and bytes of an operation that show what the disk can do.
DISK_THREADS, DISK_BYTES = 16, 2 << 20
DISK = "disk"


@dataclass(frozen=True)
class Asked:
    """A turn: a new store in an empty folder."""

    folder: str
    block_bytes: int
    direct: bool
    # Capacity, of a store that has one.
    bound_bytes: int
    # To put and get, in calls of `per_call` blocks; none where a trace is replayed.
    blocks: int = 0
    per_call: int = 16
    # Prompts of a trace, as names of blocks.
    prompts: list[list[int]] = field(default_factory=list)


@dataclass
class Figure:
    """`moved_bytes`: those that were stored or read. `hits` and `refused` are blocks."""

    moved_bytes: int
    seconds: float
    cpu_s: float
    hits: int = 0
    refused: int = 0


@dataclass
class Answer:
    figures: dict[str, Figure] = field(default_factory=dict)
    version: str = ""
    note: str = ""
    # A reason, instead of figures.
    skipped: str = ""
    failed: str = ""


def put_and_get(kind: type[Store], asked: Asked) -> dict[str, Figure]:
    numbers = list(range(asked.blocks))
    calls = [Call(numbers[at : at + asked.per_call]) for at in range(0, len(numbers), asked.per_call)]
    per_round = max(1, STAGING_BYTES // asked.block_bytes // asked.per_call)
    rounds = [calls[at : at + per_round] for at in range(0, len(calls), per_round)]
    folder = Path(asked.folder)
    store = kind(folder, asked.block_bytes, per_round * asked.per_call, asked.direct, asked.bound_bytes)
    figures: dict[str, Figure] = {}
    take_pages(folder, asked.blocks * asked.block_bytes)

    def note(what: str, spent: Spent, refused: int = 0) -> None:
        moved = (asked.blocks - refused) * asked.block_bytes
        figures[what] = Figure(moved, spent.seconds, spent.cpu_s, refused=refused)

    def gets(what: str, drop: bool) -> None:
        for order in store.orders:
            if drop:
                settle(folder, drop=True)
            spent = Spent()
            for each in rounds:
                store.get(each, order, spent)
            note(f"{what}, {order}", spent)

    try:
        spent, refused = Spent(), 0
        for each in rounds:
            refused += store.put(each, spent)
        note("put", spent, refused)
        settle(folder, drop=False)
        if asked.direct:
            gets("get", drop=False)
        else:
            gets("get warm", drop=False)
            gets("get cold", drop=True)
    finally:
        store.close()
    return figures


def replay(kind: type[Store], asked: Asked) -> dict[str, Figure]:
    """One request at a time: look up its blocks, get the prefix that is there, put the others, and wait."""
    rows = max(map(len, asked.prompts))
    store = kind(Path(asked.folder), asked.block_bytes, rows, asked.direct, asked.bound_bytes)
    take_pages(Path(asked.folder), len(set(itertools.chain(*asked.prompts))) * asked.block_bytes)
    looked, got, put = Spent(), Spent(), Spent()
    hits, stored, refused = 0, 0, 0
    try:
        for prompt in asked.prompts:
            found = store.look_up(prompt, looked)
            if found:
                store.get([Call(prompt[:found])], store.orders[0], got)
            store.end_request()
            if prompt[found:]:
                refused += store.put([Call(prompt, found)], put)
            hits, stored = hits + found, stored + len(prompt) - found
    finally:
        store.close()
    stored -= refused
    size = asked.block_bytes
    parts = ((looked, 0), (got, hits), (put, stored))
    figures = {
        what: Figure(moved * size, spent.seconds, spent.cpu_s)
        for what, (spent, moved) in zip(("look up", "get", "put"), parts, strict=True)
    }
    seconds = sum(spent.seconds for spent, _ in parts)
    cpu_s = sum(spent.cpu_s for spent, _ in parts)
    figures["all"] = Figure((hits + stored) * size, seconds, cpu_s, hits, refused)
    return figures


def disk(asked: Asked) -> dict[str, Figure]:
    """What the disk can do: one file, past the page cache, with as many operations under way as the stores have."""
    path, length = Path(asked.folder) / "disk", asked.blocks * asked.block_bytes // DISK_BYTES * DISK_BYTES
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    os.posix_fallocate(file, 0, length)
    moves = (("put", os.pwritev), ("get", os.preadv))
    figures = {what: _timed(move, file, length) for what, move in moves}
    os.close(file)
    return figures


def _timed(move: Callable[[int, list[mmap.mmap], int], int], file: int, length: int) -> Figure:
    waiting = queue.SimpleQueue[int]()
    for at in range(0, length, DISK_BYTES):
        waiting.put(at)

    def work() -> None:
        memory = mmap.mmap(-1, DISK_BYTES)
        with contextlib.suppress(queue.Empty):
            while True:
                move(file, [memory], waiting.get_nowait())

    threads = [threading.Thread(target=work) for _ in range(DISK_THREADS)]
    spent = Spent()
    with spent.timed():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return Figure(length, spent.seconds, spent.cpu_s)


def files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def settle(folder: Path, drop: bool) -> None:
    """Writes dirty pages back, so that this does not run beside what is timed; `drop` also empties the page cache.

    Before that, it reads the files once: the first time is slow for any program where the machine is a virtual one,
    whose host has neither the file's blocks nor the guest's free pages in memory.
    """
    if drop:
        forget(folder)
        buffer = mmap.mmap(-1, 1 << 20)
        for path in files(folder):
            with open(path, "rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass
        forget(folder)
    else:
        for path in files(folder):
            with open(path, "rb") as file:
                os.fsync(file)


def forget(folder: Path) -> None:
    """Writes dirty pages back, and empties the page cache."""
    for path in files(folder):
        with open(path, "rb") as file:
            os.fsync(file)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def take_pages(folder: Path, length: int) -> None:
    """Has the host of a virtual machine give memory for a page cache of this length, before something is timed."""
    with open(folder / "pages", "wb", buffering=0) as file:
        for _ in range(0, length, 1 << 20):
            file.write(bytes(1 << 20))
    os.unlink(folder / "pages")


def take(kind: type[Store], asked: Asked) -> Answer:
    try:
        figures = replay(kind, asked) if asked.prompts else put_and_get(kind, asked)
        return Answer(figures, kind.version(), kind.note)
    except (UnavailableError, ImportError) as why:
        return Answer(skipped=str(why))
    except Exception as why:
        # A store may raise anything; the other turns are still wanted.
        return Answer(failed=f"{type(why).__name__}: {why}")


def main() -> None:
    name = sys.argv[1]
    # The stores' libraries may print: answers have a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        asked = Asked(**json.loads(line))
        answer = Answer(disk(asked)) if name == DISK else take(KINDS[name], asked)
        print(json.dumps(dataclasses.asdict(answer)), file=answers, flush=True)


if __name__ == "__main__":
    main()
