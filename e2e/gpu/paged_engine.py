"""Prefill and decode engines on one GPU that hand KV over by `KVFerryConnector`.

The engines call the connector as vLLM's first model runner does. Scheduling is asynchronous: steps are launched before
the earlier ones have run, and the blocks of a request go to the next one once its last step is launched. Tokens and KV
are compared with those of one engine alone.

    python e2e/gpu/paged_engine.py --device cuda:0 --out FOLDER

The program needs torch, pytest (for the stand-in of vLLM's classes) and kvferry; no vLLM. The last row leaves the edges
between streams and transfers out, and must differ. Exit status 0: all rows are as they must be.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import multiprocessing
import random
import sys
import time
import traceback
from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from paged_model import BATCH, BLOCK, CHUNK, NAMES, TABLE, Model

sys.path.append(str(Path(__file__).resolve().parents[2] / "python" / "tests"))
vllm: Any = importlib.import_module("vllm_stand_in")

GENERATED = 16
PREFILL_BLOCKS, DECODE_BLOCKS = 90, 200
# The longest time of a handoff, and of an engine's start, in seconds.
TIMEOUT = 20.0


class FullAttentionSpec:
    block_size = BLOCK
    max_tp_shards = None

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


@dataclass
class Case:
    """A row of the table."""

    transports: str
    # The steps that run as CUDA graphs, which call no hooks of layers.
    graphs: tuple[str, ...] = ()
    own_stream: bool = True
    edges: bool = True

    @property
    def name(self) -> str:
        stream = "own stream" if self.own_stream else "default stream"
        graphs = "graphs: " + " ".join(self.graphs) if self.graphs else "no graphs"
        return f"{self.transports:<9} {graphs:<23} {stream:<14} {'edges' if self.edges else 'NO EDGES'}"


@dataclass
class Prompt:
    id: str
    tokens: list[int]


@dataclass
class Result:
    """The result of one prompt."""

    tokens: list[int]
    # The checksum of the prompt's KV in decode's blocks.
    checksum: int
    failed: bool = False


def prompts(count: int, seed: int) -> list[Prompt]:
    pick = random.Random(seed)
    longest = TABLE * BLOCK - GENERATED - 1
    lengths = [pick.choice((pick.randrange(2, 40), pick.randrange(40, longest))) for _ in range(count)]
    return [Prompt(f"r{at}", [pick.randrange(1000) for _ in range(n)]) for at, n in enumerate(lengths)]


def table_of(tokens: int) -> int:
    return -(-tokens // BLOCK)


def chunks(tokens: int) -> list[range]:
    return [range(start, min(start + CHUNK, tokens)) for start in range(0, tokens, CHUNK)]


@dataclass
class Running:
    """A request that has blocks."""

    prompt: Prompt
    request: Any
    blocks: list[int]
    row: int = -1
    computed: int = 0
    generated: list[Any] = field(default_factory=list)
    checksum: Any = None
    failed: bool = False

    def result(self) -> Result:
        return Result([int(it) for it in self.generated], int(self.checksum), self.failed)


class Engine:
    """The parts of vLLM on both sides: a pool of blocks, and the calls of a step in their order."""

    def __init__(self, args: argparse.Namespace, case: Case, blocks: int) -> None:
        self.args, self.case = args, case
        self.model = Model(blocks, args.device, getattr(torch, args.dtype))
        self.free = list(range(1, blocks))
        self.worker, self.scheduler = self._connectors(case, blocks)

    def _connectors(self, case: Case, blocks: int) -> tuple[Any, Any]:
        vllm.install(pytest.MonkeyPatch())
        module = importlib.import_module("kvferry.vllm._connector")
        group = SimpleNamespace(kv_cache_spec=FullAttentionSpec(self.model.cache.dtype), layer_names=NAMES)
        caches = SimpleNamespace(
            kv_cache_groups=[group],
            transfer_groups=[group],
            transfer_group_ids=(0,),
            transfer_group_index_by_layer=dict.fromkeys(NAMES, 0),
            num_blocks=blocks,
        )
        config = vllm.config(is_kv_producer=False, prefill_context_parallel_size=1)
        config.kv_transfer_config.kv_connector_extra_config = {
            "transports": case.transports,
            "timeout": TIMEOUT,
            "idle_share": 1.0,
        }
        # Replaces checks and names of vLLM's models, which this engine does not have.
        module.check_connector = lambda: None
        module.of_vllm = lambda *_: SimpleNamespace(properties=lambda: {"model": "paged"})
        module._place = lambda _: (module.Place(), 0)
        roles = module.KVConnectorRole
        worker, scheduler = (module.KVFerryConnector(config, it, caches) for it in (roles.WORKER, roles.SCHEDULER))
        worker.register_kv_caches(self.model.caches)
        if not case.edges:
            worker._worker._stream = lambda: "host"
        scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): worker.get_handshake_metadata()})
        return worker, scheduler

    @property
    def address(self) -> str:
        return str(self.worker.get_handshake_metadata().address)

    def allocate(self, count: int) -> list[int] | None:
        if count > len(self.free):
            return None
        # The blocks that were given back last are taken first.
        return [self.free.pop() for _ in range(count)]

    def step(self, new: list[Any], cached: list[Any], tokens: dict[str, int], launch: Any) -> Any:
        """A step as vLLM's runner makes it. `launch`: the forward pass, with the hooks of its layers."""
        output = SimpleNamespace(
            num_scheduled_tokens=tokens,
            scheduled_new_reqs=new,
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[it.req_id for it in cached],
                new_block_ids=[None for _ in cached],
                resumed_req_ids=set(),
                num_computed_tokens=[it.num_computed_tokens for it in cached],
            ),
            preempted_req_ids=set(),
        )
        metadata = self.scheduler.build_connector_meta(output)
        worker = self.worker
        worker.handle_preemptions(metadata)
        worker.bind_connector_metadata(metadata)
        if launch is not None:
            self.model.delay(self.args.delay if self.case.edges else self.args.delay * 5)
            launch(
                lambda at: worker.wait_for_layer_load(NAMES[at]),
                lambda at: worker.save_kv_layer(NAMES[at], self.model.cache[at], None),
            )
        worker.start_load_kv(None)
        worker.wait_for_save()
        results = worker.get_transfer_results(set())
        results.kv_connector_worker_meta = worker.build_connector_worker_meta()
        worker.clear_connector_metadata()
        self.scheduler.update_connector_output(results)
        return results

    def close(self) -> None:
        self.model.synchronize()
        self.worker.shutdown()
        self.scheduler.shutdown()


