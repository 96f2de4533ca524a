"""The worker half: copies what was loaded to its pages, and puts the pages that a step completes into the store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import kvferry
from kvferry._engine.jobs import Behind, settled
from kvferry._engine.memory import Scratch
from kvferry._engine.store import PUT_TURN_S
from kvferry.trtllm._bases import bases
from kvferry.trtllm._local import Local
from kvferry.trtllm._meta import Copies, Load, Save, Step
from kvferry.trtllm._of_trtllm import check_connector
from kvferry.trtllm._pages import Memory, Pages

_Base: Any = bases()[1]
# Copies of pages that wait to be written.
_COPIES_BYTES_MAX = 512 << 20


class KVFerryConnectorWorker(_Base):  # type: ignore[misc]
    """One on each rank."""

    supports_attention_dp = True

    def __init__(self, llm_args: Any) -> None:
        check_connector(llm_args)
        super().__init__(llm_args)
        self._local = Local.of(llm_args)
        self._region: Any = None
        self._spaces: dict[int, Any] = {}
        # Steps whose loads have begun, and whose saves have.
        self._loaded_step = 0
        self._saved_step = 0
        # By request: puts that read its pages.
        self._reading: dict[int, list[Any]] = {}
        # Puts that read copies.
        self._copies: list[tuple[Any, Any]] = []
        self._free_copies: Scratch | None = None
        # What TensorRT-LLM has handed in and has not got back.
        self._saving: set[int] = set()
        self._loading: set[int] = set()
        # Asynchronous loads by their copies, in the order of their numbers.
        self._copying: dict[int, Any] = {}
        self._thread: Behind | None = None

    # The cache.

    def register_kv_caches(self, kv_cache_tensor: Any) -> None:
        facts = self._local.facts
        self._register(Pages.of_tensor(kv_cache_tensor, facts.tokens_per_block, facts.dtype))

    def register_kv_cache_layout(self, layout: Any) -> None:
        self._register(Pages.of_layout(layout, self._local.facts.dtype))

    def _register(self, pages: Pages) -> None:
        opened = self._local.opened
        if self._region is not None and opened is not None:
            # The cache before is about to go.
            self._settle()
            opened.agent.unregister(self._region)
            self._region = None
        before = self._local.pages
        if before is not None:
            before.copies.close()
        self._local.register(pages)
        if opened is None:
            return
        self._spaces = {group.number: self._local.space(group.number, self._local.facts.rank) for group in pages.groups}
        if pages.is_direct:
            piece = pages.groups[0].pieces[0]
            self._region = opened.agent.register((piece.base, piece.stride * piece.slots), "none")

    def register_forward_pass_callable(self) -> Any:
        """Saves begin in `wait_for_save`, on the stream that it gets."""
        return lambda: None

    # Loads.

    def start_load_kv(self, stream: Any) -> None:
        step = self._step()
        if step is None or step.number == self._loaded_step:
            return
        self._loaded_step = step.number
        pages = self._local.pages
        assert pages is not None
        for load in step.loads:
            self._end_load(load, self._begin_load(load, stream), is_async=False)
        if step.async_loads:
            if self._thread is None:
                self._thread = Behind("kvferry-trtllm")
            for load in step.async_loads:
                begun = self._begin_load(load, stream)
                self._copying[load.request] = self._thread.begin(partial(self._copy_behind, load, begun))

    def _step(self) -> Step | None:
        metadata = self.get_connector_meta()
        return metadata if isinstance(metadata, Step) else None

    def _copy_behind(self, load: Load, begun: tuple[int, ExitStack]) -> None:
        self._end_load(load, begun, is_async=True)

    def _begin_load(self, load: Load, stream: Any) -> tuple[int, ExitStack]:
        """Begins copies to pages, after the work that the stream has now: the last readers of the pages. Returns the
        number of blocks, and the waits for the copies.
        """
        local = self._local
        assert local.pages is not None
        assert local.arena is not None
        blocks = 0
        # If a part can't begin, the copies of earlier parts are waited for: the pages may get another use then.
        with ExitStack() as copies:
            for part in load.parts:
                offset = part.offsets[local.facts.rank]
                group = local.pages.group(part.group)
                of_part, copy = local.pages.to_pages(group, part.pages, local.arena, offset, stream)
                copies.callback(copy.wait)
                blocks += of_part
            return blocks, copies.pop_all()

    def _end_load(self, load: Load, begun: tuple[int, ExitStack], *, is_async: bool) -> None:
        local = self._local
        assert local.arena is not None
        blocks, copies = begun
        copies.close()
        local.counts["loaded_blocks"] += blocks
        local.arena.copied(local.facts.rank, load.number, is_async=is_async)

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """`start_load_kv` has copied all layers: a block is checked as a whole."""

    # Saves.

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """`wait_for_save` saves all layers: a block of the store has all of them."""

    def wait_for_save(self, stream: Any) -> None:
        step = self._step()
        if step is None or step.number == self._saved_step:
            return
        self._saved_step = step.number
        self._collect()
        pages = self._local.pages
        if pages is not None and step.copies is not None:
            self._hand_over(pages, step.copies, stream)
        if pages is None or self._local.opened is None or not step.saves:
            return
        begun: list[Any] = []
        for save in step.saves:
            begun += self._begin(pages, save, stream)
        if self._local.settings.save == "sync":
            settled(begun)
        self._collect()

    def _hand_over(self, pages: Pages, copies: Copies, stream: Any) -> None:
        local = self._local
        assert local.arena is not None
        rank, is_made = local.facts.rank, False
        try:
            # All copies are waited for, also after a failure: the memory may get another use once it is reported.
            with ExitStack() as waits:
                for part in copies.parts:
                    group = pages.group(part.group)
                    copy = pages.from_pages(group, part.pages, local.arena, part.offsets[rank], stream)
                    waits.callback(copy.wait)
            is_made = True
        except kvferry.Error as error:
            # The engine has computed the blocks, and goes on.
            local.say("blocks are not handed over: %s", error)
        finally:
            local.arena.handed(rank, copies.number, is_made=is_made)

    def _begin(self, pages: Pages, save: Save, stream: Any) -> Iterator[Any]:
        try:
            blocks, copy = self._memory(pages, save, stream)
        except kvferry.Error as error:
            self._missed(save, str(error))
            return
        if blocks is None:
            self._missed(save, "too many copies wait to be written; the disk is slower than the engine")
            return
        space = self._spaces[save.group]
        behind = len(save.hashes) - len(save.pages)
        try:
            pending = space.put_async(list(save.hashes), blocks, behind, priority=save.priority, wait=PUT_TURN_S)
        except kvferry.Error as error:
            self._missed(save, str(error))
            self._give_back(copy)
            return
        if copy is None:
            self._reading.setdefault(save.request, []).append(pending)
        else:
            self._copies.append((pending, copy))
        yield pending

    def _memory(self, pages: Pages, save: Save, stream: Any) -> tuple[Any, Any]:
        """The blocks, and the copy that they are in, if it is one."""
        group = pages.group(save.group)
        if self._region is not None:
            return kvferry.Blocks(self._region, [page * group.nbytes for page in save.pages], group.nbytes), None
        nbytes = len(save.pages) * group.nbytes
        if sum(copy.nbytes for _, copy in self._copies) + nbytes > _COPIES_BYTES_MAX:
            return None, None
        assert self._local.opened is not None
        if self._free_copies is None:
            self._free_copies = Scratch(self._local.opened.agent, _COPIES_BYTES_MAX // 2, pages.copies.access)
        copy = self._free_copies.take(nbytes)
        try:
            pages.from_pages(group, save.pages, Memory(copy.memory(), copy.addr, copy), stream=stream).wait()
        except kvferry.Error:
            # Memory that a copy may still write to is in quarantine.
            self._local.opened.agent.unregister(copy)
            raise
        return kvferry.Blocks(copy, range(0, nbytes, group.nbytes), group.nbytes), copy

    def _give_back(self, copy: Any) -> None:
        if copy is not None:
            assert self._free_copies is not None
            self._free_copies.give(copy)

    def _collect(self) -> None:
        """Takes the outcomes of puts that have ended."""
        for pending, copy in [it for it in self._copies if it[0].done()]:
            self._copies.remove((pending, copy))
            self._count(pending)
            self._give_back(copy)
        for request, reading in list(self._reading.items()):
            for pending in [it for it in reading if it.done()]:
                reading.remove(pending)
                self._count(pending)
            if not reading:
                del self._reading[request]

    def _count(self, pending: Any) -> None:
        try:
            put = pending.wait()
        except kvferry.Error as error:
            self._local.counts["failed_puts"] += 1
            self._local.say("blocks are not stored: %s", error)
            return
        for name in ("stored", "present", "refused", "failed"):
            self._local.counts[name + "_blocks"] += getattr(put, name)
        if put.refused_waiting:
            self._local.say(
                "%d blocks are not stored: too many blocks wait to be written; the disk is slower than the engine",
                put.refused_waiting,
            )

    def _missed(self, save: Save, reason: str) -> None:
        self._local.counts["refused_blocks"] += len(save.pages)
        self._local.say("%d blocks of request %d are not stored: %s", len(save.pages), save.request, reason)

    # What has ended.

    def get_finished(
        self, finished_gen_req_ids: Sequence[int], started_loading_req_ids: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        self._saving.update(finished_gen_req_ids)
        self._loading.update(started_loading_req_ids)
        self._collect()
        saved = [it for it in self._saving if it not in self._reading]
        loaded = []
        for it in self._loading:
            copying = self._copying.get(it)
            if copying is not None and copying.done():
                # What is raised here is an error of the program: the bytes were here, and checked.
                self._copying.pop(it).result()
                loaded.append(it)
        self._saving.difference_update(saved)
        self._loading.difference_update(loaded)
        return saved, loaded

    def stats(self) -> dict[str, int]:
        """Counts since the start."""
        self._collect()
        return dict(self._local.counts)

    def shutdown(self) -> None:
        """Waits for what runs. TensorRT-LLM does not call it. The end of the process stops what runs instead, and does
        not wait for a GPU that does not answer.
        """
        if self._thread is not None:
            self._thread.close()
        self._settle()
        if self._local.pages is not None:
            self._local.pages.copies.close()
        self._local.close()

    def _settle(self) -> None:
        """Waits for puts that read pages."""
        settled(pending for reading in self._reading.values() for pending in reading)
        self._collect()
