"""A small decoder with a paged KV cache: the computation of an engine, on a GPU or on a CPU.

Every call has the same shapes, whatever the requests are: a row is one token, and rows do not depend on each other.
So a request's KV and tokens are the same bits in any batch, and two runs can be compared.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

# With this setting, cuBLAS computes the same bits in each process, whatever its streams are.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

LAYERS, HEADS, KV_HEADS, HEAD, WIDTH, VOCABULARY = 4, 8, 2, 64, 512, 1024
BLOCK = 16
# The most blocks of one request, and the rows of a step of prefill and of decode.
TABLE = 36
CHUNK, BATCH = 64, 8
# Steps that may be launched before the oldest of them has run.
AHEAD = 4

NAMES = [f"model.layers.{at}.attn" for at in range(LAYERS)]
# Called with a layer's number, before and after its attention.
Hook = Callable[[int], None]


@dataclass
class _Rows:
    """The arguments of a step: in memory of the GPU, and in pinned memory, once for each step under way."""

    # Each row has its token (-1: the last one that was generated there), its position (-1: no request) and its blocks.
    device: Any
    host: list[Any]
    graph: Any = None


class Model:
    """A decoder with random weights, the same ones for one seed, and a cache of `blocks`. No request has block 0."""

    def __init__(self, blocks: int, device: str, dtype: torch.dtype, *, seed: int = 1) -> None:
        self.device = torch.device(device)
        self.is_cuda = self.device.type == "cuda"
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        random = torch.Generator().manual_seed(seed)

        def weights(*shape: int, scale: float | None = None) -> torch.Tensor:
            made = torch.randn(*shape, generator=random) * (scale or shape[-1] ** -0.5)
            return made.to(self.device, dtype)

        self.embed = weights(VOCABULARY, WIDTH, scale=1.0)
        self.places = weights(TABLE * BLOCK, WIDTH, scale=1.0)
        self.layers = [
            {
                "qkv": weights((HEADS + 2 * KV_HEADS) * HEAD, WIDTH),
                "out": weights(WIDTH, HEADS * HEAD),
                "up": weights(2 * WIDTH, WIDTH),
                "down": weights(WIDTH, 2 * WIDTH),
            }
            for _ in range(LAYERS)
        ]
        # The layout is vLLM's: one allocation, and for each layer blocks × heads × tokens × keys and values.
        self.cache = torch.zeros(LAYERS, blocks, KV_HEADS, BLOCK, 2 * HEAD, device=self.device, dtype=dtype)
        self.last = torch.zeros(BATCH, dtype=torch.int32, device=self.device)
        self._rows = {name: self._arguments(rows) for name, rows in (("prefill", CHUNK), ("decode", BATCH))}
        # The event at the end of each step under way.
        self._ends: list[Any] = []
        self._steps = 0

    def _arguments(self, rows: int) -> _Rows:
        shape = (rows, 2 + TABLE)
        host = [torch.zeros(shape, dtype=torch.int32, pin_memory=self.is_cuda) for _ in range(AHEAD)]
        return _Rows(torch.zeros(shape, dtype=torch.int32, device=self.device), host)

    @property
    def caches(self) -> dict[str, torch.Tensor]:
        return dict(zip(NAMES, self.cache, strict=True))

    def _forward(self, rows: torch.Tensor, before: Hook, after: Hook) -> torch.Tensor:
        """Writes the KV of the rows and returns the token that follows each."""
        given, position, tables = rows[:, 0], rows[:, 1].clamp(min=0).long(), rows[:, 2:].long()
        token = torch.where(given < 0, self.last.repeat(rows.shape[0] // BATCH), given).long()
        x = self.embed[token] + self.places[position]
        block = tables.gather(1, (position // BLOCK)[:, None])[:, 0]
        # Rows without a request have block 0.
        block = torch.where(rows[:, 1] < 0, torch.zeros_like(block), block)
        hidden = torch.arange(TABLE * BLOCK, device=self.device)[None, :] > position[:, None]
        for at, layer in enumerate(self.layers):
            qkv = functional.linear(functional.layer_norm(x, (WIDTH,)), layer["qkv"]).view(
                -1, HEADS + 2 * KV_HEADS, HEAD
            )
            query, key, value = qkv.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
            before(at)
            cache = self.cache[at]
            cache[block, :, position % BLOCK] = torch.cat((key, value), dim=2)
            # All tokens of the row's request, and places that are not written yet: the mask hides those.
            read = cache[tables].transpose(1, 2).reshape(-1, KV_HEADS, TABLE * BLOCK, 2 * HEAD)
            keys, values = read.split(HEAD, dim=3)
            grouped = query.reshape(-1, KV_HEADS, HEADS // KV_HEADS, HEAD)
            scores = (grouped @ keys.transpose(2, 3)).float() * HEAD**-0.5
            weights = scores.masked_fill(hidden[:, None, None, :], -1e30).softmax(3).to(values.dtype)
            x = x + functional.linear((weights @ values).reshape(-1, HEADS * HEAD), layer["out"])
            after(at)
            x = x + functional.linear(
                functional.gelu(functional.linear(functional.layer_norm(x, (WIDTH,)), layer["up"])), layer["down"]
            )
        return functional.linear(functional.layer_norm(x, (WIDTH,)), self.embed).float().argmax(1).to(torch.int32)

    def _decode(self, rows: torch.Tensor, before: Hook, after: Hook) -> None:
        self.last.copy_(self._forward(rows, before, after))

    def capture(self, *steps: str) -> None:
        """Makes these steps, ``prefill`` or ``decode``, run as CUDA graphs, which call no hooks."""

        def none(_: int) -> None: ...

        for name in steps:
            rows = self._rows[name]
            run = self._forward if name == "prefill" else self._decode
            side = torch.cuda.Stream(self.device)
            side.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(side):
                run(rows.device, none, none)
            torch.cuda.current_stream(self.device).wait_stream(side)
            rows.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(rows.graph):
                run(rows.device, none, none)
        self.synchronize()

    def launch(self, name: str, rows: list[tuple[int, int, list[int]]], before: Hook, after: Hook) -> None:
        """Launches a step, without waiting for it. Each row has a token, a position and blocks."""
        arguments = self._rows[name]
        if self.is_cuda and len(self._ends) == AHEAD:
            self._ends.pop(0).synchronize()
        host = arguments.host[self._steps % AHEAD]
        self._steps += 1
        host[:, :2], host[:, 2:] = -1, 0
        for at, (token, position, table) in enumerate(rows):
            host[at, 0], host[at, 1] = token, position
            host[at, 2 : 2 + len(table)] = torch.tensor(table, dtype=torch.int32)
        # Rows without a request take the token 0.
        host[len(rows) :, 0] = 0
        arguments.device.copy_(host, non_blocking=True)
        if arguments.graph is not None:
            arguments.graph.replay()
        elif name == "prefill":
            self._forward(arguments.device, before, after)
        else:
            self._decode(arguments.device, before, after)
        if self.is_cuda:
            end = torch.cuda.Event()
            end.record(torch.cuda.current_stream(self.device))
            self._ends.append(end)

    def delay(self, cycles: int) -> None:
        """Makes the stream wait, so that the host is ahead of it."""
        if self.is_cuda and cycles:
            torch.cuda._sleep(cycles)

    def checksum(self, blocks: list[int], tokens: int) -> torch.Tensor:
        """The checksum of the KV of the first tokens of these blocks, computed on the stream."""
        # A copy from pageable memory would wait for the stream.
        host = torch.tensor(blocks, pin_memory=self.is_cuda)
        numbers = host.to(self.device, non_blocking=True)
        kv = self.cache[:, numbers].transpose(2, 3).reshape(LAYERS, -1, KV_HEADS * 2 * HEAD)[:, :tokens].contiguous()
        bits = kv.view(torch.int16 if kv.element_size() == 2 else torch.int32).reshape(-1).long()
        return (bits * (torch.arange(bits.numel(), device=self.device) * 2654435761 % 1000003 + 1)).sum()

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.device)