def scheduled(running: Running) -> Any:
    return SimpleNamespace(req_id=running.prompt.id, block_ids=(running.blocks,), num_computed_tokens=running.computed)


class Prefill(Engine):
    """Computes prompts, one chunk after the other, and holds their blocks until decode has them."""

    def __init__(self, args: argparse.Namespace, case: Case) -> None:
        super().__init__(args, case, PREFILL_BLOCKS)
        self.waiting: deque[Prompt] = deque()
        self.running: Running | None = None
        self.held: dict[str, list[int]] = {}

    def submit(self, prompt: Prompt) -> None:
        self.waiting.append(prompt)

    def run(self) -> list[tuple[str, str, dict[str, Any] | None]]:
        """One step. Returns a request that has blocks now, and one that has ended with its answer's parameters."""
        new, told = [], []
        if self.running is None and self.waiting:
            blocks = self.allocate(table_of(len(self.waiting[0].tokens)))
            if blocks is not None:
                prompt = self.waiting.popleft()
                params = {"do_remote_decode": True, "transfer_id": prompt.id}
                request = vllm.Request(prompt.id, params, list(prompt.tokens))
                self.scheduler.on_new_request(request)
                assert self.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
                self.running = Running(prompt, request, blocks)
                new = [scheduled(self.running)]
                told.append(("began", prompt.id, None))
        running = self.running
        if running is None:
            self._sent(self.step([], [], {}, None))
            return []
        chunk = next(it for it in chunks(len(running.prompt.tokens)) if it.start == running.computed)
        rows = [(running.prompt.tokens[at], at, running.blocks) for at in chunk]
        cached = [] if new else [scheduled(running)]
        tokens = {running.prompt.id: len(chunk)}
        results = self.step(
            new, cached, tokens, lambda before, after: self.model.launch("prefill", rows, before, after)
        )
        running.computed = chunk.stop
        if running.computed == len(running.prompt.tokens):
            self.running = None
            held, params = self.scheduler.request_finished(running.request, running.blocks)
            if held:
                self.held[running.prompt.id] = running.blocks
            else:
                self.free += running.blocks
            told.append(("ended", running.prompt.id, params))
        self._sent(results)
        return told

    def _sent(self, results: Any) -> None:
        for request in results.finished_sending:
            self.free += self.held.pop(request)

    @property
    def is_idle(self) -> bool:
        return self.running is None and not self.waiting and not self.held


