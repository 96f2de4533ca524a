"""An engine without a model: a connector's two objects, called as vLLM's scheduler and model runner call them.

Runs in vLLM's environment. Requests, outputs of the scheduler and KV tensors are vLLM's own classes.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

# As vLLM on the CPU lays out the cache of each layer: blocks, heads, tokens, keys and values.
LAYOUT = "LBHNC"
HEADS = 2
HEAD_SIZE = 64
# The parts of a step, in their order.
CALLS = (
    "scheduler's side, metadata",
    "worker's side, metadata",
    "worker's side, layers",
    "worker's side, loads and saves",
    "worker's side, results",
    "scheduler's side, results",
)


@dataclass(frozen=True)
class Cache:
    layers: int
    blocks: int
    block_tokens: int

    def names(self) -> list[str]:
        return [f"model.layers.{layer}.self_attn.attn" for layer in range(self.layers)]


def request(name: str, tokens: Sequence[int], params: dict[str, Any] | None) -> Request:
    sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": params})
    return Request(name, list(tokens), sampling, None)


@dataclass
class Chunk:
    """A part of a request that a step computes. `blocks`: those that are new in this step."""

    request: Request
    computed: int
    tokens: int
    blocks: list[int]


def output_of(chunks: Iterable[Chunk], finished: Iterable[str] = ()) -> SchedulerOutput:
    """The scheduler's output for a step that computes these chunks."""
    output = SchedulerOutput.make_empty()
    cached: CachedRequestData = output.scheduled_cached_reqs
    for chunk in chunks:
        name = chunk.request.request_id
        output.num_scheduled_tokens[name] = chunk.tokens
        output.total_num_scheduled_tokens += chunk.tokens
        if chunk.computed == 0:
            output.scheduled_new_reqs.append(NewRequestData.from_request(chunk.request, (chunk.blocks,)))
        else:
            cached.req_ids.append(name)
            cached.new_block_ids.append((chunk.blocks,) if chunk.blocks else None)
            cached.num_computed_tokens.append(chunk.computed)
            cached.num_output_tokens.append(0)
    output.finished_req_ids.update(finished)
    return output


@dataclass(frozen=True)
class Step:
    """`took`: seconds of each of `CALLS`. Times of `time.perf_counter`: `computed` before the first layer is handed to
    the connector, `reported` after its results.
    """

    output: KVConnectorOutput
    took: tuple[float, ...]
    computed: float
    reported: float


class Engine:
    def __init__(self, connector: str, extra: dict[str, Any], cache: Cache, model: str, role: str = "kv_both") -> None:
        args = EngineArgs(
            model=model,
            dtype="float32",
            max_model_len=4096,
            enforce_eager=True,
            block_size=cache.block_tokens,
            kv_transfer_config={  # type: ignore[arg-type]
                "kv_connector": connector,
                "kv_role": role,
                "kv_buffer_device": "cpu",
                "kv_connector_extra_config": extra,
            },
        )
        self.config: VllmConfig = args.create_engine_config()
        self.config.cache_config.kv_cache_layout = LAYOUT
        self.config.cache_config.num_gpu_blocks = cache.blocks
        spec = FullAttentionSpec(
            block_size=cache.block_tokens, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype=torch.float32
        )
        self.cache = cache
        self.layers = cache.names()
        self.caches = KVCacheConfig(cache.blocks, [], [KVCacheGroupSpec(self.layers, spec)])
        with set_current_vllm_config(self.config):
            init_distributed_environment(1, 0, f"tcp://127.0.0.1:{_free_port()}", 0, "gloo")
            initialize_model_parallel(1, 1)
            make = KVConnectorFactory.create_connector
            self.scheduler = make(self.config, KVConnectorRole.SCHEDULER, self.caches)
            self.worker = make(self.config, KVConnectorRole.WORKER, self.caches)
            self.tensors = self._tensors()
            self.worker.register_kv_caches(self.tensors)
        self._layers = list(self.tensors.items())
        handshake = self.worker.get_handshake_metadata()
        if handshake is not None:
            self.scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): handshake})

    def _tensors(self) -> dict[str, torch.Tensor]:
        """One allocation for all layers, as vLLM has it on the CPU."""
        shape = (self.cache.layers, self.cache.blocks, HEADS, self.cache.block_tokens, 2 * HEAD_SIZE)
        storage = torch.zeros(shape, dtype=torch.float32)
        return dict(zip(self.layers, storage, strict=True))

    def arrived(self, request: Request) -> None:
        self.scheduler.on_new_request(request)

    def allocate(self, request: Request, blocks: Sequence[int]) -> int:
        """As the scheduler does when it admits a request; returns how many tokens will be loaded."""
        external, _ = self.scheduler.get_num_new_matched_tokens(request, 0)
        table = KVCacheBlocks(([KVCacheBlock(block) for block in blocks],))
        self.scheduler.update_state_after_alloc(request, table, external or 0)
        return external or 0

    def step(self, output: SchedulerOutput) -> Step:
        """A step of the engine; nothing takes time between its computing and what the connector does of it."""
        worker, now = self.worker, time.perf_counter
        layers = self._layers if output.total_num_scheduled_tokens else []

        begun = now()
        meta = self.scheduler.build_connector_meta(output)
        made = now()
        worker.handle_preemptions(meta)
        worker.bind_connector_metadata(meta)
        bound = now()
        for layer, tensor in layers:
            worker.save_kv_layer(layer, tensor, None)
        saved = now()
        worker.start_load_kv(None)
        worker.wait_for_save()
        started = now()
        results = worker.get_transfer_results(output.finished_req_ids)
        invalid = worker.get_block_ids_with_load_errors()
        stats = worker.get_kv_connector_stats()
        events = worker.get_kv_connector_kv_cache_events()
        worker_meta = worker.build_connector_worker_meta()
        worker.clear_connector_metadata()
        reported = now()

        connector_output = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=invalid,
            kv_connector_stats=stats,
            kv_cache_events=events,
            kv_connector_worker_meta=worker_meta,
        )
        updating = now()
        self.scheduler.update_connector_output(connector_output)
        ended = now()
        took = (made - begun, bound - made, saved - bound, started - saved, reported - started, ended - updating)
        return Step(connector_output, took, bound, reported)

    def finish(self, request: Request, blocks: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """The request reached its length."""
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        held, params = self.scheduler.request_finished_all_groups(request, (blocks,))
        return held, params

    def close(self) -> None:
        self.worker.shutdown()
        self.scheduler.shutdown()


def own_output() -> TextIO:
    """Standard output, for answers only: from now on what vLLM logs there goes to standard error."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return out


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
