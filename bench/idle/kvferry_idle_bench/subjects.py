"""The processes that are measured: python -m kvferry_idle_bench.subjects SUBJECT DIRECTORY [ADDRESS]"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

# Time after the work until a process counts as idle.
SETTLE_S = 3.0
PATIENCE_S = 60.0
TOKENS_PER_BLOCK = 16


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        if time.monotonic() > deadline:
            raise SystemExit("the work has not ended in time")
        time.sleep(0.01)


def say(answer: Any) -> None:
    print(json.dumps(answer), flush=True)


def serve(work: Callable[[], None] = lambda: None) -> None:
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        if command == "work":
            work()
            say(None)
        else:
            say(idle(*arguments))


def idle(seconds: float) -> tuple[float, float, int]:
    """Processor time in percent of a core, wake-ups per second, and the number of threads."""
    time.sleep(SETTLE_S)
    before, waits, began = time.process_time(), _waits(), time.monotonic()
    time.sleep(seconds)
    used, took = time.process_time() - before, time.monotonic() - began
    return 100 * used / took, (_waits() - waits) / took, len(os.listdir("/proc/self/task"))


def _waits() -> int:
    """Of threads that have ended, too."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw


# kvferry.connector.


class _Half:
    """A scheduler half and the worker half of its one rank, with a cache of one layer."""

    def __init__(self) -> None:
        from kvferry import Agent
        from kvferry.connector import SchedulerHalf, WorkerHalf

        self.agent = Agent(listen="127.0.0.1:0")
        self.region = self.agent.allocate(1 << 16)
        shape = {
            "role": "kv", "encoding": "float32", "bits": 32, "heads_total": 1, "head_start": 0, "heads": 1,
            "rows": TOKENS_PER_BLOCK, "content": 64, "block_stride": 1024, "kernel_blocks": 1, "kernel_stride": 1024,
            "head_stride": 64, "row_stride": 64,
        }  # fmt: skip
        layer = {"name": "layers.0", "group": 0, "planes": [{"shape": 0, "region": 0, "base": 0}]}
        group = {"name": "0", "kind": "full", "block_tokens": TOKENS_PER_BLOCK, "blocks": 64}
        regions = [{"id": self.region.id, "len": self.region.nbytes}]
        layout = {"v": 1, "regions": regions, "groups": [group], "shapes": [shape], "layers": [layer]}
        self.scheduler = SchedulerHalf([("full", 0, TOKENS_PER_BLOCK)], ranks=1, timeout=PATIENCE_S)
        self.worker = WorkerHalf(self.agent, json.dumps(layout), [self.region], rank=0, timeout=PATIENCE_S)
        self.scheduler.set_ranks([self.worker.card])
        self.received: list[str] = []

    def step(self, *scheduled: Any) -> None:
        self.worker.apply(self.scheduler.step(scheduled, []))
        self.worker.fetch()
        self.worker.layer_computed(0)
        self.worker.step_computed()
        sent, received, _, notes = self.worker.reports()
        if notes is not None:
            self.scheduler.reported(0, notes)
        self.scheduler.sent(sent)
        self.scheduler.received(received)
        self.received += received


def halves() -> None:
    """Two engines in this process, of which one has fetched a prompt of the other."""
    from kvferry.connector import prompt_id

    prefill, decode = _Half(), _Half()
    prompt, blocks = list(range(40)), [1, 2, 3]
    identity, params = prompt_id(prompt), {"do_remote_decode": True}
    prefill.scheduler.arrived("p", len(prompt), 1, params, identity)
    prefill.step(("p", 0, len(prompt), True, [blocks]))
    _, answer = prefill.scheduler.finished("p", "length", [blocks]) or (False, None)
    decode.scheduler.arrived("d", len(prompt), 8, answer, identity)
    matched = decode.scheduler.matched("d", 0)
    decode.scheduler.allocated("d", matched or 0, [blocks])

    def has_arrived() -> bool:
        decode.step()
        return bool(decode.received)

    until(has_arrived)
    decode.scheduler.finished("d", "length", None)

    def is_given_back() -> bool:
        prefill.step()
        decode.step()
        return not prefill.scheduler.has_pending_work() and not decode.scheduler.has_pending_work()

    until(is_given_back)
    say(None)
    serve()


# kvferry.nixl.

_BYTES = 1 << 20


