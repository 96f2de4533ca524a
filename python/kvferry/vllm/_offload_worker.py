"""A worker's side of `KVFerryOffloadingSpec`: bytes go straight between the engine's pages and the store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult

import kvferry
from kvferry._engine.identity.adapters import Unchanged
from kvferry._engine.jobs import hurried, runs, settled
from kvferry._engine.log import Seldom
from kvferry._engine.memory import Scratch
from kvferry._engine.store import PUT_BYTES_MAX, PUT_TURN_S
from kvferry.vllm import _offload_stats as counters
from kvferry.vllm._device import compute_stream
from kvferry.vllm._log import logger
from kvferry.vllm._offload_layout import GroupLayout, Shard, gpu_of, regions_of, write_card
from kvferry.vllm._offload_staging import StagedGet, StagedPut, Stages

if TYPE_CHECKING:
    from kvferry._engine.store import OpenStore
    from kvferry.vllm._offload_blocks import Block
    from kvferry.vllm._offload_manager import StoredBlocks


@dataclass
class _Job:
    request: str
    is_load: bool
    began: float = field(default_factory=time.monotonic)
    # With the number of blocks.
    pending: list[tuple[Any, int]] = field(default_factory=list)
    nbytes: int = 0
    # Memory for what is read and not wanted: of this job alone, because the store compares a block's checksum.
    scratch: list[Any] = field(default_factory=list)
    # Why not all was loaded.
    failure: str | None = None


class KVFerryOffloadingWorker(OffloadingWorker):  # type: ignore[misc]
    """See `KVFerryOffloadingSpec`. Each job ends once; `get_finished` and `wait` carry on what has ended."""

    # None if the pages are not on a GPU.
    _stages: Stages | None = None

    def __init__(
        self, config: Any, model: str, layouts: list[GroupLayout], kv_caches: Any, opened: OpenStore | None
    ) -> None:
        self._config, self._model, self._layouts, self._opened = config, model, layouts, opened
        self._blocks_per_chunk: int = config.cache.blocks_per_chunk
        self._regions: list[Any] = []
        self._places: list[tuple[Any, int, int]] = []
        self._scratch = Scratch(opened.agent) if opened is not None else None
        self._card: Path | None = None
        if opened is not None:
            gpu = gpu_of(kv_caches)
            if gpu is not None:
                self._stages = Stages(opened.agent, compute_stream(gpu))
            agent = opened.agent if self._stages is None else self._stages.agent
            self._regions, self._places = regions_of(agent, kv_caches)
            self._card = write_card(config.engine_id, config.parallel.rank, model, layouts)
        self._spaces: dict[tuple[bytes, int, int], Any] = {}
        self._jobs: dict[int, _Job] = {}
        self._adapters = Unchanged()
        # Requests whose load has failed and was reported as finished.
        self._failed: set[str] = set()
        self.can_report_failures = False
        self._stats = OffloadingConnectorStats()
        self._say = Seldom(logger, "KVFerryOffloadingSpec: ").say

    def _space(self, tenant: bytes, layout: GroupLayout, shard: Shard) -> Any:
        assert self._opened is not None
        name = (tenant, layout.group, shard.index)
        space = self._spaces.get(name)
        if space is None:
            if len(self._spaces) > 1024:
                # Salts of caches that were reset.
                self._spaces.clear()
            space = self._spaces[name] = self._opened.store.space(
                self._model,
                layout=layout.fingerprint,
                tenant=tenant,
                group=layout.group,
                shard=(shard.index, shard.count),
            )
        return space

    # Jobs.

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: StoredBlocks) -> bool:
        job = self._jobs[job_id] = _Job(dst_spec.request, False)
        if self._opened is None:
            return True
        # vLLM calls this after the step that has computed the blocks, and may have loaded the adapter in it.
        if dst_spec.files is not None and not self._adapters.are(dst_spec.files):
            self._say(
                "blocks of request %s are not stored: %s",
                dst_spec.request,
                "the files of its LoRA adapter have changed, or could not be looked at in time",
            )
            return True
        try:
            for layout, blocks, numbers, start in self._of_groups(dst_spec, src_spec):
                self._store(job, dst_spec.tenant, layout, *self._complete(blocks, numbers, start))
        except kvferry.Error as error:
            self._say("blocks of request %s are not stored: %s", dst_spec.request, error)
        return True

    def submit_load(self, job_id: int, src_spec: StoredBlocks, dst_spec: Any) -> bool:
        job = self._jobs[job_id] = _Job(src_spec.request, True)
        if self._opened is None:
            job.failure = "the store is not open"
            return True
        try:
            for layout, blocks, numbers, start in self._of_groups(src_spec, dst_spec):
                self._load(job, src_spec.tenant, layout, blocks, numbers, start)
        except kvferry.Error as error:
            job.failure = str(error)
        return True

    def _of_groups(self, stored: StoredBlocks, pages: Any) -> Iterable[tuple[GroupLayout, list[Block], Any, int]]:
        """Of each group: its blocks in the store, the engine's blocks, and the place of the first of these."""
        begin = 0
        # An array, so that a layer costs one operation, and not one for each block.
        numbers = pages.block_ids.astype("uint64")
        for layout, size, start in zip(self._layouts, pages.group_sizes, pages.block_indices, strict=True):
            if size:
                yield layout, stored.groups.get(layout.group, []), numbers[begin : begin + size], start
            begin += size

    def _complete(self, blocks: list[Block], numbers: Any, start: int) -> tuple[list[Block], Any]:
        """The blocks of which the engine has all parts, and for each a row of them: a window may have passed the first
        part of a block.
        """
        each = self._blocks_per_chunk
        lead = start % each
        if lead and len(numbers) == each * len(blocks) - lead:
            blocks, numbers = blocks[1:], numbers[each - lead :]
        elif lead or len(numbers) != each * len(blocks):
            # Parts are missing further on: which ones is not said.
            blocks, numbers = [], numbers[:0]
        return blocks, numbers.reshape(-1, each)

    def _store(self, job: _Job, tenant: bytes, layout: GroupLayout, blocks: list[Block], pages: Any) -> None:
        """Runs of blocks that follow each other in the prompt, with one retention, are a put."""
        block_bytes = self._blocks_per_chunk * max(
            (sum(piece.nbytes for piece in shard.pieces) for shard in layout.shards), default=0
        )
        longest = max(1, PUT_BYTES_MAX // max(1, block_bytes))

        def follows(last: int, at: int) -> bool:
            of_last, of_this = blocks[last], blocks[at]
            is_next = last + 1 == at and of_this.before == of_last.hash
            return is_next and of_this.retention == of_last.retention

        written = [at for at in range(len(blocks)) if layout.is_writer(int(pages[at, 0]))]
        for numbers in runs(written, follows, longest):
            begin, end = numbers[0], numbers[-1] + 1
            run = blocks[begin:end]
            hashes = [block.hash for block in run]
            first = 0
            if run[0].before is not None:
                hashes.insert(0, run[0].before)
                first = 1
            for shard in layout.shards:
                space = self._space(tenant, layout, shard)
                put = partial(space.put_async, hashes, first=first, wait=PUT_TURN_S, **vars(run[0].retention))
                pending, nbytes = self._put(shard, pages[begin:end], put)
                job.pending.append((pending, len(run)))
                job.nbytes += nbytes

    def _put(self, shard: Shard, pages: Any, put: Callable[..., Any]) -> tuple[Any, int]:
        """Begins a put of whole blocks. Returns it and its bytes."""
        if self._stages is None:
            memory = self._memory(shard, pages)
            return put(memory=memory), memory.nbytes
        stage, batch, memory = self._staged(shard, pages.tolist())
        return StagedPut(self._stages, stage, batch, partial(put, memory=memory)), memory.nbytes

    def _staged(self, shard: Shard, rows: list[list[int | None]]) -> tuple[Any, kvferry.Batch, kvferry.Blocks]:
        """Takes a stage for blocks, and makes the copies between it and pages. A row has the numbers of a block's
        pages; None stands for a page that is not wanted.
        """
        assert self._stages is not None
        nbytes = self._blocks_per_chunk * sum(piece.nbytes for piece in shard.pieces)
        stage = self._stages.take(nbytes * len(rows))
        batch = kvferry.Batch()
        # By region: offsets in it, offsets in the stage, lengths.
        copies: dict[int, tuple[Any, list[int], list[int], list[int]]] = {}
        for row, numbers in enumerate(rows):
            at = row * nbytes
            for number in numbers:
                for piece in shard.pieces:
                    region, base, stride = self._places[piece.tensor]
                    if number is not None:
                        _, ours, theirs, lengths = copies.setdefault(region.id, (region, [], [], []))
                        ours.append(base + piece.offset + number * stride)
                        theirs.append(at)
                        lengths.append(piece.nbytes)
                    at += piece.nbytes
        try:
            for region, ours, theirs, lengths in copies.values():
                batch.extend_regions(region, ours, stage.remote, theirs, lengths)
        except BaseException:
            self._stages.give(stage)
            raise
        return stage, batch, kvferry.Blocks(stage.region, [row * nbytes for row in range(len(rows))], nbytes)

    def _memory(self, shard: Shard, pages: Any) -> kvferry.Blocks:
        """The pages of whole blocks, a row for each: for each of the engine's blocks in turn, a piece per layer."""
        memory: kvferry.Blocks | None = None
        for part in range(self._blocks_per_chunk):
            column = pages[:, part]
            for piece in shard.pieces:
                region, base, stride = self._places[piece.tensor]
                offsets = column * stride + (base + piece.offset)
                if memory is None:
                    memory = kvferry.Blocks(region, offsets, piece.nbytes)
                else:
                    memory.add_pieces(region, offsets, piece.nbytes)
        assert memory is not None
        return memory

    def _load(
        self, job: _Job, tenant: bytes, layout: GroupLayout, blocks: list[Block], numbers: Any, start: int
    ) -> None:
        each = self._blocks_per_chunk
        lead = start % each
        behind = each * len(blocks) - lead - len(numbers)
        if behind < 0:
            raise kvferry.InvalidArgumentError(f"{len(numbers)} pages for {len(blocks)} blocks of {each}")
        parts: list[int | None] = [*[None] * lead, *numbers.tolist(), *[None] * behind]
        hashes = [block.hash for block in blocks]
        for shard in layout.shards:
            space = self._space(tenant, layout, shard)
            memory: Any
            if self._stages is not None:
                rows = [parts[at : at + each] for at in range(0, len(parts), each)]
                stage, batch, memory = self._staged(shard, rows)
                get = partial(space.get_async, hashes, memory)
                job.pending.append((StagedGet(self._stages, stage, batch, get, len(hashes)), len(hashes)))
                job.nbytes += len(numbers) * sum(piece.nbytes for piece in shard.pieces)
                continue
            if lead or behind:
                pages = [parts[at : at + each] for at in range(0, len(parts), each)]
                memory = [self._pieces(job, shard, of_block) for of_block in pages]
            else:
                memory = self._memory(shard, numbers.reshape(-1, each))
            job.pending.append((space.get_async(hashes, memory), len(hashes)))
            job.nbytes += len(numbers) * sum(piece.nbytes for piece in shard.pieces)

    def _pieces(self, job: _Job, shard: Shard, parts: list[int | None]) -> list[tuple[Any, int, int]]:
        """The memory of a block of which not all parts may be wanted."""
        made = []
        scratch, used = None, 0
        if None in parts:
            assert self._scratch is not None
            scratch = self._scratch.take(sum(piece.nbytes for piece in shard.pieces) * parts.count(None))
            job.scratch.append(scratch)
        for number in parts:
            for piece in shard.pieces:
                region, base, stride = self._places[piece.tensor]
                if number is None:
                    made.append((scratch, used, piece.nbytes))
                    used += piece.nbytes
                else:
                    made.append((region, base + piece.offset + number * stride, piece.nbytes))
        return made

    # Ends.

    def get_finished(self) -> list[TransferResult]:
        finished = []
        for job_id in [it for it, job in self._jobs.items() if all(pending.done() for pending, _ in job.pending)]:
            finished.append(self._end(job_id, self._jobs.pop(job_id)))
        return finished

    def _end(self, job_id: int, job: _Job) -> TransferResult:
        loaded = 0
        for pending, blocks in job.pending:
            try:
                outcome = pending.wait()
            except Exception as error:
                # It would end the engine.
                job.failure = job.failure or str(error) or repr(error)
                continue
            if not job.is_load:
                counters.count_put(self._stats, outcome)
            elif outcome != blocks:
                job.failure = job.failure or "a block has left the store, or could not be read"
            else:
                loaded += blocks
        for region in job.scratch:
            assert self._scratch is not None
            self._scratch.give(region)
        if not job.is_load:
            if job.failure is not None:
                self._say("blocks of request %s are not stored: %s", job.request, job.failure)
            return TransferResult(job_id, True, job.nbytes, time.monotonic() - job.began)
        if loaded:
            self._stats.increase_counter(counters.LOADED_BLOCKS, loaded)
        if job.failure is None:
            return TransferResult(job_id, True, job.nbytes, time.monotonic() - job.began)
        self._stats.increase_counter(counters.FAILED_LOADS)
        self._say("the KV of request %s was not loaded: %s", job.request, job.failure)
        self._failed.add(job.request)
        # Without a way to report it, vLLM must not go on with what was not loaded: it ends the engine.
        return TransferResult(job_id, self.can_report_failures)

    def take_failed(self) -> set[str]:
        """The requests among those that `get_finished` has reported whose KV was not loaded."""
        taken, self._failed = self._failed, set()
        return taken

    def take_stats(self) -> OffloadingConnectorStats | None:
        if self._stats.is_empty():
            return None
        taken, self._stats = self._stats, OffloadingConnectorStats()
        return taken

    def wait(self, job_ids: set[int]) -> None:
        """The engine's thread needs the pages."""
        pending = [it for job_id in job_ids if job_id in self._jobs for it, _ in self._jobs[job_id].pending]
        if self._stages is None:
            hurried(pending)
        else:
            # Waits for the copies from or to the pages. Puts do not wait for the disk.
            for it in pending:
                it.leave_pages()

    def shutdown(self) -> None:
        """Waits for what has begun, and for the turn of the rest: the engine frees its pages after this."""
        settled(pending for job in self._jobs.values() for pending, _ in job.pending)
        self._jobs.clear()
        if self._card is not None:
            with suppress(OSError):
                self._card.unlink()
            self._card = None
        if self._opened is not None:
            opened, self._opened = self._opened, None
            self._spaces.clear()
            if self._stages is None:
                opened.store.close()
                opened.agent.unregister_batch(self._regions)
            else:
                self._stages.close()
                opened.store.close()
            opened.agent.shutdown()
