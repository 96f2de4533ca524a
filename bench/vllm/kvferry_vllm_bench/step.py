"""KVFerryConnector's part of an engine's step, through Python: 256 live requests. Prints JSON.

    python -m kvferry_vllm_bench.step MODEL ROUNDS

| requests | state |
|---|---|
| 64 | produced, and held until they are fetched |
| 64 | prefilled and fetched at the same time: each step computes a chunk in new blocks |
| 128 | fetched; their prefill has not computed them |

These are the requests of `kvferry bench handoff --only step`. In each step that moves, two more are admitted,
fetched and finished. The peer is a second process of this program. A step without news computes a token of each of 64
requests that are not handed over. Only the calls are timed, not the making of vLLM's own objects.

Steps without news follow each other at once, or after the pause that the steps that move have, in which the processor
sleeps and its caches cool down. What that costs is shown by a connector whose methods do nothing, in the same steps.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from copy import copy
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
)

from kvferry_vllm_bench.engine import CALLS, Cache, Chunk, Engine, output_of, own_output, request

HELD = 64
PREFILLED = 64
FETCHED = 128
# Requests that each step admits.
ADMITTED = 2
CHUNK_TOKENS = 32
SHORT_TOKENS = 128
# As on a device: loads go on meanwhile.
STEP_TAKES_S = 0.02
STEPS = 50
CACHE = Cache(layers=64, blocks=1024, block_tokens=16)


def _blocks(first: int, tokens: int) -> list[int]:
    """Anywhere in the pool; their contents are not compared. Block 0 is vLLM's own."""
    count = tokens // CACHE.block_tokens
    return [1 + (block * 2_654_435_761) % (CACHE.blocks - 1) for block in range(first, first + count)]


def _prompt(tokens: int) -> list[int]:
    return [7] * tokens


