"""vLLM's engine core with its schedulers, its connector interface and its block tables; only the model is ours."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal
from unittest import mock

import torch
from vllm import SamplingParams
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.linear import QKVParallelLinear
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, MLAAttentionSpec, SlidingWindowSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from kvferry_e2e.contract.device import DeviceCaches
from kvferry_e2e.contract.model import HEAD_SIZE, HEADS, MORE_HEADS, WINDOW, Caches, Sequence, number_of

# "state": a state per sequence; "aligned": a state at the end of each block, which vLLM's prefix cache keeps; "latent":
# attention with one latent vector per token, which all ranks have (MLA).
# "uneven": layers have unequal numbers of KV heads, and the model's configuration has one of them.
Kind = Literal["full", "window", "state", "aligned", "latent", "uneven"]
BLOCK_TOKENS = 16
# Tokens of images that an engine encodes in a step, and keeps.
ENCODED = 512


@dataclass
class _Running:
    sequence: Sequence
    tables: list[list[int]]
    # Tokens of the prompt and those sampled.
    known: int


class ForwardError(Exception):
    """What a forward pass raises that is to fail."""


class _Rank:
    """A worker: the caches of one rank and the worker's side of the connector, called in the order of vLLM's runner."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, rank: int, kind: Kind, gpu: int | None) -> None:
        # vLLM's workers have a configuration each.
        vllm_config = copy.copy(vllm_config)
        vllm_config.parallel_config = parallel = copy.copy(vllm_config.parallel_config)
        parallel.rank = rank
        ranks = parallel.tensor_parallel_size
        self.stage, self.rank = divmod(rank, ranks)
        names = [name for group in kv_cache_config.kv_cache_groups for name in group.layer_names]
        heads = {name: heads_of(name, kind) for name in names}
        # A process of vLLM has those of one engine. Here they end with this call.
        projections = [_projection(name, total) for name, total in heads.items()]
        parts = (kv_cache_config, self.rank, parallel, heads)
        self.caches = Caches(*parts) if gpu is None else DeviceCaches(gpu + rank, *parts)
        self._vllm_config = vllm_config
        self.wrong: list[str] = []
        # Layers after which the next forward pass raises.
        self.raises_after: int | None = None
        self._running: dict[str, _Running] = {}
        # All ranks of all engines are in this process, and vLLM has one group per process.
        groups = {
            "get_tp_group": SimpleNamespace(rank_in_group=self.rank, world_size=ranks),
            "get_pp_group": SimpleNamespace(rank_in_group=self.stage, world_size=parallel.pipeline_parallel_size),
        }
        with mock.patch.multiple(
            "vllm.distributed.parallel_state", **{name: mock.Mock(return_value=group) for name, group in groups.items()}
        ):
            self.connector = KVConnectorFactory.create_connector(vllm_config, KVConnectorRole.WORKER, kv_cache_config)
            # vLLM's worker has its connector here before it registers the caches.
            with mock.patch.object(kv_transfer_state, "_KV_CONNECTOR_AGENT", self.connector):
                self.connector.register_kv_caches(self.caches.tensors)
        del projections

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        self.caches.begins_step()
        # vLLM sends this to another process.
        metadata = pickle.loads(pickle.dumps(output.kv_connector_metadata))
        # In each step, as vLLM's runners do: connectors end there what reads blocks that the step overwrites.
        # The second runner has overwritten some of them by then.
        is_second = self._vllm_config.use_v2_model_runner
        if not is_second:
            self.connector.handle_preemptions(metadata)
        self._update(output)
        if output.new_block_ids_to_zero:
            self.caches.zero(output.new_block_ids_to_zero)
        if is_second:
            self.connector.handle_preemptions(metadata)
        self.connector.bind_connector_metadata(metadata)
        if output.has_sync_kv_loads:
            self.connector.start_load_kv(None)
        has_ended = False
        try:
            names, sampled = self._forward(output)
            has_ended = True
        finally:
            # The first runner does this also when the forward pass has raised.
            if has_ended or not is_second:
                if not output.has_sync_kv_loads:
                    self.connector.start_load_kv(None)
                self.connector.wait_for_save()
        results = self.connector.get_transfer_results(output.finished_req_ids)
        made = KVConnectorOutput(
            finished_sending=results.finished_sending or None,
            finished_recving=results.finished_recving or None,
            failed_recving=results.failed_recving,
            invalid_block_ids=self.connector.get_block_ids_with_load_errors(),
            kv_connector_stats=self.connector.get_kv_connector_stats(),
            kv_connector_worker_meta=self.connector.build_connector_worker_meta(),
        )
        self.connector.clear_connector_metadata()
        self.wrong += self.caches.ends_step()
        places = {name: at for at, name in enumerate(names)}
        return ModelRunnerOutput(names, places, sampled, kv_connector_output=made)

    def _update(self, output: SchedulerOutput) -> None:
        gone = output.finished_req_ids
        if self._vllm_config.use_v2_model_runner:
            # There a preempted request comes back as a new one.
            gone = gone | (output.preempted_req_ids or set())
        for name in gone:
            self._running.pop(name, None)
        for new in output.scheduled_new_reqs:
            tables = [list(table) for table in new.block_ids]
            prompt = new.prompt_token_ids or []
            known = len(new.prefill_token_ids or prompt)
            self._running[new.req_id] = _Running(Sequence(prompt), tables, known)
        cached = output.scheduled_cached_reqs
        for at, name in enumerate(cached.req_ids):
            running, blocks = self._running[name], cached.new_block_ids[at]
            if name in cached.resumed_req_ids:
                running.tables = [list(table) for table in blocks or ()]
                running.known = running.sequence.prompt + cached.num_output_tokens[at]
            elif blocks is not None:
                for table, more in zip(running.tables, blocks, strict=True):
                    table.extend(more)

    def _forward(self, output: SchedulerOutput) -> tuple[list[str], list[list[int]]]:
        cached = output.scheduled_cached_reqs
        begins = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        begins |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        sampled = []
        for number, layer in enumerate(self.caches.tensors):
            if number == self.raises_after:
                raise ForwardError
            # A step updates a state in place. Attention reads after the tokens of all requests have been written: a
            # request may share the blocks of one that computes them in the same step.
            if self.caches.is_state(layer):
                self._check(layer, begins)
            for name, begin in begins.items():
                running = self._running[name]
                end = begin + output.num_scheduled_tokens[name]
                self.caches.compute(running.sequence, running.tables, begin, end, layer)
            if not self.caches.is_state(layer):
                self._check(layer, begins)
            if begins:
                self.connector.save_kv_layer(layer, self.caches.tensors[layer], None)
        for name, begin in begins.items():
            running, tokens = self._running[name], []
            end = begin + output.num_scheduled_tokens[name]
            if end == running.known:
                tokens.append(running.sequence.token(end))
                running.known += 1
            elif end > running.known:
                self.wrong.append(f"{name}: {end} tokens scheduled, {running.known} known")
            sampled.append(tokens)
        return list(begins), sampled

    def _check(self, layer: str, begins: dict[str, int]) -> None:
        for name, begin in begins.items():
            running = self._running[name]
            wrong = self.caches.wrong(running.sequence, running.tables, begin, layer)
            if wrong:
                self.wrong.append(f"{name}, stage {self.stage}, rank {self.rank}: {wrong}")