class Decode(Engine):
    """Loads prompts, and generates tokens in batches."""

    def __init__(self, args: argparse.Namespace, case: Case) -> None:
        super().__init__(args, case, DECODE_BLOCKS)
        self.waiting: deque[tuple[Prompt, Any]] = deque()
        self.loading: dict[str, Running] = {}
        self.loaded: deque[Running] = deque()
        self.rows: list[Running | None] = [None] * BATCH
        self.ended: list[Running] = []

    def submit(self, prompt: Prompt, params: dict[str, Any]) -> None:
        request = vllm.Request(prompt.id, params, list(prompt.tokens), max_tokens=GENERATED)
        self.scheduler.on_new_request(request)
        self.waiting.append((prompt, request))

    def _admit(self) -> None:
        for _ in range(len(self.waiting)):
            prompt, request = self.waiting.popleft()
            tokens, _ = self.scheduler.get_num_new_matched_tokens(request, 0)
            blocks = self.allocate(table_of(len(prompt.tokens) + GENERATED)) if tokens else None
            if tokens == 0:
                raise AssertionError(f"{prompt.id} is not loaded: {self.scheduler.get_kv_connector_stats()}")
            if blocks is None:
                self.waiting.append((prompt, request))
                continue
            given = SimpleNamespace(get_block_ids=lambda blocks=blocks: (blocks,))
            self.scheduler.update_state_after_alloc(request, given, tokens)
            self.loading[prompt.id] = Running(prompt, request, blocks)

    def run(self) -> None:
        """One step."""
        self._admit()
        for row in [at for at, it in enumerate(self.rows) if it is None]:
            if self.loaded:
                running = self.loaded.popleft()
                running.row, self.rows[row] = row, running
                # vLLM computes the last token of a prompt again, to have the token that follows.
                running.computed = len(running.prompt.tokens) - 1
        batch = [it for it in self.rows if it is not None]
        if not batch:
            self._received(self.step([], [], {}, None))
            return
        new = [scheduled(it) for it in batch if not it.generated]
        cached = [scheduled(it) for it in batch if it.generated]
        tokens = {it.prompt.id: 1 for it in batch}
        rows = decode_rows(self.rows)
        results = self.step(new, cached, tokens, lambda *hooks: self.model.launch("decode", rows, *hooks))
        for running in generated(self.model, batch):
            self.rows[running.row] = None
            self.scheduler.request_finished(running.request, running.blocks)
            # The step is launched and need not have run.
            self.free += running.blocks
            self.ended.append(running)
        self._received(results)

    def _received(self, results: Any) -> None:
        for request in results.finished_recving:
            running = self.loading.pop(request)
            given = SimpleNamespace(get_block_ids=lambda blocks=running.blocks: (blocks,))
            self.scheduler.update_state_after_alloc(running.request, given, 0)
            running.failed = request in results.failed_recving
            running.checksum = self.model.checksum(running.blocks, len(running.prompt.tokens))
            self.loaded.append(running)


def decode_rows(rows: list[Running | None]) -> list[tuple[int, int, list[int]]]:
    made = []
    for it in rows:
        if it is None:
            made.append((0, -1, []))
        else:
            made.append((-1 if it.generated else it.prompt.tokens[-1], it.computed, it.blocks))
    return made


