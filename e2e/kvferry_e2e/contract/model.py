"""A model whose tokens and KV follow from the tokens before: each value in a cache is right or wrong."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from vllm.v1.kv_cache_interface import MambaSpec, MLAAttentionSpec, SlidingWindowSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

VOCABULARY = 320
WINDOW = 40
# Real KV heads of the tiny Llama, whose configuration the engines take.
HEADS = 2
# Of every other layer of the kind "uneven".
MORE_HEADS = 4
HEAD_SIZE = 8


class Sequence:
    """A prompt and what the model says after it."""

    def __init__(self, prompt: list[int]) -> None:
        self.prompt = len(prompt)
        self._hashes: list[int] = []
        self._last = 17
        for token in prompt:
            self._push(token)

    def _push(self, token: int) -> None:
        self._last = (self._last * 1_000_003 + token + 1) & 0x7FFFFFFF
        self._hashes.append(self._last)

    def token(self, position: int) -> int:
        """The token at a position after the prompt."""
        while len(self._hashes) < position:
            self._push(self._next())
        return 3 + self._hashes[position - 1] % (VOCABULARY - 3)

    def _next(self) -> int:
        return 3 + self._last % (VOCABULARY - 3)

    def answer(self, tokens: int) -> list[int]:
        return [self.token(self.prompt + at) for at in range(tokens)]

    def hashes(self, begin: int, end: int) -> torch.Tensor:
        """A number per position that depends on all tokens up to it."""
        while len(self._hashes) < end:
            self._push(self._next())
        return torch.tensor(self._hashes[begin:end], dtype=torch.int32)


def value(hashes: torch.Tensor, layer: int, head: int) -> torch.Tensor:
    return hashes ^ (layer * 7919 + head * 104_729)


def number_of(layer: str) -> int:
    return int(layer.split(".")[1])


class Caches:
    """The KV of one rank, for all groups, as vLLM's own code lays it out."""

    def __init__(self, kv_cache_config: Any, rank: int, parallel: Any, heads: Mapping[str, int]) -> None:
        """`heads`: KV heads of each layer on all ranks."""
        ranks = parallel.tensor_parallel_size
        # Ranks that have the same heads share the tokens of a block with decode context parallelism.
        self._dcp = parallel.decode_context_parallel_size
        self._dcp_rank = rank % self._dcp
        self._interleave = parallel.cp_kv_cache_interleave_size
        self.tensors = self._allocate(kv_cache_config, KVCacheLayout[kv_cache_config.kv_cache_layout])
        self._groups = kv_cache_config.kv_cache_groups
        # Where there are more ranks than heads, several have the same.
        self._heads = {
            layer: [rank * total // ranks + at for at in range(max(1, total // ranks))]
            for layer, total in heads.items()
        }

    def _allocate(self, kv_cache_config: Any, layout: KVCacheLayout) -> dict[str, Any]:
        tensors: dict[str, Any] = allocate_kv_cache(kv_cache_config, torch.device("cpu"), layout)
        return tensors

    # What differs for memory of GPUs, where `wrong` says nothing yet.

    def begins_step(self) -> None:
        """The calling thread launches a step."""

    def ends_step(self) -> list[str]:
        """What steps before have read and was wrong."""
        return []

    def settle(self) -> list[str]:
        """What all steps have read and was wrong."""
        return []

    def close(self) -> None:
        """The engine has ended."""

    def zero(self, blocks: list[int]) -> None:
        for tensor in self.tensors.values():
            tensor[blocks] = 0

    def _heads_of(self, layer: str, spec: Any) -> list[int]:
        return [0] if isinstance(spec, MLAAttentionSpec) else self._heads[layer]

    def _spec(self, layer: str) -> Any:
        spec = self._groups[self.group(layer)].kv_cache_spec
        own = getattr(spec, "kv_cache_specs", None)
        return spec if own is None else own[layer]

    def group(self, layer: str) -> int:
        return next(at for at, group in enumerate(self._groups) if layer in group.layer_names)

    def is_state(self, layer: str) -> bool:
        return isinstance(self._spec(layer), MambaSpec)

    def wrong(self, sequence: Sequence, table: list[list[int]], computed: int, layer: str) -> str | None:
        """What a layer would read of the tokens before `computed` and is not there; None if all is right."""
        number = self.group(layer)
        spec, tensor = self._spec(layer), self.tensors[layer].view(torch.int32)
        if isinstance(spec, MambaSpec):
            if computed:
                state = tensor[table[number][(computed - 1) // spec.block_size], 0, 0]
                expected = int(sequence.hashes(computed - 1, computed)[0])
                if bool((state != expected).any()):
                    return f"group {number}, {layer}: the state is not that after {computed} tokens"
            return None
        begin = max(0, computed - spec.sliding_window + 1) if isinstance(spec, SlidingWindowSpec) else 0
        positions, blocks, offsets = self._slots(table[number], spec.block_size, begin, computed)
        for local, head in enumerate(self._heads_of(layer, spec)):
            expected = value(sequence.hashes(begin, computed)[positions - begin], number_of(layer), head)
            for content in (0, -1):
                bad = (tensor[blocks, local, offsets, content] != expected).nonzero().flatten()
                if len(bad):
                    at = positions[bad[:4]].tolist()
                    return f"group {number}, {layer}, head {head}: wrong at {at} of {computed}"
        return None

    def compute(self, sequence: Sequence, table: list[list[int]], begin: int, end: int, layer: str) -> None:
        number = self.group(layer)
        spec, tensor = self._spec(layer), self.tensors[layer].view(torch.int32)
        if isinstance(spec, MambaSpec):
            tensor[table[number][(end - 1) // spec.block_size], 0, 0, :] = int(sequence.hashes(end - 1, end)[0])
            return
        positions, blocks, offsets = self._slots(table[number], spec.block_size, begin, end)
        assert 0 not in blocks, "a token is written into the null block"
        for local, head in enumerate(self._heads_of(layer, spec)):
            values = value(sequence.hashes(begin, end)[positions - begin], number_of(layer), head)
            tensor[blocks, local, offsets] = values[:, None].expand(-1, tensor.shape[-1])

    def _slots(
        self, table: list[int], block_tokens: int, begin: int, end: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The positions that this rank has, and for each its block and its place there."""
        positions = torch.arange(begin, end)
        turn = self._interleave * self._dcp
        positions = positions[positions % turn // self._interleave == self._dcp_rank]
        blocks = torch.tensor(table, dtype=torch.long)[positions // (block_tokens * self._dcp)]
        in_rank = positions // turn * self._interleave + positions % self._interleave
        return positions, blocks, in_rank % block_tokens
