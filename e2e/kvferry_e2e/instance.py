"""One vLLM server: start it, wait for it, kill it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from kvferry_e2e import supervisor
from kvferry_e2e.client import HOST, MODEL, Counters, get
from kvferry_e2e.environment import Environment
from kvferry_e2e.records import Records

Role = Literal["prefill", "decode"]
READY_WITHIN_S = 300
# The connector's own time-out, lowered from its 480 s. A prefill keeps unsent blocks and waits for
# its own computation that long; a decode waits 60 s longer for a silent prefill
# (`receive_kv_from_single_worker`).
ABORT_TIMEOUT_S = 10
DECODE_WAIT_S = ABORT_TIMEOUT_S + 60
PLUG = Path(__file__).parent.parent / "plug"


def free_port() -> int:
    """A free port below the ephemeral range. Instances bind their ports half a minute after their
    start; until then no client socket gets such a port.
    """
    while True:
        port = random.randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind((HOST, port))
            return port


@dataclass(frozen=True)
class Setup:
    """The settings that all instances of a run share."""

    environment: Environment
    site: Path
    folder: Path
    scratch: Path
    engine_env: Mapping[str, str]


@dataclass
class Instance:
    name: str
    role: Role
    setup: Setup
    prefix_caching: bool
    env: Mapping[str, str] = field(default_factory=dict)
    port: int = field(default_factory=free_port)
    bootstrap: int = field(default_factory=free_port)
    group: int = 0
    _supervisor: subprocess.Popen[str] | None = None
    _started: float = 0.0

    @property
    def log(self) -> Path:
        return self.setup.folder / f"{self.name}.log"

    @property
    def records(self) -> Records:
        return Records(self.setup.folder / self.name)

    def start(self) -> Instance:
        self.records.folder.mkdir(parents=True)
        command = [sys.executable, supervisor.__file__, str(self.log), *self._command()]
        self._started = time.monotonic()
        self._supervisor = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self._environment(),
            cwd=self.setup.folder,
            start_new_session=True,
        )
        assert self._supervisor.stdout is not None
        self.group = int(self._supervisor.stdout.readline())
        return self

    def _command(self) -> list[str]:
        connector = {
            "kv_connector": "MooncakeConnector",
            "kv_role": "kv_producer" if self.role == "prefill" else "kv_consumer",
            "kv_connector_extra_config": {"mooncake_protocol": "tcp"},
        }
        options = {
            "--model": str(self.setup.environment.model),
            "--served-model-name": MODEL,
            # The kernel for bfloat16 crashes on virtual machines without AMX tiles.
            "--dtype": "float32",
            "--max-model-len": "2048",
            "--host": HOST,
            "--port": str(self.port),
            "--kv-transfer-config": json.dumps(connector),
        }
        flags = [
            "--enforce-eager",
            "--enable-prefix-caching" if self.prefix_caching else "--no-enable-prefix-caching",
        ]
        server = [str(self.setup.environment.python), "-m", "vllm.entrypoints.openai.api_server"]
        return server + [word for option in options.items() for word in option] + flags

    def _environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "KVFERRY_", "MC_", "PYTHON"))}
        cores = sorted(os.sched_getaffinity(0))
        core = cores[0] if self.role == "prefill" else cores[-1]
        return {
            **kept,
            "PYTHONPATH": f"{PLUG}:{self.setup.site}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONUNBUFFERED": "1",
            "KVFERRY_E2E_RECORD": str(self.records.folder),
            # Killed servers leave sockets and files behind; here they are removed with the run.
            "TMPDIR": str(self.setup.scratch),
            "VLLM_RPC_BASE_PATH": str(self.setup.scratch),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CACHE_ROOT": str(self.setup.folder / "vllm-cache"),
            "VLLM_CONFIG_ROOT": str(self.setup.folder / "vllm-config"),
            "VLLM_HOST_IP": HOST,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": str(core),
            "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(self.bootstrap),
            "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": str(ABORT_TIMEOUT_S),
            **self.setup.engine_env,
            **self.env,
        }

    def wait_ready(self) -> float:
        """Waits until it serves. Returns the seconds since its start."""
        deadline = time.monotonic() + READY_WITHIN_S
        while time.monotonic() < deadline:
            if not self.alive():
                raise RuntimeError(f"{self.name} died while starting; its log ends:\n{self.log_tail()}")
            with contextlib.suppress(OSError, RuntimeError):
                get(self.port, "/health", timeout_s=10)
                return time.monotonic() - self._started
            time.sleep(0.5)
        raise RuntimeError(f"{self.name} not ready in {READY_WITHIN_S} s; its log ends:\n{self.log_tail()}")

    def alive(self) -> bool:
        return self._supervisor is not None and self._supervisor.poll() is None

    def counters(self) -> Counters:
        return Counters.of(self.port)

    def log_text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def log_tail(self, lines: int = 25) -> str:
        return "\n".join(self.log_text().splitlines()[-lines:])

    def log_has(self, pattern: str) -> bool:
        return re.search(pattern, self.log_text()) is not None

    def kill(self) -> tuple[float, float]:
        """SIGKILL to the whole instance at once, as in a power failure.

        Returns when it was sent and when the last process was gone. A kernel that frees gigabytes
        closes the connections of a dead process late, and no peer can notice the death before that.
        """
        sent = time.time()
        if self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.group, signal.SIGKILL)
            deadline = time.monotonic() + 60
            while self.members() and time.monotonic() < deadline:
                time.sleep(0.01)
        gone = time.time()
        self.release()
        return sent, gone

    def ask_to_stop(self) -> None:
        """SIGTERM to the server's first process, as an operator does."""
        if self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.group, signal.SIGTERM)

    def members(self) -> list[int]:
        return supervisor.group_members(self.group)

    def release(self) -> None:
        """Ends the supervisor, which kills the remaining processes and removes their shared memory."""
        if self._supervisor is None:
            return
        assert self._supervisor.stdin is not None
        with contextlib.suppress(OSError):
            self._supervisor.stdin.close()
        self._supervisor.wait()