def generated(model: Model, batch: list[Running]) -> list[Running]:
    """Keeps the tokens of a step, once it has run. Returns the requests that have all their tokens."""
    last = model.last.clone()
    for it in batch:
        it.generated.append(last[it.row])
        it.computed += 1
    return [it for it in batch if len(it.generated) == GENERATED]


def alone(args: argparse.Namespace, graphs: tuple[str, ...], asked: list[Prompt]) -> dict[str, Result]:
    """The results of one engine without kvferry."""
    model = Model(BATCH * TABLE + 1, args.device, getattr(torch, args.dtype))
    if model.is_cuda:
        model.capture(*graphs)
    results = {}

    def none(_: int) -> None: ...

    for first in range(0, len(asked), BATCH):
        batch = []
        for row, prompt in enumerate(asked[first : first + BATCH]):
            it = Running(prompt, None, list(range(1 + row * TABLE, 1 + (row + 1) * TABLE)), row)
            for chunk in chunks(len(prompt.tokens)):
                model.launch("prefill", [(prompt.tokens[at], at, it.blocks) for at in chunk], none, none)
            it.checksum = model.checksum(it.blocks[: table_of(len(prompt.tokens))], len(prompt.tokens))
            it.computed = len(prompt.tokens) - 1
            batch.append(it)
        rows: list[Running | None] = [*batch, *[None] * (BATCH - len(batch))]
        for _ in range(GENERATED):
            model.launch("decode", decode_rows(rows), none, none)
            generated(model, batch)
        results |= {it.prompt.id: it.result() for it in batch}
    return results


def serve(side: str, args: argparse.Namespace, case: Case, pipe: Any) -> None:
    """The process of an engine."""
    try:
        torch.set_num_threads(1)
        stream: Any = nullcontext()
        if args.device != "cpu":
            torch.cuda.set_device(args.device)
            if case.own_stream:
                stream = torch.cuda.stream(torch.cuda.Stream(args.device))
        with stream, torch.inference_mode():
            engine = Prefill(args, case) if side == "prefill" else Decode(args, case)
            if engine.model.is_cuda:
                engine.model.capture(*[it for it in case.graphs if it == side])
            pipe.send(engine.address)
            (serve_prefill if isinstance(engine, Prefill) else serve_decode)(engine, pipe)
            engine.close()
    except BaseException:
        pipe.send(RuntimeError(f"{side}: {traceback.format_exc()}"))


def serve_prefill(engine: Any, pipe: Any) -> None:
    is_last = False
    while not (is_last and engine.is_idle):
        while pipe.poll():
            prompt = pipe.recv()
            is_last = prompt is None
            if prompt is not None:
                engine.submit(prompt)
        if engine.running is None and not engine.waiting:
            time.sleep(0.0005)
        for told in engine.run():
            pipe.send(told)


def serve_decode(engine: Any, pipe: Any) -> None:
    asked: int | None = None
    while asked is None or len(engine.ended) < asked:
        while pipe.poll():
            message = pipe.recv()
            if isinstance(message, int):
                asked = message
            else:
                engine.submit(*message)
        if not any(engine.rows) and not engine.loaded:
            time.sleep(0.0005)
        engine.run()
    engine.model.synchronize()
    pipe.send({it.prompt.id: it.result() for it in engine.ended})