def _nixl(name: str) -> tuple[Any, Any]:
    from kvferry.nixl import nixl_agent, nixl_agent_config

    agent = nixl_agent(name, nixl_agent_config(True, True, 0))
    memory = (ctypes.c_char * _BYTES)()
    agent.register_memory([(ctypes.addressof(memory), _BYTES, 0, "")], "DRAM")
    return agent, memory


def nixl_peer() -> None:
    agent, memory = _nixl("peer")
    say([agent.get_agent_metadata().hex(), ctypes.addressof(memory)])
    sys.stdin.read()


def nixl() -> None:
    """Has read once from an agent of another process."""
    agent, memory = _nixl("idle")
    command = [sys.executable, "-m", "kvferry_idle_bench.subjects", "nixl_peer", ""]
    peer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert peer.stdout is not None
    metadata, address = json.loads(peer.stdout.readline())
    agent.add_remote_agent(bytes.fromhex(metadata))
    here = agent.get_xfer_descs([(ctypes.addressof(memory), _BYTES, 0)], "DRAM")
    there = agent.get_xfer_descs([(address, _BYTES, 0)], "DRAM")
    handle = agent.initialize_xfer("READ", here, there, "peer")
    agent.transfer(handle)
    until(lambda: agent.check_xfer_state(handle) == "DONE")
    say(None)
    serve()


# kvferry.vllm, with stand-ins of vLLM's classes.


class _Vllm:
    """The two connectors of an engine of one rank, with a cache of one layer in host memory."""

    def __init__(self, module: Any, *, is_kv_producer: bool) -> None:
        import vllm_stand_in

        spec = type("FullAttentionSpec", (), {"block_size": TOKENS_PER_BLOCK, "dtype": "torch.float32"})
        blocks, content = 16, 64
        caches = vllm_stand_in.caches(spec(), num_blocks=blocks)
        caches.transfer_group_index_by_layer = {"0": 0}
        config = vllm_stand_in.config(is_kv_producer=is_kv_producer, prefill_context_parallel_size=1)
        config.kv_transfer_config.kv_connector_extra_config = {"timeout": PATIENCE_S}
        role = module.KVConnectorRole
        self.worker, self.scheduler = (
            module.KVFerryConnector(config, it, caches) for it in (role.WORKER, role.SCHEDULER)
        )
        nbytes = blocks * TOKENS_PER_BLOCK * content * 4
        self._memory = (ctypes.c_char * nbytes)()
        at = ctypes.addressof(self._memory)
        strides = (TOKENS_PER_BLOCK * content, TOKENS_PER_BLOCK * content, content, 1)
        cache = SimpleNamespace(
            device=SimpleNamespace(type="cpu", index=None),
            shape=(blocks, 1, TOKENS_PER_BLOCK, content),
            dim=lambda: 4,
            stride=lambda axis: strides[axis],
            element_size=lambda: 4,
            data_ptr=lambda: at,
            untyped_storage=lambda: SimpleNamespace(data_ptr=lambda: at, nbytes=lambda: nbytes),
        )
        self.worker.register_kv_caches({"0": cache})
        self.scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): self.worker.get_handshake_metadata()})

    def step(self, *new: tuple[str, int, list[int]]) -> Any:
        """A step of new requests, each with its tokens and blocks. Returns what it has ended."""
        output = SimpleNamespace(
            num_scheduled_tokens={request: tokens for request, tokens, _ in new},
            scheduled_new_reqs=[
                SimpleNamespace(req_id=request, block_ids=(blocks,), num_computed_tokens=0)
                for request, _, blocks in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[], new_block_ids=[], resumed_req_ids=set(), num_computed_tokens=[]
            ),
            preempted_req_ids=set(),
        )
        self.worker.bind_connector_metadata(self.scheduler.build_connector_meta(output))
        self.worker.start_load_kv(None)
        self.worker.save_kv_layer("0", None, None)
        self.worker.wait_for_save()
        results = self.worker.get_transfer_results(set())
        results.kv_connector_worker_meta = self.worker.build_connector_worker_meta()
        self.worker.clear_connector_metadata()
        self.scheduler.update_connector_output(results)
        return results


