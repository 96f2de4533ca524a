"""`KVFerryOffloadingSpec` in vLLM's own OffloadingConnector, with engine cores whose KV can be checked everywhere.

The names in the descriptions are those of vLLM's tests of offloading managers, workers and its connector that are
stated anew here.
"""

from __future__ import annotations

import inspect
import os
import queue
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from kvferry.vllm._offload_events import engine_waker
from kvferry.vllm._offload_stats import LOOKUPS
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.kv_offload.base import GPULoadStoreSpec, LookupResult, ReqContext, TierFilter, make_offload_key

from kvferry_e2e.contract import tier
from kvferry_e2e.contract.engine import BLOCK_TOKENS, Engine, ForwardError, Kind, Outcome, run
from kvferry_e2e.contract.model import WINDOW, Sequence
from kvferry_e2e.prompts import Prompts
from kvferry_e2e.report import Note, SkippedError, ensure

SPEC = {"spec_name": "KVFerryOffloadingSpec", "spec_module_path": "kvferry.vllm"}
VICTIM_SEED = 77
DISK = {"disk_gib": 0.125, "segment_mib": 1, "blocks_max": 100_000}


class Node:
    """An engine that offloads to the store in a directory."""

    def __init__(
        self, model: str, directory: Path | str, *, settings: dict[str, Any] | None = None, **more: Any
    ) -> None:
        options: dict[str, Any] = {"caching": True, "policy": "recompute", **more}
        extra = {**SPEC, **DISK, "disk": str(directory), **(settings or {})}
        self.engine = Engine(model, connector="OffloadingConnector", extra=extra, **options)
        self.free = self.engine.free_blocks
        self._number = 0

    @property
    def manager(self) -> Any:
        return self.engine.scheduler.get_kv_connector().connector_scheduler.manager

    def workers(self) -> list[Any]:
        return [rank.connector.connector_worker.worker for rank in self.engine.executor.ranks]

    def name(self) -> str:
        self._number += 1
        return f"o{self._number}"

    def ask(self, prompt: list[int], tokens: int = 4, **more: Any) -> Outcome:
        return self.engine.submit(self.name(), prompt, tokens, **more)

    def answer(self, prompt: list[int], tokens: int = 4, **more: Any) -> Outcome:
        """A request, until nothing is under way: what it computed is stored."""
        outcome = self.ask(prompt, tokens, **more)
        run(self.engine)
        right(prompt, outcome)
        return outcome

    def forget(self) -> None:
        """Drops the engine's own cache, not the store's."""
        ensure(self.engine.core.reset_prefix_cache(), "the prefix cache is not reset")

    def settled(self) -> None:
        run(self.engine)
        ensure(not self.engine.wrong(), f"{self.engine.wrong()[:3]}")
        ensure(not self.engine.scheduler.requests, f"still has {list(self.engine.scheduler.requests)}")
        self.forget()
        ensure(self.engine.free_blocks == self.free, f"{self.engine.free_blocks} of {self.free} blocks are free")
        for worker in self.workers():
            ensure(not worker._jobs and not worker._failed, f"jobs are left: {worker._jobs} {worker._failed}")
        manager = self.manager
        ensure(not manager._pins and not manager._storing, f"left: {manager._pins} {manager._storing}")


def right(prompt: list[int], outcome: Outcome) -> None:
    expected = Sequence(prompt).answer(len(outcome.tokens))
    ensure(outcome.reason == "length", f"{outcome}")
    ensure(outcome.tokens == expected, f"tokens {outcome.tokens} instead of {expected}")


def loaded(outcome: Outcome) -> int:
    """Tokens that came from the store."""
    return int(outcome.prefill.num_external_cached_tokens)


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvferry-offload-", ignore_cleanup_errors=True) as name:
        yield Path(name) / "kv"


@contextmanager
def node(model: str, directory: Path | str, **more: Any) -> Iterator[Node]:
    made = Node(model, directory, **more)
    try:
        yield made
    finally:
        made.engine.close()