def hand_over(args: argparse.Namespace, case: Case, asked: list[Prompt]) -> dict[str, Result]:
    """Runs prefill and decode in processes of their own. Decode asks for half the requests while they are computed."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = {}, []
    for side in ("prefill", "decode"):
        pipes[side], theirs = context.Pipe()
        processes.append(context.Process(target=serve, args=(side, args, case, theirs), daemon=True))
        processes[-1].start()

    def receive(side: str) -> Any:
        if not pipes[side].poll(TIMEOUT * 2):
            raise TimeoutError(f"{side} is silent")
        message = pipes[side].recv()
        if isinstance(message, Exception):
            raise message
        return message

    try:
        address, _ = receive("prefill"), receive("decode")
        host, _, port = address.rpartition(":")
        early = {"do_remote_prefill": True, "remote_host": host.strip("[]"), "remote_port": int(port)}
        numbers = {it.id: at for at, it in enumerate(asked)}
        for prompt in [*asked, None]:
            pipes["prefill"].send(prompt)
        for _ in range(2 * len(asked)):
            what, request, params = receive("prefill")
            at = numbers[request]
            if what == "began" and at % 2:
                pipes["decode"].send((asked[at], {**early, "transfer_id": request}))
            elif what == "ended" and not at % 2:
                assert params is not None, f"{request} is not offered"
                pipes["decode"].send((asked[at], params))
        pipes["decode"].send(len(asked))
        results: dict[str, Result] = receive("decode")
        return results
    finally:
        for process in processes:
            process.join(10)
            process.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"])
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--delay", type=int, default=2_000_000, help="cycles that the stream waits in each step")
    parser.add_argument("--transports", nargs="+", default=["tcp", "local,tcp"], help="transports of each row's agents")
    parser.add_argument("--without-edges", action="store_true", help="only the row without edges")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds after which no further row begins")
    parser.add_argument("--out", type=Path, help="a folder for paged_engine.json")
    args = parser.parse_args()
    is_cuda = args.device != "cpu"
    args.dtype = args.dtype or ("bfloat16" if is_cuda else "float32")
    cases = [Case(transports) for transports in args.transports]
    if is_cuda:
        modes = [((), False), (("decode",), True), (("prefill", "decode"), True)]
        cases = [Case(case.transports, *mode) for case, mode in itertools.product(cases, modes)]
        without = Case(args.transports[0], edges=False)
        cases = [without] if args.without_edges else [*cases, without]
    asked = prompts(args.requests, args.seed)
    expected: dict[tuple[str, ...], dict[str, Result]] = {}
    rows: list[dict[str, Any]] = []
    name = torch.cuda.get_device_name(args.device) if is_cuda else "CPU"
    print(
        f"{name}, torch {torch.__version__}, {args.dtype}, {len(asked)} requests, {GENERATED} tokens each", flush=True
    )
    print(f"{'':<58} tokens differ  KV differs  loads failed  seconds", flush=True)
    ends = time.monotonic() + args.limit
    for case in cases:
        row: dict[str, Any] = {"case": case.name, "device": name, "requests": len(asked)}
        began = time.monotonic()
        try:
            if began > ends:
                raise TimeoutError(f"not begun within {args.limit} s")
            if case.graphs not in expected:
                with torch.inference_mode():
                    expected[case.graphs] = alone(args, case.graphs, asked)
            began = time.monotonic()
            row |= compare(hand_over(args, case, asked), expected[case.graphs])
            differs = row["tokens_differ"] + row["kv_differs"] > 0
            row["ok"] = (not differs and not row["failed"]) if case.edges else differs
        except Exception:
            # The other rows are run all the same.
            row |= {"error": traceback.format_exc(limit=-4), "ok": False}
        row["seconds"] = round(time.monotonic() - began, 2)
        rows.append(row)
        told = row.get("error") or (
            f"{row['tokens_differ']:>13} {row['kv_differs']:>11} {row['failed']:>13} {row['seconds']:>8}"
        )
        print(f"{case.name:<58}{told}  {'ok' if row['ok'] else 'WRONG'}", flush=True)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "paged_engine.json").write_text(json.dumps(rows, indent=1))
    return 0 if all(row["ok"] for row in rows) else 1


def compare(got: dict[str, Result], expected: dict[str, Result]) -> dict[str, int]:
    pairs = [(got[it], expected[it]) for it in expected]
    return {
        "tokens_differ": sum(one.tokens != other.tokens for one, other in pairs),
        "kv_differs": sum(one.checksum != other.checksum for one, other in pairs),
        "failed": sum(one.failed for one, _ in pairs),
    }


if __name__ == "__main__":
    sys.exit(main())