def _projection(layer: str, heads: int) -> QKVParallelLinear:
    """The projection beside an attention layer, which knows the KV heads on all ranks, without weights."""
    made = QKVParallelLinear.__new__(QKVParallelLinear)
    vars(made).update(prefix=f"{layer.rpartition('.')[0]}.qkv_proj", total_num_kv_heads=heads)
    return made


def heads_of(layer: str, kind: Kind) -> int:
    """KV heads of a layer on all ranks together."""
    return MORE_HEADS if kind == "uneven" and number_of(layer) % 2 else HEADS


class ModelExecutor(Executor):
    """vLLM's executor interface. The ranks of a stage run on a thread of their own, so that asynchronous scheduling is
    real, and that a stage is at a batch while the next stage is at the one before.
    """

    supports_pp = True
    kind: Kind = "full"
    # Of the first rank; None for memory of the host.
    gpu: int | None = None
    element = torch.float32
    # The numbers of the layers of each stage.
    stages: tuple[tuple[int, ...], ...] = ((0, 1, 2, 3),)

    def _init_executor(self) -> None:
        assert len(self.stages) == self.parallel_config.pipeline_parallel_size
        self._threads = [ThreadPoolExecutor(1) for _ in self.stages]
        self._outputs: list[ModelRunnerOutput] = []
        self.ranks: list[_Rank] = []
        # The time that a step takes at least.
        self.step_s = 0.0

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return True

    def _specs(self, rank: int) -> dict[str, Any]:
        """Of the layers of a rank's stage."""
        layers = self.stages[rank // self.parallel_config.tensor_parallel_size]
        return {name: spec for name, spec in self._all_specs().items() if number_of(name) in layers}

    def _all_specs(self) -> dict[str, Any]:
        ranks = self.parallel_config.tensor_parallel_size
        heads = max(1, HEADS // ranks)
        block_tokens = self.cache_config.block_size
        attention = {"block_size": block_tokens, "num_kv_heads": heads, "head_size": HEAD_SIZE, "dtype": self.element}
        if self.kind == "latent":
            attention["num_kv_heads"] = 1
            return {f"layers.{at}.attn": MLAAttentionSpec(**attention) for at in range(4)}
        specs: dict[str, Any] = {f"layers.{at}.attn": FullAttentionSpec(**attention) for at in (0, 2)}
        for at in (1, 3):
            if self.kind == "uneven":
                attention["num_kv_heads"] = max(1, MORE_HEADS // ranks)
                specs[f"layers.{at}.attn"] = FullAttentionSpec(**attention)
            elif self.kind == "window":
                specs[f"layers.{at}.attn"] = SlidingWindowSpec(sliding_window=WINDOW, **attention)
            elif self.kind in ("state", "aligned"):
                page = specs["layers.0.attn"].page_size_bytes
                is_aligned = self.kind == "aligned"
                specs[f"layers.{at}.mixer"] = MambaSpec(
                    block_size=block_tokens if is_aligned else self.model_config.max_model_len,
                    shapes=((page // 4,),),
                    dtypes=(torch.float32,),
                    mamba_cache_mode="align" if is_aligned else "none",
                )
        return specs

    def collective_rpc(
        self, method: Any, timeout: float | None = None, args: Any = (), kwargs: Any = None, non_block: bool = False
    ) -> Any:
        ranks = range(self.parallel_config.world_size)
        match method:
            case "get_kv_cache_spec":
                return [self._specs(rank) for rank in ranks]
            case "get_supported_kv_cache_layouts":
                return [["LBHNC"] for _ in ranks]
            case "set_kv_cache_layout":
                self.cache_config.kv_cache_layout = args[0]
            case "determine_available_memory":
                return [1 << 26 for _ in ranks]
            case "initialize_from_config":
                self.ranks = [
                    _Rank(self.vllm_config, config, rank, self.kind, self.gpu) for rank, config in enumerate(args[0])
                ]
            case "get_kv_connector_handshake_metadata":
                own = [(it, it.connector.get_handshake_metadata()) for it in self.ranks]
                return [None if made is None else {(it.stage, it.rank): made} for it, made in own]
            case "compile_or_warm_up_model" | "shutdown":
                return []
            case _:
                raise NotImplementedError(f"{method}{args}")
        return [None for _ in ranks]

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        future: Future[Any] | None = None
        for stage, thread in enumerate(self._threads):
            future = thread.submit(self._execute, scheduler_output, stage, future)
        assert future is not None
        return future if non_block else future.result()

    def _execute(self, output: SchedulerOutput, stage: int, before: Future[Any] | None) -> Any:
        """What all ranks up to a stage have made and, of the last stage, what the engine gets."""
        outputs: list[ModelRunnerOutput] = before.result() if before is not None else []
        time.sleep(self.step_s)
        outputs += [rank.execute(output) for rank in self.ranks if rank.stage == stage]
        if stage + 1 < len(self._threads):
            return outputs
        assert self.kv_output_aggregator is not None
        made = self.kv_output_aggregator.aggregate(outputs, len(outputs) - self.parallel_config.tensor_parallel_size)
        if output.total_num_scheduled_tokens == 0:
            return made
        self._outputs.append(made)
        return None

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        future: Future[ModelRunnerOutput] = self._threads[-1].submit(lambda: self._outputs.pop(0))
        return future if non_block else future.result()

    def check_health(self) -> None:
        pass

    def close(self) -> None:
        for rank in self.ranks:
            rank.connector.shutdown()
        for thread in self._threads:
            thread.shutdown()
        for rank in self.ranks:
            rank.caches.close()


@dataclass
class Outcome:
    """What an engine said of a request."""

    tokens: list[int] = field(default_factory=list)
    reason: str | None = None
    params: dict[str, Any] | None = None
    # By source, as vLLM counts them.
    prefill: Any = None


class Engine:
    """An engine that is stepped by hand, in one process with its peers."""

    def __init__(
        self,
        model: str,
        *,
        kind: Kind = "full",
        gpu: int | None = None,
        element: torch.dtype = torch.float32,
        blocks: int = 128,
        asynchronous: bool = False,
        caching: bool = False,
        ranks: int = 1,
        stages: tuple[tuple[int, ...], ...] = ModelExecutor.stages,
        policy: str = "fail",
        batched_tokens: int = 512,
        seqs: int = 16,
        connector: str = "KVFerryConnector",
        extra: dict[str, Any] | None = None,
        **more: Any,
    ) -> None:
        parts = {"kind": kind, "gpu": gpu, "element": element, "stages": stages}
        executor = type("ModelExecutor", (ModelExecutor,), parts)
        arguments = EngineArgs(
            model=model,
            dtype="float32",
            max_model_len=512,
            block_size=BLOCK_TOKENS,
            num_gpu_blocks_override=blocks,
            enable_prefix_caching=caching,
            max_num_batched_tokens=batched_tokens,
            max_num_seqs=seqs,
            enforce_eager=True,
            tensor_parallel_size=ranks,
            pipeline_parallel_size=len(stages),
            async_scheduling=asynchronous,
            distributed_executor_backend=executor,
            disable_hybrid_kv_cache_manager=False,
            kv_transfer_config={
                "kv_connector": connector,
                # A consumer opens no port for routers.
                "kv_role": "kv_both",
                "kv_load_failure_policy": policy,
                "kv_connector_extra_config": extra or {},
            },
            **more,
        )
        config = arguments.create_engine_config()
        # vLLM switches it off on a CPU, for its model runner there, which is not used here.
        config.scheduler_config.async_scheduling = asynchronous
        if kind == "aligned":
            # The model whose configuration the engines take has no states.
            config.cache_config.mamba_cache_mode = "align"
        self.core = EngineCore(config, executor, log_stats=True)
        self.scheduler: Any = self.core.scheduler
        # The model whose configuration the engines take has no images, so vLLM gives its scheduler no room for them.
        self.scheduler.max_num_encoder_input_tokens = ENCODED
        self.scheduler.encoder_cache_manager = EncoderCacheManager(cache_size=ENCODED)
        self.outcomes: dict[str, Outcome] = {}
        self.steps = 0

    @property
    def executor(self) -> Any:
        return self.core.model_executor

    def submit(
        self,
        name: str,
        prompt: list[int],
        tokens: int = 4,
        params: dict[str, Any] | None = None,
        stop: list[int] | None = None,
        salt: str | None = None,
        images: list[MultiModalFeatureSpec] | None = None,
        adapter: LoRARequest | None = None,
    ) -> Outcome:
        sampling = SamplingParams(
            temperature=0,
            max_tokens=tokens,
            stop_token_ids=stop,
            extra_args={"kv_transfer_params": params} if params else None,
        )
        request = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=list(prompt),
            mm_features=images,
            sampling_params=sampling,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=adapter,
            cache_salt=salt,
            data_parallel_rank=None,
        )
        self.outcomes[name] = Outcome()
        self.core.add_request(*self.core.preprocess_add_request(request))
        return self.outcomes[name]

    def abort(self, *names: str) -> None:
        self.core.abort_requests(list(names))

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.has_requests() or self.core.batch_queue)

    def step(self) -> None:
        """A turn of the core's loop."""
        if not self.busy:
            return
        outputs, executed = self.core.step_fn()
        self.core.post_step(executed)
        self.steps += 1
        for made in (outputs or {}).values():
            for output in made.outputs:
                outcome = self.outcomes[output.request_id]
                outcome.tokens += output.new_token_ids
                if output.prefill_stats is not None:
                    outcome.prefill = output.prefill_stats
                if output.finish_reason is not None:
                    outcome.reason, outcome.params = str(output.finish_reason), output.kv_transfer_params
        if not executed:
            time.sleep(0.001)

    @property
    def free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def wrong(self) -> list[str]:
        for rank in self.executor.ranks:
            rank.wrong += rank.caches.settle()
        return [line for rank in self.executor.ranks for line in rank.wrong]

    def close(self) -> None:
        self.executor.close()
        self.scheduler.shutdown()


def run(*engines: Engine, until: Callable[[], object] | None = None, within: float = 30.0) -> None:
    """Steps the engines in turn until a condition holds, or until none has anything to do."""
    deadline = time.monotonic() + within
    while not until() if until else any(engine.busy for engine in engines):
        assert time.monotonic() < deadline, (
            f"not within {within:.0f} s: {[engine.scheduler.requests for engine in engines]}"
        )
        for engine in engines:
            engine.step()
        if not any(engine.busy for engine in engines):
            time.sleep(0.001)
