"""What KVFerryConnector costs a step of the engine, through Python (`step.py`), beside the same in Rust."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from pathlib import Path
from typing import Any

from kvferry_e2e.client import HOST
from kvferry_e2e.environment import Environment
from kvferry_e2e.server import free_port
from kvferry_e2e.steps import Say

from kvferry_vllm_bench.rows import Row, at_most, shown

PART = "step, 256 live requests"
ROUNDS = 7
TIMES_RUST = 4
NOTHING_US = 20.0
HERE = Path(__file__).parent


def measure(environment: Environment, site: Path, command: Path, folder: Path, say: Say) -> list[Row]:
    say(f"step: in Rust, {command.name} bench handoff")
    rust = _rust(command)
    say("step: through Python")
    taken = _python(environment, site, folder)
    moving, nothing = (_medians(taken[name]) for name in ("moving", "nothing"))
    rows = [
        at_most(PART, "all moving, through Python", "µs", moving, TIMES_RUST * rust),
        Row(PART, "all moving, in Rust", "µs", "", rust, (rust, rust), None),
        at_most(PART, "nothing moving, through Python", "µs", nothing, NOTHING_US),
        shown(PART, "nothing moving, a connector that does nothing", "µs", _medians(taken["floor"])),
        shown(PART, "nothing moving, 20 ms between steps", "µs", _medians(taken["nothing_paused"])),
        shown(
            PART,
            "nothing moving, 20 ms between steps, a connector that does nothing",
            "µs",
            _medians(taken["floor_paused"]),
        ),
    ]
    for name, steps in (("all moving", taken["moving"]), ("nothing moving", taken["nothing"])):
        for at, part in enumerate(taken["parts"]):
            rows.append(shown(PART, f"{name}, {part}", "µs", _medians([[[one[at]] for one in some] for some in steps])))
    return rows


def _medians(rounds: list[list[list[float]]]) -> list[float]:
    """Of each round the median step, in microseconds."""
    return [statistics.median(1e6 * sum(step) for step in steps) for steps in rounds]


def _rust(command: Path) -> float:
    """The same step from Rust, where layers are computed at once, as on the CPU: microseconds."""
    arguments = [str(command), "bench", "handoff", "--only", "step", "--rounds", str(ROUNDS), "--json", "--quiet"]
    ran = subprocess.run(arguments, stdout=subprocess.PIPE, text=True, check=False)
    # It exits with 1 where a figure of its own falls short.
    if ran.returncode not in (0, 1) or not ran.stdout:
        raise RuntimeError(f"{' '.join(arguments)}: exit code {ran.returncode}")
    rows = {row["work"]: row["figures"][0]["median"] for row in json.loads(ran.stdout)["rows"]}
    (name,) = (work for work in rows if work.endswith("all moving, no device"))
    return float(rows[name])


def _python(environment: Environment, site: Path, folder: Path) -> dict[str, Any]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "KVFERRY_", "PYTHON"))}
    env = kept | {
        "PYTHONPATH": f"{HERE.parent}:{site}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": HOST,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(free_port()),
    }
    command = [str(environment.python), "-m", "kvferry_vllm_bench.step", str(environment.model), str(ROUNDS)]
    log = folder / "step.log"
    with open(log, "ab") as out:
        ran = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=out, text=True, check=False)
    if ran.returncode != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        raise RuntimeError(f"the step's bench failed; its log ends:\n{tail}")
    taken: dict[str, Any] = json.loads(ran.stdout)
    return taken