class Nothing(KVConnectorBase_V1):  # type: ignore[misc]
    """The least that a connector can be."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        return

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        return

    def wait_for_save(self) -> None:
        return

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return KVConnectorTransferResults()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        return

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()


def without_connector(engine: Engine) -> Engine:
    """The same calls to a connector that does nothing."""
    other = copy(engine)
    other.scheduler = Nothing(engine.config, KVConnectorRole.SCHEDULER, engine.caches)
    other.worker = Nothing(engine.config, KVConnectorRole.WORKER, engine.caches)
    return other


class Side:
    """An engine that knows where the other one is."""

    def __init__(self, model: str) -> None:
        self.engine = Engine("KVFerryConnector", {}, CACHE, model)
        self.here = {
            "remote_bootstrap_addr": f"http://127.0.0.1:{os.environ['VLLM_MOONCAKE_BOOTSTRAP_PORT']}",
            "remote_engine_id": self.engine.scheduler._scheduler.half.engine_id,
        }
        self.peer: dict[str, Any] = {}

    def produced(self, name: str, tokens: int) -> Any:
        params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": f"xfer-{name}"}
        made = request(name, _prompt(tokens), params)
        self.engine.arrived(made)
        return made

    def consumed(self, name: str, tokens: int) -> Any:
        params = {"do_remote_decode": False, "do_remote_prefill": True, "transfer_id": f"xfer-{name}"}
        return request(name, _prompt(tokens), params | self.peer)

    def fetch(self, made: Any, tokens: int) -> None:
        self.engine.arrived(made)
        loaded = self.engine.allocate(made, _blocks(0, tokens))
        assert loaded, f"{made.request_id} is not loaded"

    def compute(self, names: list[str]) -> None:
        """Prefills these requests in one step, and ends them."""
        some = [self.produced(name, SHORT_TOKENS) for name in names]
        self.engine.step(output_of([Chunk(it, 0, SHORT_TOKENS, _blocks(0, SHORT_TOKENS)) for it in some]))
        for it in some:
            held, _ = self.engine.finish(it, _blocks(0, SHORT_TOKENS))
            assert held, f"{it.request_id} is not held"


def serve(model: str, prefill_tokens: int) -> None:
    """The peer: computes what it is asked for, a line of names each."""
    out = own_output()
    side = Side(model)
    print(json.dumps(side.here), file=out, flush=True)
    side.peer = json.loads(sys.stdin.readline())
    for n in range(HELD):
        # It arrives, which keeps the offer, and is never admitted.
        side.engine.arrived(side.consumed(f"held-{n}", SHORT_TOKENS))
    for n in range(FETCHED):
        side.produced(f"fetched-{n}", SHORT_TOKENS)
    for n in range(PREFILLED):
        side.fetch(side.consumed(f"prefilled-{n}", prefill_tokens), prefill_tokens)
    side.engine.step(output_of([]))
    print("ready", file=out, flush=True)
    for line in sys.stdin:
        side.compute(line.split())
        print("computed", file=out, flush=True)
    side.engine.close()


class Bench:
    def __init__(self, model: str, rounds: int) -> None:
        self.prefill_tokens = (rounds * STEPS + 2) * CHUNK_TOKENS
        port = int(os.environ["VLLM_MOONCAKE_BOOTSTRAP_PORT"])
        command = [sys.executable, "-m", "kvferry_vllm_bench.step", model, "--peer", str(self.prefill_tokens)]
        env = os.environ | {"VLLM_MOONCAKE_BOOTSTRAP_PORT": str(port + 1)}
        self._peer = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.side = Side(model)
        self.side.peer = json.loads(self._answer())
        self._tell(json.dumps(self.side.here))
        assert self._answer() == "ready"
        self.until = 0
        self.admitted = 0
        self.received: list[Any] = []
        self.requests: dict[str, Any] = {}
        self.nothing = without_connector(self.side.engine)
        self._populate()

    def _tell(self, line: str) -> None:
        assert self._peer.stdin is not None
        self._peer.stdin.write(line + "\n")
        self._peer.stdin.flush()

    def _answer(self) -> str:
        assert self._peer.stdout is not None
        return self._peer.stdout.readline().strip()

    def _populate(self) -> None:
        side = self.side
        side.compute([f"held-{n}" for n in range(HELD)])
        self.prefilled = [side.produced(f"prefilled-{n}", self.prefill_tokens) for n in range(PREFILLED)]
        for n in range(FETCHED):
            side.fetch(side.consumed(f"fetched-{n}", SHORT_TOKENS), SHORT_TOKENS)
        decoded = [request(f"decoded-{n}", _prompt(SHORT_TOKENS), None) for n in range(64)]
        self.decoded = [Chunk(it, SHORT_TOKENS, 1, []) for it in decoded]
        side.engine.step(output_of([]))

    def prepare(self) -> None:
        """Has the peer compute what the next round admits."""
        self._tell(" ".join(f"admitted-{self.admitted + n}" for n in range(STEPS * ADMITTED)))
        assert self._answer() == "computed"

    def step(self, moving: bool, takes_s: float = STEP_TAKES_S) -> list[float]:
        """Seconds of each of the parts: requests that come and go, then `CALLS`."""
        side, engine = self.side, self.side.engine
        chunks, admitted = self.decoded, []
        if moving:
            new = _blocks(self.until // CACHE.block_tokens, CHUNK_TOKENS)
            chunks = [Chunk(it, self.until, CHUNK_TOKENS, new) for it in self.prefilled]
            self.until += CHUNK_TOKENS
            for _ in range(ADMITTED):
                admitted.append(side.consumed(f"admitted-{self.admitted}", SHORT_TOKENS))
                self.admitted += 1
            self.requests |= {it.request_id: it for it in admitted}
        output, blocks = output_of(chunks), _blocks(0, SHORT_TOKENS)
        began = time.perf_counter()
        for it in self.received:
            engine.finish(it, blocks)
        for it in admitted:
            side.fetch(it, SHORT_TOKENS)
        requests = time.perf_counter() - began
        step = engine.step(output)
        if step.output.failed_recving:
            raise RuntimeError(f"{step.output.failed_recving} could not be loaded")
        self.received = [self.requests.pop(name) for name in step.output.finished_recving or ()]
        time.sleep(takes_s)
        return [requests, *step.took]

    def floor(self, takes_s: float) -> list[float]:
        """As a step without news, with a connector that does nothing."""
        step = self.nothing.step(output_of(self.decoded))
        time.sleep(takes_s)
        return list(step.took)

    def check(self) -> None:
        """All requests are still live."""
        for _ in range(5):
            self.step(moving=False)
        gauges = self.side.engine.scheduler._scheduler.half.gauges()
        assert (gauges["held"], gauges["fetching"]) == (HELD, FETCHED), gauges

    def close(self) -> None:
        self.side.engine.close()
        assert self._peer.stdin is not None
        self._peer.stdin.close()
        self._peer.wait()


def main(model: str, rounds: int) -> None:
    out = own_output()
    bench = Bench(model, rounds)
    measures: dict[str, Callable[[], list[float]]] = {
        "moving": lambda: bench.step(moving=True),
        "nothing": lambda: bench.step(moving=False, takes_s=0),
        "nothing_paused": lambda: bench.step(moving=False),
        "floor": lambda: bench.floor(takes_s=0),
        "floor_paused": lambda: bench.floor(STEP_TAKES_S),
    }
    times: dict[str, list[list[list[float]]]] = {name: [] for name in measures}
    bench.prepare()
    bench.step(moving=False)
    for done in range(rounds):
        if done:
            bench.prepare()
        for name, measure in measures.items():
            times[name].append([measure() for _ in range(STEPS)])
        print(f"step: round {done + 1} of {rounds}", file=sys.stderr, flush=True)
    bench.check()
    bench.close()
    print(json.dumps({"parts": ["requests that come and go", *CALLS], **times}), file=out, flush=True)


if __name__ == "__main__":
    if sys.argv[2] == "--peer":
        serve(sys.argv[1], int(sys.argv[3]))
    else:
        main(sys.argv[1], int(sys.argv[2]))
