"""What of TensorRT-LLM's arguments the connector depends on, and what it refuses."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from kvferry._engine.identity.trtllm import of_trtllm


@dataclass(frozen=True)
class Facts:
    """Of one rank. `rank`, `ranks`: of those that share a request; with attention data parallelism, this rank alone."""

    rank: int
    ranks: int
    tokens_per_block: int | None
    # What names KV of the engine.
    model: str
    # Of the KV cache, as configured.
    dtype: str
    # Not so with attention data parallelism: each rank has requests of its own.
    shares_requests: bool = True

    @staticmethod
    def of(llm_args: Any, named: str | None = None) -> Facts:
        """`named`: the setting `model`.

        Raises NotImplementedError for what the connector does not support, with its name."""
        mapping = _mapping(llm_args)
        refuse(llm_args, mapping)
        ranks = of_engine = int(_first(mapping, "tp_size", default=1))
        rank = int(_first(mapping, "tp_rank", "rank", default=0))
        shares_requests = not getattr(llm_args, "enable_attention_dp", False)
        if not shares_requests:
            rank, ranks = 0, 1
        cache = getattr(llm_args, "kv_cache_config", None)
        tokens = getattr(cache, "tokens_per_block", None)
        return Facts(
            rank=rank,
            ranks=ranks,
            tokens_per_block=int(tokens) if isinstance(tokens, int) else None,
            model=of_trtllm(llm_args, named, ranks=of_engine).text(),
            dtype=str(getattr(cache, "dtype", "auto")),
            shares_requests=shares_requests,
        )


def refuse(llm_args: Any, mapping: Any) -> None:
    reasons = []
    cache = getattr(llm_args, "kv_cache_config", None)
    scheduler = getattr(llm_args, "scheduler_config", None)
    policy = getattr(scheduler, "capacity_scheduler_policy", None)
    name = str(getattr(policy, "name", policy)).rpartition(".")[2]
    # The second cache manager has a policy of its own, whatever is configured.
    if policy is not None and name != "GUARANTEED_NO_EVICT" and not getattr(cache, "use_kv_cache_manager_v2", False):
        reasons.append(
            f"capacity_scheduler_policy {name}: use GUARANTEED_NO_EVICT, because blocks must not leave while they load"
        )
    beams = getattr(llm_args, "max_beam_width", None)
    if isinstance(beams, int) and beams > 1:
        reasons.append(f"max_beam_width {beams}: use 1, because beams share blocks and change them")
    for attribute, what in (("pp_size", "pipeline_parallel_size"), ("cp_size", "context_parallel_size")):
        size = int(_first(mapping, attribute, default=1))
        if size > 1:
            reasons.append(f"{what} {size}: use 1, because a rank would hold only a part of a block's layers or tokens")
    if getattr(llm_args, "speculative_config", None) is not None:
        reasons.append("speculative_config: remove it, because a draft's tokens are not the request's")
    host = getattr(cache, "host_cache_size", None)
    if isinstance(host, int) and host > 0:
        reasons.append(f"kv_cache_config.host_cache_size {host}: use 0 and kvferry's host_gib instead")
    if reasons:
        raise NotImplementedError("kvferry.trtllm does not work with " + "; ".join(reasons))


def _mapping(llm_args: Any) -> Any:
    """The parallelism of this rank."""
    config = getattr(llm_args, "parallel_config", None)
    if config is not None and hasattr(config, "to_mapping"):
        return config.to_mapping()
    mapping = getattr(llm_args, "mapping", None)
    if mapping is not None:
        return mapping
    return _Sizes(llm_args)


class _Sizes:
    """From the arguments alone; the rank is MPI's."""

    def __init__(self, llm_args: Any) -> None:
        self.tp_size = _size(llm_args, "tensor_parallel_size")
        self.pp_size = _size(llm_args, "pipeline_parallel_size")
        self.cp_size = _size(llm_args, "context_parallel_size")
        self.rank = 0
        if self.tp_size > 1:
            self.rank = int(importlib.import_module("tensorrt_llm._utils").mpi_rank())


def _size(llm_args: Any, name: str) -> int:
    value = getattr(llm_args, name, None)
    return value if isinstance(value, int) else 1


def _first(source: Any, *names: str, default: int) -> Any:
    for name in names:
        value = getattr(source, name, None)
        if isinstance(value, int):
            return value
    return default