def vllm() -> None:
    """Two engines in this process, of which one has loaded a prompt of the other. Routers find the other one."""
    import vllm_stand_in

    os.environ["VLLM_MOONCAKE_BOOTSTRAP_PORT"] = "0"
    patch: Any = SimpleNamespace(setitem=dict.__setitem__, delitem=dict.__delitem__)
    vllm_stand_in.install(patch)
    layout: Any = importlib.import_module("kvferry.vllm._layout")
    layout.processor = lambda *_: "made up"
    module: Any = importlib.import_module("kvferry.vllm._connector")
    module.check_connector = lambda: None
    module.of_vllm = lambda *_: SimpleNamespace(properties=lambda: {"model": "made-up"})
    module._place = lambda _: (module.Place(), 0)
    prefill, decode = _Vllm(module, is_kv_producer=True), _Vllm(module, is_kv_producer=False)
    prompt, blocks = list(range(40)), [1, 2, 3]
    first = vllm_stand_in.Request("p", {"do_remote_decode": True}, prompt)
    prefill.scheduler.on_new_request(first)
    prefill.step(("p", len(prompt), blocks))
    _, params = prefill.scheduler.request_finished(first, blocks)
    second = vllm_stand_in.Request("d", params, prompt, max_tokens=4)
    decode.scheduler.on_new_request(second)
    tokens, _ = decode.scheduler.get_num_new_matched_tokens(second, 0)
    given = SimpleNamespace(get_block_ids=lambda: (blocks,))
    decode.scheduler.update_state_after_alloc(second, given, tokens)

    def has_arrived() -> bool:
        results = decode.step()
        if results.failed_recving:
            raise SystemExit("the prompt was not loaded")
        return bool(results.finished_recving)

    until(has_arrived)
    decode.scheduler.request_finished(second, blocks)

    def is_given_back() -> bool:
        decode.step()
        return bool(prefill.step().finished_sending)

    until(is_given_back)
    say(None)
    serve()


# kvferry.trtllm, with TensorRT-LLM's side restated.


def _trtllm(directory: str, **settings: Any) -> tuple[Any, Any]:
    given = {"disk": directory, "disk_gib": 0.0625, "staging_gib": 1 / 64, "handoff_gib": 1 / 64, "load_wait": 20}
    for name, value in {**given, **settings}.items():
        os.environ["TLLM_KVFERRY_" + name.upper()] = str(value)
    from kvferry.trtllm import KVFerryConnectorScheduler, KVFerryConnectorWorker
    from trtllm_reference import Cache, Engine, Manager, Shape

    cache = SimpleNamespace(tokens_per_block=TOKENS_PER_BLOCK, dtype="auto")
    arguments = SimpleNamespace(model="made-up", load_format="dummy", revision="1", kv_cache_config=cache)
    worker = KVFerryConnectorWorker(arguments)
    scheduler = KVFerryConnectorScheduler(arguments)
    pages = Cache(Shape(blocks=64, tokens_per_block=TOKENS_PER_BLOCK))
    worker.register_kv_caches(pages.tensors[0])
    return worker, Engine(pages, Manager(worker, scheduler))


def _serve_prompt(engine: Any, tokens: int) -> Any:
    from trtllm_reference import Request

    (ended,) = engine.run([Request(1, [at * 31 % 50_000 for at in range(200)], tokens)])
    return ended


def trtllm(directory: str) -> None:
    """Has stored a prompt."""
    _, engine = _trtllm(directory)
    _serve_prompt(engine, 4)
    say(None)
    serve()


def prefill(directory: str) -> None:
    """Prefills a prompt once the engine that decodes is known."""
    worker, engine = _trtllm(directory, handoff="prefill", listen="127.0.0.1:0")
    handoff = worker._local.handoff
    say(handoff.address)

    def work() -> None:
        until(lambda: bool(handoff.followers))
        _serve_prompt(engine, 1)

    serve(work)


def decode(directory: str, address: str) -> None:
    """Decodes the prompt that was prefilled."""
    _, engine = _trtllm(directory, handoff="decode", prefill=address)
    say(None)

    def work() -> None:
        ended = _serve_prompt(engine, 4)
        if ended.computed_tokens >= TOKENS_PER_BLOCK:
            raise SystemExit(f"{ended.computed_tokens} tokens were computed: nothing was handed over")

    serve(work)


if __name__ == "__main__":
    subject, *arguments = sys.argv[1:]
    if subject in ("nixl", "nixl_peer", "halves", "vllm"):
        arguments = []
    made: dict[str, Callable[..., None]] = {
        "halves": halves,
        "vllm": vllm,
        "nixl": nixl,
        "nixl_peer": nixl_peer,
        "trtllm": trtllm,
        "prefill": prefill,
        "decode": decode,
    }
    made[subject](*arguments)
