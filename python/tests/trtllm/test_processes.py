"""Ranks as processes, as TensorRT-LLM spawns them: settings by variables, and staging memory that they share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

import pytest
from trtllm_kit import prompt, reference
from trtllm_reference import Request

RANK = """
    import json, sys
    from multiprocessing.connection import Client
    import trtllm_kit
    from kvferry.trtllm import KVFerryConnectorScheduler, KVFerryConnectorWorker
    from trtllm_reference import Cache, Engine, Manager, Request, Shape, here

    address, rank, ranks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    hub = Client(address)
    hub.send(rank)

    class Far:
        def gather(self, value):
            hub.send(value)
            return hub.recv()

    here.ranks, here.rank = Far(), rank
    sys.modules["tensorrt_llm._utils"] = trtllm_kit._utilities()
    made = trtllm_kit.args(rank, ranks)
    worker = KVFerryConnectorWorker(made)
    scheduler = KVFerryConnectorScheduler(made) if rank == 0 else None
    cache = Cache(Shape())
    worker.register_kv_caches(cache.tensors[0])
    engine = Engine(cache, Manager(worker, scheduler), rank=rank)
    ended = engine.run([Request(at, trtllm_kit.prompt(41, at)) for at in range(3)])
    print(json.dumps([[it.computed_tokens, it.generated] for it in ended]))
"""


def serve(folder: Path, ranks: int, **settings: str) -> list[Any]:
    """What rank 0 says."""
    tests = str(Path(__file__).parents[1])
    # Only such variables reach ranks that TensorRT-LLM spawns.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("KVFERRY_")}
    inherited["PYTHONPATH"] = os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")])
    own = {"DISK": str(folder / "kv"), "DISK_GIB": "0.0625", "LOAD_WAIT": "60"}
    environment = inherited | {"TLLM_KVFERRY_" + name: value for name, value in own.items()} | settings
    with Listener(str(folder / f"hub-{os.urandom(4).hex()}"), "AF_UNIX") as listener:
        started = [
            subprocess.Popen(
                [sys.executable, "-c", textwrap.dedent(RANK), str(listener.address), str(rank), str(ranks)],
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        try:
            found = [listener.accept() for _ in range(ranks)]
            by_rank = dict(sorted((connection.recv(), connection) for connection in found))
            try:
                while True:
                    values = [connection.recv() for connection in by_rank.values()]
                    for connection in by_rank.values():
                        connection.send(values)
            except EOFError:
                # All ranks end after the same exchange.
                pass
            said = [it.communicate(timeout=60)[0] for it in started]
            assert [it.returncode for it in started] == [0] * ranks
        finally:
            for it in started:
                it.kill()
                it.wait()
    made: list[Any] = json.loads(said[0])
    return made


@pytest.mark.parametrize("load", ["sync", "async"])
def test_ranks_in_processes_of_their_own_load_all_full_blocks(tmp_path: Path, load: str) -> None:
    expected = reference([Request(at, prompt(41, at)) for at in range(3)], tp=2)
    first = serve(tmp_path, 2, TLLM_KVFERRY_LOAD=load)
    second = serve(tmp_path, 2, TLLM_KVFERRY_LOAD=load)
    assert first == [[41, it] for it in expected]
    assert second == [[1, it] for it in expected]
