"""The connectors alone: from the last layer computed to the request reported as received.

Two processes per connector call its objects as vLLM does (`half.py`), without a model and without HTTP. Those not in
turn are stopped. What is loaded is compared. In the sequential flow the time from prefill's answer to the decode's
request, which is this program's and vLLM's, does not count.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry_e2e.client import HOST, get, new_transfer_id
from kvferry_e2e.environment import Environment
from kvferry_e2e.instance import PLUG, Connector
from kvferry_e2e.prompts import Prompts
from kvferry_e2e.server import free_port
from kvferry_e2e.steps import Say

from kvferry_vllm_bench.first_token import LENGTHS, NIXL_PARAMS, SETTLE_S, Flow
from kvferry_vllm_bench.rows import Row, at_most, shown

PART = "last layer computed to reported received"
HALF_OF_BETTER = 0.5
HERE = Path(__file__).parent
# Time for a decode to tell its prefill what it wants, before the prefill computes.
AHEAD_S = 0.05
FLOWS: dict[Connector, Sequence[Flow]] = {
    "KVFerryConnector": ("concurrent", "sequential"),
    "MooncakeConnector": ("concurrent",),
    "NixlConnector": ("sequential",),
}


class Half:
    """A process of `half.py`."""

    def __init__(self, environment: Environment, connector: str, role: str, site: Path, log: Path) -> None:
        self.bootstrap = free_port()
        env = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "KVFERRY_", "MC_", "PYTHON"))}
        env |= {
            "PYTHONPATH": f"{HERE.parent}:{site}:{PLUG}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_HOST_IP": HOST,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "OMP_NUM_THREADS": "1",
            "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(self.bootstrap),
            "VLLM_NIXL_SIDE_CHANNEL_HOST": HOST,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.bootstrap),
        }
        if connector == "MooncakeConnector":
            env["KVFERRY_E2E_MOONCAKE"] = "1"
        command = [str(environment.python), "-m", "kvferry_vllm_bench.half", str(environment.model), connector, role]
        self._log = log
        with open(log, "ab") as out:
            self.process = subprocess.Popen(
                command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=out, text=True
            )

    def order(self, what: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-20:])
            raise RuntimeError(f"a process of the connectors' rows ended; its log ends:\n{tail}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


@dataclass
class Halves:
    connector: Connector
    prefill: Half
    decode: Half
    engine_id: str = ""

    def signal(self, number: int) -> None:
        for half in (self.prefill, self.decode):
            half.process.send_signal(number)

    def ready(self) -> None:
        for half in (self.prefill, self.decode):
            half.answer()
        if self.connector != "NixlConnector":
            self.engine_id = json.loads(get(self.prefill.bootstrap, "/query"))["0"]["engine_id"]

    def hand_over(self, flow: Flow, prompt: list[int]) -> float:
        """Milliseconds."""
        transfer = new_transfer_id()
        name = f"cmpl-{transfer}"
        self.decode.order({"name": f"{name}-d", "prompt": prompt})
        self.decode.answer()
        if flow == "concurrent":
            consumed = {
                "do_remote_decode": False,
                "do_remote_prefill": True,
                "remote_engine_id": self.engine_id,
                "remote_bootstrap_addr": f"http://{HOST}:{self.prefill.bootstrap}",
                "transfer_id": transfer,
            }
            self.decode.order(consumed)
            time.sleep(AHEAD_S)
            produced = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer}
            self.prefill.order({"name": f"{name}-p", "prompt": prompt, "params": produced})
            computed = self.prefill.answer()
        else:
            self.prefill.order({"name": f"{name}-p", "prompt": prompt, "params": NIXL_PARAMS})
            computed = self.prefill.answer()
            self.decode.order(computed["params"])
        received = self.decode.answer()
        if not received["right"]:
            raise RuntimeError(f"{self.connector} loaded other bytes than prefill has")
        self.prefill.answer()
        took: float = received["received"] - computed["computed"]
        if flow == "sequential":
            took -= received["arrived"] - computed["answered"]
        return 1e3 * took


def start(
    stack: ExitStack, environment: Environment, sites: Mapping[Connector, Path], folder: Path, say: Say
) -> list[Halves]:
    """Two processes for each connector, which import vLLM at the same time."""
    every = []
    for connector, site in sites.items():
        halves = []
        for role in ("prefill", "decode"):
            log = folder / f"spans-{connector}-{role}.log"
            halves.append(Half(environment, connector, role, site, log))
            stack.callback(halves[-1].close)
        every.append(Halves(connector, halves[0], halves[1]))
    for pair in every:
        pair.ready()
        say(f"the connectors alone: {pair.connector} is ready")
    return every


def measure(every: Sequence[Halves], rounds: int, prompts: Prompts, say: Say) -> list[Row]:
    """All are running at the beginning, and paused at the end.

    Raises `RuntimeError` if a load fails or brings wrong bytes.
    """
    chance = random.Random(2)
    times: dict[tuple[str, Flow, int], list[float]] = {}
    for done in range(-1, rounds):
        # The first round connects the engines, and does not count.
        for halves in chance.sample(list(every), len(every)):
            halves.signal(signal.SIGCONT)
            time.sleep(SETTLE_S)
            for flow in FLOWS[halves.connector]:
                halves.hand_over(flow, prompts.fresh(300))
                for length in LENGTHS:
                    took = halves.hand_over(flow, prompts.fresh(length))
                    if done >= 0:
                        times.setdefault((halves.connector, flow, length), []).append(took)
            halves.signal(signal.SIGSTOP)
        say(f"the connectors alone: round {done + 1} of {rounds}")
    return [row for length in LENGTHS for row in _rows(times, length)]


def _rows(times: dict[tuple[str, Flow, int], list[float]], length: int) -> list[Row]:
    ours = {flow: took for (name, flow, of), took in times.items() if of == length and name == "KVFerryConnector"}
    others = {
        (name, flow): took for (name, flow, of), took in times.items() if of == length and name != "KVFerryConnector"
    }
    (better, _), best = min(others.items(), key=lambda item: statistics.median(item[1]))
    rows = []
    for flow, took in ours.items():
        shares = [own / other for own, other in zip(took, best, strict=True)]
        what = f"{length} tokens, KVFerryConnector, {flow} flow"
        rows.append(at_most(PART, f"{what}, share of {better}'s", "", shares, HALF_OF_BETTER))
        rows.append(shown(PART, what, "ms", took))
    rows += [shown(PART, f"{length} tokens, {name}, {flow} flow", "ms", took) for (name, flow), took in others.items()]
    return rows
