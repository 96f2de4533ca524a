"""One engine of a handoff, without a model. Runs in vLLM's environment; its input says what to do, in lines of JSON.

python -m kvferry_vllm_bench.half MODEL CONNECTOR prefill|decode
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch

from kvferry_vllm_bench.engine import Cache, Chunk, Engine, output_of, own_output, request

# The cache of the model of the end-to-end test.
CACHE = Cache(layers=4, blocks=64, block_tokens=128)
# Between the steps of an engine that waits. vLLM's sleeps 1 ms, which would hide the differences.
POLL_S = 0.0001
PATIENCE_S = 30.0
EXTRA: dict[str, dict[str, Any]] = {"MooncakeConnector": {"mooncake_protocol": "tcp"}}


class Half:
    def __init__(self, model: str, connector: str, prefills: bool) -> None:
        # As in `Instance.transfer_config`.
        role = "kv_both"
        if connector == "MooncakeConnector":
            role = "kv_producer" if prefills else "kv_consumer"
        self.engine = Engine(connector, EXTRA.get(connector, {}), CACHE, model, role)
        chance = torch.Generator().manual_seed(1)
        self.written = {name: torch.rand(it.shape, generator=chance) for name, it in self.engine.tensors.items()}
        if prefills:
            for name, tensor in self.engine.tensors.items():
                tensor.copy_(self.written[name])

    def _blocks(self, prompt: list[int], first: int) -> list[int]:
        return list(range(first, first + -(-len(prompt) // CACHE.block_tokens)))

    def prefill(self, name: str, prompt: list[int], params: dict[str, Any]) -> None:
        """Answers with the times when the last layer was computed and when the parameters for the decode were made, and
        later that nothing is held any more.
        """
        engine, made = self.engine, request(name, prompt, params)
        blocks = self._blocks(prompt, 1)
        engine.arrived(made)
        engine.allocate(made, blocks)
        step = engine.step(output_of([Chunk(made, 0, len(prompt), blocks)]))
        made.num_computed_tokens = len(prompt)
        held, answer = engine.finish(made, blocks)
        _say({"computed": step.computed, "answered": time.perf_counter(), "params": answer})
        if held:
            self._until("finished_sending", name, finished=name)
        _say({"free": True})

    def decode(self, name: str, prompt: list[int]) -> None:
        """Waits for the parameters, a line of their own, and answers with the times when the connector got the request
        and when it reported it.
        """
        engine, blocks = self.engine, self._blocks(prompt, 20)
        for tensor in engine.tensors.values():
            tensor[blocks] = 0
        _say({"waits": True})
        made = request(name, prompt, json.loads(sys.stdin.readline()))
        arrived = time.perf_counter()
        engine.arrived(made)
        engine.allocate(made, blocks)
        received = self._until("finished_recving", name)
        right = all(
            torch.equal(tensor[blocks][: len(blocks) - 1], self.written[layer][1 : len(blocks)])
            for layer, tensor in engine.tensors.items()
        )
        _say({"arrived": arrived, "received": received, "right": right})
        engine.finish(made, blocks)
        engine.step(output_of([], [name]))

    def _until(self, what: str, name: str, finished: str | None = None) -> float:
        """Steps until the connector reports the request; returns when."""
        ended = [finished] if finished else []
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            step = self.engine.step(output_of([], ended))
            made, ended = step.output, []
            if name in (getattr(made, what) or ()):
                return step.reported
            if name in made.failed_recving or made.invalid_block_ids:
                raise RuntimeError(f"{name} failed")
            time.sleep(POLL_S)
        raise RuntimeError(f"{what} of {name}: nothing within {PATIENCE_S:.0f} s")


def _say(what: dict[str, Any]) -> None:
    _OUT.write(json.dumps(what) + "\n")
    _OUT.flush()


_OUT = own_output()

if __name__ == "__main__":
    half = Half(sys.argv[1], sys.argv[2], sys.argv[3] == "prefill")
    _say({"ready": True})
    for line in sys.stdin:
        order = json.loads(line)
        (half.prefill if sys.argv[3] == "prefill" else half.decode)(**order)
    # At once: with UCX's libraries loaded, the ordinary way out may crash.
    os._exit(0)