def second_engine(suite: Any, kind: Kind, asynchronous: bool, host: float, note: Note) -> None:
    """test_offloading_connector: a second engine on the directory loads what the first one stored."""
    lengths = (BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, WINDOW, 133, 400)
    prompts = [suite.prompts.fresh(length) for length in lengths]
    options: dict[str, Any] = {"kind": kind, "asynchronous": asynchronous, "settings": {"host_gib": host}}
    with folder() as directory:
        with node(suite.model, directory, **options) as first:
            for prompt in prompts:
                ensure(loaded(first.answer(prompt)) == 0, "a prompt that was never stored was loaded")
            first.settled()
        found = []
        with node(suite.model, directory, **options) as second:
            for prompt in prompts:
                found.append(loaded(second.answer(prompt)))
            # Beside each other, and from the engine's own cache.
            again = [(prompt, second.ask(prompt)) for prompt in prompts]
            run(second.engine)
            for prompt, outcome in again:
                right(prompt, outcome)
            second.settled()
        least = [(length - 1) // BLOCK_TOKENS * BLOCK_TOKENS for length in lengths]
        if kind != "aligned":
            ensure(all(got >= want for got, want in zip(found, least, strict=True)), f"loaded {found} of {least}")
        note.text = f"tokens loaded: {found}"


def parallel(suite: Any, before: int, after: int, kind: Kind, note: Note) -> None:
    """test_canonical_mapping: an engine of another tensor parallelism finds the blocks, each head in its place."""
    prompts = [suite.prompts.fresh(length) for length in (20, 133, 333)]
    with folder() as directory:
        with node(suite.model, directory, ranks=before, kind=kind) as first:
            for prompt in prompts:
                first.answer(prompt)
            first.settled()
        with node(suite.model, directory, ranks=after, kind=kind) as second:
            found = [loaded(second.answer(prompt)) for prompt in prompts]
            second.settled()
    ensure(found == [len(prompt) // BLOCK_TOKENS * BLOCK_TOKENS for prompt in prompts], f"loaded {found}")
    note.text = f"tokens loaded: {found}"


def chunks(suite: Any, kind: Kind, each: int, note: Note) -> None:
    """test_blocks_per_chunk: a block of the store holds several of the engine's; loads begin and end inside one."""
    with folder() as directory:
        settings = {"blocks_per_chunk": each}
        stem = suite.prompts.fresh(400)
        with node(suite.model, directory, kind=kind, settings=settings) as first:
            first.answer(stem)
            first.settled()
        found = []
        with node(suite.model, directory, kind=kind, settings=settings) as second:
            # The engine's cache ends inside a block of the store.
            for length in (17, 70, 130, 250, 399):
                second.answer(suite.prompts.fresh(300) + stem[:3])
                found.append(loaded(second.answer(stem[:length])))
            second.settled()
            second.forget()
            found.append(loaded(second.answer(stem)))
        ensure(found[-1] >= 384 - each * BLOCK_TOKENS, f"loaded {found}")
        note.text = f"tokens loaded: {found}"


def shared(suite: Any, asynchronous: bool, note: Note) -> None:
    """Two engines on one directory at the same time: each finds what the other one put, while both serve."""
    with folder() as directory, node(suite.model, directory, asynchronous=asynchronous) as one:
        with node(suite.model, directory, asynchronous=asynchronous) as other:
            found = []
            for at in range(8):
                prompt = suite.prompts.fresh(60 + 40 * at)
                here, there = (one, other) if at % 2 else (other, one)
                here.answer(prompt)
                found.append(loaded(there.answer(prompt)))
            asked = []
            for at in range(10):
                prompt = suite.prompts.fresh(48 + 30 * at)
                asked += [(prompt, engine.ask(prompt)) for engine in (one, other)]
                one.engine.step()
                other.engine.step()
            run(one.engine, other.engine)
            for prompt, outcome in asked:
                right(prompt, outcome)
            other.settled()
        one.settled()
        ensure(min(found) >= 48, f"loaded {found}")
        note.text = f"tokens loaded: {found}"


def aborted(suite: Any, asynchronous: bool, note: Note, **more: Any) -> None:
    """test_abort_loading_requests: clients leave after each number of steps of a store and of a load."""
    options = {"asynchronous": asynchronous, "batched_tokens": 64, **more}
    with folder() as directory, node(suite.model, directory, **options) as only:
        count = 0
        for loads in (False, True):
            for steps in range(10):
                prompt = suite.prompts.fresh(170)
                if loads:
                    only.answer(prompt)
                    only.forget()
                outcome = only.ask(prompt, 8)
                for _ in range(steps):
                    only.engine.step()
                if outcome.reason is None:
                    only.engine.abort(f"o{only._number}")
                    count += 1
                only.settled()
                only.answer(prompt)
        only.settled()
        note.text = f"{count} aborts"


def preempted(suite: Any, kind: Kind, asynchronous: bool, note: Note, **more: Any) -> None:
    """test_preemption: an engine that has blocks for few requests takes them back, also while they are stored."""
    blocks = 40 if kind == "full" else 80
    options: dict[str, Any] = {"kind": kind, "asynchronous": asynchronous, "blocks": blocks, **more}
    with (
        folder() as directory,
        node(suite.model, directory, settings={"offload_prompt_only": False}, **options) as only,
    ):
        prompts = [suite.prompts.fresh(150 + at) for at in range(6)]
        for _ in range(2):
            asked = [(prompt, only.ask(prompt, 120)) for prompt in prompts]
            run(only.engine)
            for prompt, outcome in asked:
                right(prompt, outcome)
        only.settled()
        note.text = f"{sum(loaded(outcome) for _, outcome in asked)} tokens loaded by the second round"


def reset(suite: Any, asynchronous: bool, note: Note, **more: Any) -> None:
    """test_reset_cache: after a reset the engine finds nothing from before, others do; requests that run end right."""
    options = {"asynchronous": asynchronous, "batched_tokens": 64, **more}
    with folder() as directory, node(suite.model, directory, **options) as only:
        prompt, resets = suite.prompts.fresh(200), 0
        only.answer(prompt)
        for steps in (0, 1, 3, 5, 8):
            asked = [(it, only.ask(it, 12)) for it in (prompt, suite.prompts.fresh(150))]
            for _ in range(steps):
                only.engine.step()
            for _ in range(100):
                # vLLM refuses while blocks wait for a load, and may do so again and again with several batches at once:
                # each try sends the requests back to their beginning.
                with suppress(RuntimeError):
                    only.engine.core.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
                    resets += 1
                    break
                only.engine.step()
            run(only.engine)
            for it, outcome in asked:
                right(it, outcome)
        only.forget()
        only.engine.core.reset_prefix_cache(reset_connector=True)
        ensure(loaded(only.answer(prompt)) == 0, "found a block from before the reset")
        only.forget()
        ensure(loaded(only.answer(prompt)) == 192, "did not find what it stored after the reset")
        only.settled()
        ensure(resets > 0, "no reset while requests were under way")
        note.text = f"{resets} resets while requests were under way"
        with node(suite.model, directory, **options) as other:
            ensure(loaded(other.answer(prompt)) == 192, "another engine does not find the blocks")


def versions(suite: Any, asynchronous: bool, note: Note) -> None:
    """After another version of the weights, blocks that vLLM's cache still has of the ones before are not stored."""
    with folder() as directory, node(suite.model, directory, asynchronous=asynchronous, batched_tokens=64) as only:
        prompt = suite.prompts.fresh(200)
        only.answer(prompt)
        only.engine.core.set_weight_version("2")
        # vLLM finds it in its cache, and offers it to the store once more.
        only.answer(prompt)
        only.forget()
        ensure(loaded(only.answer(prompt)) == 0, "found a block of the weights before")
        only.forget()
        ensure(loaded(only.answer(prompt)) == 192, "did not find what it stored after the reset")
        only.settled()


def _segments(directory: Path) -> list[Path]:
    return sorted(directory.glob("segment-*"))


def _damage(directory: Path) -> None:
    """Flips a bit in each 64 bytes of each segment."""
    for segment in _segments(directory):
        data = bytearray(segment.read_bytes())
        for at in range(4096, len(data), 64):
            data[at] ^= 1
        with open(segment, "r+b") as file:
            file.write(data)


def damaged(suite: Any, kind: Kind, asynchronous: bool, ranks: int, note: Note, **more: Any) -> None:
    """test_kv_load_failure_recovery, test_invalid_blocks_correctness: blocks that are found but can't be read."""
    with folder() as directory:
        options: dict[str, Any] = {"kind": kind, "asynchronous": asynchronous, "ranks": ranks, **more}
        with node(suite.model, directory, **options) as only:
            stem = suite.prompts.fresh(160)
            prompts = [stem + suite.prompts.fresh(30 * at) for at in range(1, 5)]
            for prompt in prompts:
                only.answer(prompt)
            only.forget()
            _damage(directory)
            failed = _unreadable(only)
            asked = [(prompt, only.ask(prompt, 6)) for prompt in prompts]
            run(only.engine)
            for prompt, outcome in asked:
                right(prompt, outcome)
            failed = _unreadable(only) - failed
            ensure(failed > 0, "no load has failed")
            only.settled()
            only.answer(stem)
            only.settled()
            note.text = f"{failed} blocks could not be read"


def one_rank(suite: Any, kind: Kind, note: Note, **more: Any) -> None:
    """test_kv_output_aggregator_failures: a rank fails to load, the other one does not: the request is computed."""
    options: dict[str, Any] = {"kind": kind, **(more or {"ranks": 2})}
    with folder() as directory, node(suite.model, directory, **options) as only:
        prompt = suite.prompts.fresh(160)
        only.answer(prompt)
        only.forget()
        worker, loads = only.workers()[1], []
        submit = worker.submit_load

        def fail(job: int, source: Any, pages: Any) -> bool:
            made = bool(submit(job, source, pages))
            if not loads:
                worker._jobs[job].failure = "made up"
            loads.append(job)
            return made

        worker.submit_load = fail
        outcome = only.answer(prompt)
        worker.submit_load = submit
        ensure(len(loads) == 2, f"{len(loads)} loads were begun, and not one that fails and another one")
        only.settled()
        ensure(loaded(outcome) > 0, "the request was not loaded when it was asked again")


def _unreadable(only: Node) -> int:
    """Damaged blocks that the workers have read."""
    return sum(int(worker._opened.store.stats()["corrupt"]) for worker in only.workers())


def raising(suite: Any, layers: int, note: Note) -> None:
    """A forward pass raises, and the engine ends: a second engine finds what was stored before, and nothing of it."""
    before, lost = suite.prompts.fresh(200), suite.prompts.fresh(200)
    with folder() as directory:
        with node(suite.model, directory) as first:
            first.answer(before)
            first.engine.executor.ranks[0].raises_after = layers
            outcome = first.ask(lost)
            raised = False
            try:
                run(first.engine, within=60)
            except ForwardError:
                raised = True
            ensure(raised and not outcome.tokens, f"the forward pass did not raise: {outcome}")
        with node(suite.model, directory) as second:
            found = [loaded(second.answer(prompt)) for prompt in (before, lost)]
            second.settled()
    ensure(found == [192, 0], f"of the prompt before and that of the pass, {found} tokens were loaded")


def left(suite: Any, note: Note) -> None:
    """A block leaves the store after it was found: the request computes it, loads the blocks before it, and no other
    request is concerned.
    """
    with folder() as directory, node(suite.model, directory) as only:
        prompt = suite.prompts.fresh(160)
        only.answer(prompt)
        only.forget()
        manager = only.manager
        asks, told = manager._prefix, []

        def two_more(group: Any, keys: Any) -> int:
            here = int(asks(group, keys))
            if told or len(keys) < 8:
                return here
            told.append(here)
            return here + 2

        longer = prompt + suite.prompts.fresh(64)
        manager._prefix = two_more
        outcome = only.answer(longer)
        manager._prefix = asks
        ensure(told == [10], f"told {told}")
        ensure(loaded(outcome) == 160, f"loaded {outcome.prefill}")
        only.settled()


def much(suite: Any, note: Note) -> None:
    """What is computed faster than the disk takes it waits for its turn, and is all stored."""
    with folder() as directory, node(suite.model, directory) as only:
        prompts = [suite.prompts.fresh(400) for _ in range(6)]
        asked = [(prompt, only.ask(prompt)) for prompt in prompts]
        run(only.engine)
        for prompt, outcome in asked:
            right(prompt, outcome)
        only.forget()
        ensure([loaded(only.answer(prompt)) for prompt in prompts] == [400] * 6, "not all blocks were stored")
        only.settled()


def fails(suite: Any, note: Note) -> None:
    """test_error_propagation: with vLLM's policy `fail` a request that can't load ends with an error, and no other."""
    with folder() as directory, node(suite.model, directory, policy="fail") as only:
        lost, fine = suite.prompts.fresh(100), suite.prompts.fresh(100)
        only.answer(lost)
        only.forget()
        _damage(directory)
        asked, other = only.ask(lost), only.ask(fine)
        run(only.engine)
        ensure(asked.reason == "error", f"{asked}")
        right(fine, other)
        only.settled()


def gone(suite: Any, how: str, note: Note) -> None:
    """The directory is removed, or another one takes its place, while the engine serves."""
    with folder() as directory, node(suite.model, directory) as only:
        before = suite.prompts.fresh(200)
        only.answer(before)
        directory.rename(directory.with_name("away"))
        if how == "removed":
            shutil.rmtree(directory.with_name("away"))
        elif how == "replaced":
            directory.mkdir()
        else:
            directory.write_text("no directory")
        for _ in range(3):
            only.forget()
            for prompt in (before, suite.prompts.fresh(230)):
                only.answer(prompt)
        only.settled()


@contextmanager
def file_system(mib: int) -> Iterator[Path]:
    """An ext4 file system in a file: needs mkfs.ext4, a loop device, and the right to mount."""
    with folder() as directory:
        directory.mkdir(parents=True)
        image = directory.with_name("image")
        with open(image, "wb") as file:
            file.truncate(mib << 20)
        _privileged("mkfs.ext4", "-q", "-m", "0", image)
        _privileged("mount", "-o", "loop", image, directory)
        try:
            yield directory
        finally:
            # The kernel may hold files of a closed store a little longer.
            subprocess.run(["umount", "--lazy", directory], check=True)


def _privileged(*command: str | Path) -> None:
    try:
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise SkippedError(f"{command[0]} is missing") from error
    if ended.returncode:
        raise SkippedError(f"{command[0]}: {ended.stderr.strip()}")


def read_only(suite: Any, note: Note) -> None:
    """The kernel makes the file system read-only, as after an error of the disk: the engine loads what is there."""
    with file_system(64) as directory, node(suite.model, directory / "kv") as only:
        before = suite.prompts.fresh(200)
        only.answer(before)
        _privileged("mount", "-o", "remount,abort", directory)
        for _ in range(3):
            for prompt in (before, suite.prompts.fresh(400)):
                only.forget()
                only.answer(prompt)
        only.forget()
        found = loaded(only.answer(before))
        only.settled()
        ensure(found == 192, f"{found} tokens were loaded from the read-only file system")


def no_space(suite: Any, note: Note) -> None:
    """The file system is full before the store is: what can't be written is refused, later blocks are stored again."""
    with file_system(64) as directory, node(suite.model, directory / "kv") as only:
        before = suite.prompts.fresh(200)
        only.answer(before)
        with suppress(OSError), open(directory / "other", "wb") as other:
            while True:
                other.write(bytes(1 << 16))
        for _ in range(40):
            only.answer(suite.prompts.fresh(400), 2)
        only.forget()
        found = loaded(only.answer(before))
        stats = only.workers()[0]._opened.store.stats()
        only.settled()
        ensure(found == 192, f"{found} tokens were loaded from the full file system")
        ensure(stats["failed"] + stats["refused"] > 0, f"all was stored: {stats}")
        directory.joinpath("other").unlink()
        after = suite.prompts.fresh(400)
        for _ in range(600):
            only.answer(after)
            only.forget()
            if loaded(only.answer(after)):
                break
            time.sleep(0.05)
        else:
            ensure(False, "nothing is stored after there was space again")
        only.settled()
        note.text = f"{stats['stored']} stored, {stats['refused']} refused, {stats['failed']} failed"


def killed(suite: Any, note: Note) -> None:
    """An engine in another process is killed while both store and load: this one goes on, and finds what was put."""
    with folder() as directory, node(suite.model, directory, settings={"disk_gib": 0.03125}) as only:
        own = [suite.prompts.fresh(200) for _ in range(4)]
        for prompt in own:
            only.answer(prompt)
        command = [sys.executable, "-m", "kvferry_e2e.contract.victim", suite.model, str(directory)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as victim:
            assert victim.stdout is not None
            try:
                lines = iter(victim.stdout.readline, "")
                ensure(any(line == "ready\n" for line in lines), "the other engine has not started")
                # It is killed in the middle of a request: it says when one ends, and is at the next one.
                for _ in range(20):
                    next(lines, None)
                    for prompt in own:
                        only.forget()
                        only.answer(prompt)
            finally:
                victim.kill()
        stats = only.workers()[0]._opened.store.stats()
        for _ in range(3):
            for prompt in (*own, *(suite.prompts.fresh(300) for _ in range(4))):
                only.forget()
                only.answer(prompt)
        of_victim = Prompts(VICTIM_SEED).fresh(200)
        only.forget()
        found = loaded(only.answer(of_victim))
        ensure(found >= 192, f"{found} tokens of the killed engine's prompt were found")
        only.settled()
        note.text = f"{stats['hits']} hits before the kill"


def full(suite: Any, note: Note) -> None:
    """test_cpu_offload_eviction: a store that holds a part of what the engine computes stays within its bytes."""
    settings = {"disk_gib": 12 / 1024}
    with folder() as directory, node(suite.model, directory, settings=settings) as only:
        stem = suite.prompts.fresh(96)
        for at in range(120):
            only.answer(stem + suite.prompts.fresh(300), 2)
            if at % 10 == 0:
                only.forget()
        used = sum(it.stat().st_blocks * 512 for it in _segments(directory))
        ensure(used <= 12 << 20, f"{used} bytes on the disk")
        stats = only.workers()[0]._opened.store.stats()
        only.settled()
        note.text = f"{stats['stored']} stored, {stats['evicted']} left, {stats['refused']} refused, {used >> 10} KiB"


def strangers(suite: Any, note: Note) -> None:
    """Another model, revision, dtype, block size or tenant finds nothing; the same one does."""
    prompt = suite.prompts.fresh(160)
    with folder() as directory:
        with node(suite.model, directory) as first:
            first.answer(prompt)
            ensure(loaded(first.answer(prompt, salt="acme")) == 0, "a salted request found blocks")
            first.forget()
            ensure(loaded(first.answer(prompt, salt="acme")) == 160, "a salted request did not find its blocks")
            ensure(loaded(first.answer(prompt, salt="other")) == 0, "another salt found blocks")
        others: list[dict[str, Any]] = [
            {"settings": {"model": "another"}},
            {"revision": "2"},
            {"element": torch.float16},
            {"settings": {"blocks_per_chunk": 2}},
            {"settings": {"share_tp": 1}},
            {"kind": "window"},
        ]
        for other in others:
            with node(suite.model, directory, **other) as engine:
                ensure(loaded(engine.answer(prompt)) == 0, f"{other} found blocks")
                engine.settled()
        with node(suite.model, directory) as again:
            ensure(loaded(again.answer(prompt)) == 160, "the same model found nothing")


def closed(suite: Any, note: Note) -> None:
    """A store that can't be opened costs hits, not the engine; a wrong setting is said at the start."""
    with folder() as directory:
        directory.parent.joinpath("file").write_text("")
        with node(suite.model, directory.parent / "file") as engine:
            prompt = suite.prompts.fresh(100)
            for _ in range(2):
                ensure(loaded(engine.answer(prompt)) == 0, "found a block without a store")
                engine.forget()
            ensure(not engine.workers()[0]._stats.data["data"], "counted what was not done")
            engine.settled()
        wrong = [
            ({"disk_gib": "much"}, "disk_gib must be a number"),
            ({"disk": []}, "disk must be a directory"),
            ({"disk_gb": 3}, "has no setting 'disk_gb'"),
            ({"disk_gib": 2 / 1024}, "capacity"),
            ({"object": "ftp://x"}, "ftp"),
            ({"share_tp": 0}, "share_tp must be a whole number"),
            ({"object_options": {"concurrency": 1}}, "needs object"),
        ]
        for settings, text in wrong:
            try:
                with node(suite.model, directory, settings=settings):
                    pass
            except ValueError as error:
                ensure(text in str(error), f"{settings}: {error}")
            else:
                ensure(False, f"{settings} was taken")
        try:
            with node(suite.model, directory, ranks=2, settings={"share_tp": 1}):
                pass
        except ValueError as error:
            ensure("set share_tp to a multiple of 2" in str(error), f"{error}")
        else:
            ensure(False, "share_tp 1 was taken with two ranks")


def retention(suite: Any, note: Note) -> None:
    """Blocks keep the priority that a request's parameters say; wrong parameters cost nothing but that."""
    keep = {"priority": 90, "duration": 3600, "retention": [{"start": 0, "end": 32, "priority": 100}]}
    with folder() as directory, node(suite.model, directory, settings={"disk_gib": 12 / 1024}) as only:
        kept, other = suite.prompts.fresh(160), suite.prompts.fresh(160)
        puts: list[tuple[int, int, float | None]] = []
        worker = only.workers()[0]
        store = worker._store

        def spy(job: Any, tenant: bytes, layout: Any, blocks: Any, numbers: Any) -> None:
            puts.extend((len(blocks), block.retention.priority, block.retention.duration) for block in blocks[-1:])
            puts.extend((1, block.retention.priority, block.retention.duration) for block in blocks[:1])
            store(job, tenant, layout, blocks, numbers)

        worker._store = spy
        only.answer(kept, params=keep)
        ensure(puts == [(10, 90, 3600.0), (1, 100, 3600.0)], f"{puts}")
        worker._store = store
        only.answer(other)
        for at in range(60):
            only.answer(suite.prompts.fresh(330), 2)
            if at % 10 == 0:
                only.forget()
        only.forget()
        found = [loaded(only.answer(prompt)) for prompt in (kept, other)]
        ensure(found == [160, 0], f"of the kept prompt and the other one, {found} tokens were found")
        wrong: list[Any] = [
            {"priority": 101},
            {"duration": -1},
            {"retention": [{"start": 9, "end": 4}]},
            {"retention": {"start": 1}},
            {"retention": [{"start": "a"}]},
        ]
        for params in wrong:
            only.answer(suite.prompts.fresh(40), params=params)
        only.settled()


def beside_handoffs(suite: Any, kind: Kind, asynchronous: bool, note: Note) -> None:
    """MultiConnector with KVFerryConnector and OffloadingConnector: requests are handed over and blocks are stored."""
    with folder() as directory:
        engines = [
            _with_both(suite.model, directory.with_name(name), kind=kind, asynchronous=asynchronous)
            for name in ("prefill", "decode")
        ]
        prefill, decode = engines
        free = [engine.free_blocks for engine in engines]
        try:
            prompts = [suite.prompts.fresh(length) for length in (17, 100, 333)]
            found = []
            for turn in range(3):
                for at, prompt in enumerate(prompts):
                    name = f"m{turn}-{at}"
                    offer = prefill.submit(name + "-p", prompt, 1, {"do_remote_decode": True})
                    run(*engines, until=lambda of=offer: of.reason)
                    ensure(offer.params, f"prefill offers nothing: {offer}")
                    # The second time, decode finds the prompt in its own store, and does not need prefill's.
                    asked = decode.submit(name, prompt, 6, dict(offer.params or {}) if turn != 1 else None)
                    run(*engines, until=lambda of=asked: of.reason)
                    if turn == 1:
                        # A router would have sent it: prefill keeps the blocks until decode has said so.
                        decode.submit(name + "-again", prompt, 1, dict(offer.params or {}))
                    run(*engines)
                    right(prompt, asked)
                    found.append((offer.prefill.num_external_cached_tokens, asked.prefill.num_external_cached_tokens))
                for engine in engines:
                    ensure(engine.core.reset_prefix_cache(), "the prefix cache is not reset")
            for engine, before in zip(engines, free, strict=True):
                ensure(not engine.wrong(), f"{engine.wrong()[:3]}")
                ensure(not engine.scheduler.requests, f"still has {list(engine.scheduler.requests)}")
                ensure(engine.free_blocks == before, f"{engine.free_blocks} of {before} blocks are free")
            handed = [there for _, there in found[:3]]
            ensure(min(handed) >= 16, f"handed over: {handed}")
            stored = [here for here, _ in found[4:6]] + [there for _, there in found[4:6]]
            # Of a window, decode was given what the end of the prompt needs, which is not what a hit before it needs.
            ensure(min(stored) >= 80 or kind == "window", f"from the stores: {stored}")
            note.text = f"tokens loaded by prefill and decode: {found}"
        finally:
            for engine in engines:
                engine.close()


def _with_both(model: str, directory: Path, **more: Any) -> Engine:
    store = {**SPEC, **DISK, "disk": str(directory)}
    connectors = [
        {"kv_connector": "KVFerryConnector", "kv_role": "kv_both", "kv_connector_extra_config": {}},
        {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": store},
    ]
    extra = {"connectors": connectors}
    return Engine(model, connector="MultiConnector", extra=extra, caching=True, policy="recompute", **more)


def manager_contract(suite: Any, note: Note) -> None:
    """test_cpu_manager, restated: what the scheduler may ask of a manager, in each order."""
    with folder() as directory, node(suite.model, directory) as only:
        manager, workers = only.manager, only.workers()
        context = ReqContext("direct")
        manager.on_new_request(context)
        keys = [make_offload_key(bytes([at]) * 32, 0) for at in range(6)]
        for at, key in enumerate(keys):
            context.set_offload_key_position(key, (at + 1) * BLOCK_TOKENS)

        def pages(*numbers: int) -> GPULoadStoreSpec:
            return GPULoadStoreSpec(list(numbers), group_sizes=[len(numbers)], block_indices=[0])

        def finish(job: int) -> None:
            for worker in workers:
                worker.wait({job})
                (result,) = worker.get_finished()
                ensure(result.job_id == job and result.success, f"{result}")
                ensure(not worker.get_finished(), "a job ended twice")

        ensure(manager.lookup(keys[0], context) is LookupResult.MISS, "found what was not stored")
        prepared = manager.prepare_store(keys[:4], context)
        ensure(prepared.keys_to_store == keys[:4] and prepared.evicted_keys == [], f"{prepared}")
        ensure(manager.lookup(keys[0], context) is LookupResult.HIT_PENDING, "a block that is stored is not pending")
        again = manager.prepare_store(keys[:5], context)
        ensure(again.keys_to_store == keys[4:5], "blocks that are stored now are stored twice")
        manager.complete_store(keys[4:5], context, success=False)
        for worker in workers:
            ensure(worker.submit_store(1, pages(1, 2, 3, 4), prepared.store_spec), "not submitted")
        finish(1)
        manager.complete_store(keys[:4], context)
        manager.on_schedule_end(None)
        results = [manager.lookup(key, context) for key in keys]
        ensure(results == [LookupResult.HIT] * 4 + [LookupResult.MISS] * 2, f"{results}")
        ensure(manager.prepare_store(keys[:4], context).keys_to_store == [], "blocks are stored again")
        manager.touch(keys, context)
        spec = manager.prepare_load(keys[1:3], context)
        ensure([pin.blocks for pin in manager._pins["direct"]] == [2] * len(manager._groups[0].spaces), "not pinned")
        for worker in workers:
            ensure(worker.submit_load(2, spec, pages(7, 8)), "not submitted")
        finish(2)
        manager.complete_load(keys[1:3], context)
        ensure(not manager._pins, "still pinned")
        for tensor in only.engine.executor.ranks[0].caches.tensors.values():
            ensure(bool((tensor[[7, 8]] == tensor[[2, 3]]).all()), "the pages differ")
        # Of a load that fails, the request is named once, and the job ends like another one.
        spec = manager.prepare_load([keys[0], keys[5]], context)
        for worker in workers:
            worker.submit_load(3, spec, pages(7, 8))
        finish(3)
        manager.complete_load([keys[0], keys[5]], context)
        ensure([worker.take_failed() for worker in workers] == [{"direct"}] * len(workers), "the failure is not named")
        ensure([worker.take_failed() for worker in workers] == [set()] * len(workers), "the failure is named twice")
        manager.prepare_load([keys[0]], context)
        manager.complete_load([keys[0]], context)
        ensure(manager.lookup(keys[0], context) is LookupResult.MISS, "a block is loaded again and again")
        manager.on_request_finished(context)
        none = ReqContext("none", load_tier_filter=TierFilter(matchers=()))
        ensure(manager.lookup(keys[1], none) is LookupResult.MISS, "a request that wants no tier gets a hit")
        manager.get_stats()
        results = [manager.lookup(key, context) for key in (keys[1:4] + keys[5:]) * 2]
        manager.on_schedule_end(None)
        results += [manager.lookup(key, context) for key in keys[1:3]]
        stats = manager.get_stats()
        counted = {result: stats.data["data"][LOOKUPS].get((result,), 0) for result in ("hit", "miss")}
        ensure(counted == {"hit": 8, "miss": 2}, f"counted {counted} of {results}")
        defined = only.engine.scheduler.get_kv_connector().connector_scheduler.config is not None and metrics()
        ensure(stats is not None and set(stats.data["data"]) <= set(defined), f"{stats}")
        for worker in workers:
            taken = worker.take_stats()
            ensure(taken is not None and set(taken.data["data"]) <= set(defined), f"{taken}")
        manager.reset_cache()
        ensure(manager.lookup(keys[1], ReqContext("later")) is LookupResult.MISS, "found after a reset")


def metrics() -> dict[str, Any]:
    from kvferry.vllm import KVFerryOffloadingSpec

    return dict(KVFerryOffloadingSpec.build_metric_definitions({}))


class Router:
    """What a router believes of an engine's blocks in storage, from what the engine publishes."""

    def __init__(self, only: Node) -> None:
        self._node = only
        self.events: list[Any] = []
        self.here: set[Any] = set()
        # All that were ever said to be stored.
        self.known: set[Any] = set()
        # What the engine has stored or found, which it has to say; and with it what it has looked up.
        self.stored: set[Any] = set()
        self.keys: dict[Any, bytes] = {}
        self.wrong: list[str] = []
        only.engine.scheduler.kv_event_publisher.publish = self._hear
        manager = only.manager
        complete, lookup = manager.complete_store, manager.lookup

        def complete_store(keys: Any, context: Any, success: bool = True) -> None:
            keys = list(keys)
            noted = self._note(keys)
            if success:
                self.stored.update(noted)
            complete(keys, context, success)

        def look_up(key: bytes, context: Any) -> Any:
            noted = self._note([key])
            result = lookup(key, context)
            if result is LookupResult.HIT:
                self.stored.update(noted)
            return result

        manager.complete_store, manager.lookup = complete_store, look_up

    def _note(self, keys: Any) -> list[Any]:
        """vLLM's hashes of blocks, as routers know them."""
        noted = {maybe_convert_block_hash(BlockHash(bytes(key[:-4]))): bytes(key) for key in keys}
        self.keys.update(noted)
        return list(noted)

    def _hear(self, batch: Any) -> None:
        for event in batch.events:
            self.events.append(event)
            if getattr(event, "medium", None) != "STORAGE":
                continue
            for it in event.block_hashes:
                if isinstance(event, BlockStored) == (it in self.here):
                    self.wrong.append(f"said twice: {event}")
            if isinstance(event, BlockStored):
                self.here.update(event.block_hashes)
                self.known.update(event.block_hashes)
            else:
                self.here.difference_update(event.block_hashes)

    def there(self) -> set[Any]:
        """The blocks that are in the store, of those that it has heard of and those that the engine has to say."""
        manager = self._node.manager
        group = manager._groups[0]
        # The store's name of a block is vLLM's hash: there is no adapter.
        return {it for it in self.known | self.stored if manager._prefix(group, [self.keys[it][:-4]]) == 1}

    def settle(self, why: str) -> None:
        """Waits until what it believes is right: what was not said will not be."""
        # Not compared again afterwards: the store may still evict.
        deadline = time.monotonic() + 30
        while self.here != (there := self.there()):
            many, few = self.here - there, there - self.here
            ensure(time.monotonic() < deadline, f"{why}: {len(many)} too many, {len(few)} too few")
            self._node.engine.step()
            time.sleep(0.001)
        ensure(not self.wrong, f"{why}: {self.wrong[:3]}")


def events(suite: Any, describing: bool, host: float, note: Note) -> None:
    """test_kv_events: of two engines on a directory, each publishes the blocks that it stored or found, and that they
    have left, also when the other one has them evicted.
    """
    config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    settings = {"disk_gib": 10 / 1024, "host_gib": host, "self_describing_kv_events": describing}
    options: dict[str, Any] = {"kv_events_config": config, "settings": settings}
    with (
        folder() as directory,
        node(suite.model, directory, **options) as one,
        node(suite.model, directory, **options) as other,
    ):
        routers = [Router(one), Router(other)]
        prompt = suite.prompts.fresh(100)
        one.answer(prompt)
        one.answer(suite.prompts.fresh(20))
        run(one.engine, until=lambda: len(routers[0].here) == 7)
        ensure(loaded(other.answer(prompt)) == 96, "not found")
        run(other.engine, until=lambda: len(routers[1].here) == 6)
        ensure(routers[1].here < routers[0].here, "other names for the same blocks")
        stored = [event for event in routers[1].events if getattr(event, "medium", None) == "STORAGE"]
        ensure(all((it.locality, it.ownership, it.group_idx) == ("LOCAL", None, 0) for it in stored), f"{stored}")
        if describing:
            by_hash = {event.block_hashes[-1]: event for event in stored}
            ensure(len(by_hash) == 6 and [it for event in stored for it in event.token_ids] == prompt[:96], f"{stored}")
            ensure(sum(event.parent_block_hash in by_hash for event in stored) == 5, f"{stored}")
        deadline = time.monotonic() + 60
        while routers[1].here:
            # The first engine fills the store; the second one does nothing.
            ensure(time.monotonic() < deadline, f"{len(routers[1].here)} blocks of the other engine have not left")
            for _ in range(8):
                one.ask(suite.prompts.fresh(480))
            run(one.engine)
            one.forget()
            run(other.engine)
        for router in routers:
            router.settle("evicted")
        removed = [event for event in routers[1].events if isinstance(event, BlockRemoved)]
        removed = [event for event in removed if event.medium == "STORAGE"]
        ensure(all((it.locality, it.ownership, it.group_idx) == ("LOCAL", None, 0) for it in removed), f"{removed}")
        tracker = other.engine.scheduler.get_kv_connector().connector_scheduler._events_tracker
        ensure(not tracker._pending_event_metadata, f"the tracker keeps {len(tracker._pending_event_metadata)} blocks")
        ensure(routers[0].here, "the first engine has nothing in the store")
        ensure(one.engine.core.reset_prefix_cache(reset_connector=True), "not reset")
        run(one.engine, until=lambda: not routers[0].here)
        ensure(any(isinstance(event, AllBlocksCleared) for event in routers[0].events), "not cleared")
        note.text = f"{len(routers[0].known)} and {len(routers[1].known)} blocks were published"
        one.settled()
        other.settled()


def events_of_unreadable(suite: Any, how: str, note: Note) -> None:
    """Blocks are damaged, or one of two directories has lost its files, and the second engine reads them: both engines
    publish that the blocks have left.
    """
    config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    with folder() as directory, ExitStack() as opened:
        directory.mkdir(parents=True)
        places = [directory / name for name in ("a", "b")]
        settings = {"disk": [str(place) for place in places]}
        # Else a request would store again what it could not load.
        options: dict[str, Any] = {"kv_events_config": config, "settings": settings, "policy": "fail"}
        one, other = (opened.enter_context(node(suite.model, directory, **options)) for _ in range(2))
        routers = [Router(one), Router(other)]
        # More than a segment has.
        prompts = [suite.prompts.fresh(480) for _ in range(20)]
        for prompt in prompts:
            one.answer(prompt)
            one.forget()
            ensure(loaded(other.answer(prompt)) == 480, "not found")
            other.forget()
        for router in routers:
            router.settle("stored")
            ensure(len(router.here) == 600, f"{len(router.here)} of 600 blocks were published")
        ensure(all(_segments(place) for place in places), "a directory has no segment")
        if how == "damaged":
            for place in places:
                _damage(place)
        else:
            for segment in _segments(places[1]):
                os.truncate(segment, 0)
        failed = 0
        for prompt in prompts:
            outcome = other.ask(prompt)
            run(other.engine)
            ensure(outcome.reason in ("length", "error"), f"{outcome}")
            failed += outcome.reason == "error"
            other.forget()
        ensure(failed > 0, "no load has failed")
        for router, engine in zip(routers, (one.engine, other.engine), strict=True):
            run(engine, until=lambda router=router: len(router.here) < 600, within=60)
            router.settle(how)
        left = [600 - len(router.here) for router in routers]
        note.text = f"{failed} loads failed, {left} of 600 blocks were removed"
        for engine in (one, other):
            engine.settled()


def events_of_killed(suite: Any, keeper: bool, note: Note) -> None:
    """An engine that shares the store is killed while it stores and, as the store's keeper, evicts: what this one has
    published is right, and after a restart of this one, too.
    """
    config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    disk = 10 / 1024
    options: dict[str, Any] = {"kv_events_config": config, "settings": {"disk_gib": disk}}
    removed = 0
    with folder() as directory, ExitStack() as opened:
        command = [sys.executable, "-m", "kvferry_e2e.contract.victim", suite.model, str(directory), str(disk)]
        for at in range(2):
            only = None if keeper else opened.enter_context(node(suite.model, directory, **options))
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as victim:
                assert victim.stdout is not None
                try:
                    lines = iter(victim.stdout.readline, "")
                    ensure(any(line == "ready\n" for line in lines), "the other engine has not started")
                    only = only or opened.enter_context(node(suite.model, directory, **options))
                    router = Router(only)
                    for _ in range(60):
                        next(lines, None)
                        only.answer(suite.prompts.fresh(400))
                        only.forget()
                finally:
                    victim.kill()
            router.settle(f"killed, start {at}")
            deadline = time.monotonic() + 60
            while not any(isinstance(event, BlockRemoved) and event.medium == "STORAGE" for event in router.events):
                ensure(time.monotonic() < deadline, "nothing has left")
                only.answer(suite.prompts.fresh(480))
                only.forget()
            router.settle(f"evicted, start {at}")
            stores = (only.manager._opened.store, only.workers()[0]._opened.store)
            deadline = time.monotonic() + 60
            # A store that was killed a moment ago is noticed soon.
            while (keepers := sum(store.stats()["is_keeper"] for store in stores)) != 1:
                ensure(keepers == 0 and time.monotonic() < deadline, f"{keepers} keepers")
                time.sleep(0.01)
            removed += len(router.known) - len(router.here)
            only.settled()
            opened.close()
        note.text = f"{removed} blocks were removed"


def idle(note: Note) -> None:
    """An engine that waits for requests is woken to publish what another one has changed."""
    ensure("self.input_queue = queue.Queue" in inspect.getsource(EngineCoreProc), "the queue has another name")
    ensure(engine_waker()() is None, "an engine in this process has no loop to be woken")

    class Core(EngineCoreProc):  # type: ignore[misc]
        """As vLLM's, which makes its queue before it makes the scheduler, and this the connector."""

        def __init__(self) -> None:
            self.input_queue = queue.Queue()
            self.wake = engine_waker()

        def waits(self) -> bool:
            """Whether it takes a message, and there is none behind it."""
            self._handle_client_request(*self.input_queue.get(timeout=20))
            return self.input_queue.empty()

    core = Core()
    core.wake()
    ensure(core.waits(), "not woken")
    with folder() as directory, tier.tiers(directory, enable_kv_events=True) as made:
        made.tier._events._wake = core.wake
        with tier.tiers(directory) as other:
            keys = tier.prompt("idle", 3)
            made.tier._events.know(0, [bytes(key[:-4]) for key in keys])
            other.store(keys)
        # The thread that follows the store wakes it; nothing else is called here.
        core._handle_client_request(*core.input_queue.get(timeout=20))
        ensure(made.manager.has_pending_work(), "woken for nothing")
        while made.manager.has_pending_work():
            made.step()
        ensure(made.events and not made.events[0].removed, f"{made.events}")


def soak(suite: Any, kind: Kind, asynchronous: bool, note: Note, **more: Any) -> None:
    """Requests with shared beginnings, few blocks, aborts, resets of the engine's cache, damage, and restarts."""
    chance = random.Random(7)
    options: dict[str, Any] = {
        "kind": kind,
        "asynchronous": asynchronous,
        "blocks": 60 if kind == "full" else 110,
        "batched_tokens": 100,
        "settings": {"disk_gib": 12 / 1024, "offload_prompt_only": False},
        **more,
    }
    done = lost = tokens = 0
    stems = [suite.prompts.fresh(200) for _ in range(4)]
    with folder() as directory:
        for turn in range(3):
            with node(suite.model, directory, **options) as only:
                live: list[tuple[list[int], Outcome, str]] = []
                started = 0
                while started < 60 or live:
                    if started < 60 and len(live) < 10:
                        length = chance.choice((5, 16, 40, 90, 180, 260))
                        prompt = chance.choice(stems)[: chance.randrange(0, length + 1)]
                        prompt = prompt + suite.prompts.fresh(length - len(prompt))
                        live.append((prompt, only.ask(prompt, chance.choice((1, 3, 20, 50))), f"o{only._number}"))
                        started += 1
                    for _ in range(chance.randrange(1, 4)):
                        only.engine.step()
                    if live and chance.random() < 0.03:
                        _, _, name = live.pop(chance.randrange(len(live)))
                        only.engine.abort(name)
                        lost += 1
                    if chance.random() < 0.02:
                        only.engine.core.reset_prefix_cache()
                    if turn == 1 and chance.random() < 0.01:
                        _damage(directory)
                    for one in [it for it in live if it[1].reason]:
                        live.remove(one)
                        right(one[0], one[1])
                        tokens += loaded(one[1])
                        done += 1
                only.settled()
    note.text = f"{done} requests, {lost} aborted, {tokens} tokens loaded"


def checks(suite: Any) -> Iterator[tuple[str, Callable[[Note], None]]]:
    kinds: tuple[Kind, ...] = ("full", "window")
    for kind in kinds:
        for asynchronous in (False, True):
            how = f"{kind}{', async' if asynchronous else ''}"
            yield f"a second engine, {how}", partial(second_engine, suite, kind, asynchronous, 0)
            yield f"preemption, {how}", partial(preempted, suite, kind, asynchronous)
            yield f"blocks that can't be read, {how}", partial(damaged, suite, kind, asynchronous, 1)
            yield f"soak, {how}", partial(soak, suite, kind, asynchronous)
        yield f"blocks that can't be read by two ranks, {kind}", partial(damaged, suite, kind, False, 2)
        yield f"a block that one rank can't read, {kind}", partial(one_rank, suite, kind)
        yield f"TP 2 to TP 1, {kind}", partial(parallel, suite, 2, 1, kind)
        yield f"TP 1 to TP 2, {kind}", partial(parallel, suite, 1, 2, kind)
        yield f"TP 4 to TP 1, {kind}", partial(parallel, suite, 4, 1, kind)
        yield f"TP 2 to TP 4, {kind}", partial(parallel, suite, 2, 4, kind)
        yield f"two of the engine's blocks, {kind}", partial(chunks, suite, kind, 2)
        yield f"three of the engine's blocks, {kind}", partial(chunks, suite, kind, 3)
    for kind in ("latent", "aligned"):
        yield f"a second engine, {kind}", partial(second_engine, suite, kind, False, 0)
        yield f"a second engine, {kind}, async", partial(second_engine, suite, kind, True, 0)
        yield f"blocks that can't be read, {kind}", partial(damaged, suite, kind, False, 1)
        yield f"preemption, {kind}", partial(preempted, suite, kind, False)
        yield f"soak, {kind}", partial(soak, suite, kind, False)
    yield "TP 2 to TP 1, latent", partial(parallel, suite, 2, 1, "latent")
    yield "TP 1 to TP 4, latent", partial(parallel, suite, 1, 4, "latent")
    yield "a second engine, with host memory", partial(second_engine, suite, "full", False, 0.03125)
    for asynchronous in (False, True):
        how = ", async" if asynchronous else ""
        yield f"two engines at once{how}", partial(shared, suite, asynchronous)
        yield f"clients leave{how}", partial(aborted, suite, asynchronous)
        yield f"caches are reset{how}", partial(reset, suite, asynchronous)
        yield f"another version of the weights{how}", partial(versions, suite, asynchronous)
    for how in ("removed", "replaced", "a file"):
        yield f"the directory is {how}", partial(gone, suite, how)
    yield "the file system is read-only", partial(read_only, suite)
    yield "the file system is full", partial(no_space, suite)
    for layers in (0, 1):
        yield f"a forward pass raises after {layers} layers", partial(raising, suite, layers)
    yield "a block leaves after it was found", partial(left, suite)
    yield "more than the disk takes", partial(much, suite)
    yield "vLLM's policy is to fail", partial(fails, suite)
    yield "another engine is killed", partial(killed, suite)
    yield "a store that is full", partial(full, suite)
    yield "other models, revisions, tenants", partial(strangers, suite)
    yield "a store that can't be opened", partial(closed, suite)
    for describing in (False, True):
        for host in (0.0, 0.03125):
            how = f"{', described' if describing else ''}{', with host memory' if host else ''}"
            yield f"events{how}", partial(events, suite, describing, host)
    for how in ("damaged", "in a lost directory"):
        yield f"events of blocks that are {how}", partial(events_of_unreadable, suite, how)
    yield "events of an idle engine", idle
    for keeper in (False, True):
        yield (
            f"events, {'the keeper' if keeper else 'another engine'} is killed",
            partial(events_of_killed, suite, keeper),
        )
    yield "retention", partial(retention, suite)
    for kind in kinds:
        for asynchronous in (False, True):
            how = f"{kind}{', async' if asynchronous else ''}"
            yield f"beside handoffs, {how}", partial(beside_handoffs, suite, kind, asynchronous)
    yield "the contract of managers and workers", partial(manager_contract, suite)
    yield from tier.checks()
