"""A server of the test, under a supervisor: start it, wait for it, kill it."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from kvferry_e2e import supervisor
from kvferry_e2e.client import HOST, get
from kvferry_e2e.environment import Environment

READY_WITHIN_S = 300


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
    """The settings that all servers of a run share."""

    environment: Environment
    site: Path
    folder: Path
    scratch: Path
    engine_env: Mapping[str, str]

    @property
    def temporary(self) -> Path:
        """The servers' folder for temporary files. No model is beside them: one whose folders change while a server
        starts may be another one.
        """
        folder = self.scratch / "tmp"
        folder.mkdir(exist_ok=True)
        return folder


@dataclass(kw_only=True)
class Server(ABC):
    name: str
    setup: Setup
    port: int = field(default_factory=free_port)
    group: int = 0
    _supervisor: subprocess.Popen[str] | None = None
    _started: float = 0.0

    @abstractmethod
    def command(self) -> list[str]: ...

    @abstractmethod
    def environment(self) -> dict[str, str]: ...

    @property
    def log(self) -> Path:
        return self.setup.folder / f"{self.name}.log"

    def start(self) -> Self:
        command = [sys.executable, supervisor.__file__, str(self.log), *self.command()]
        self._started = time.monotonic()
        self._supervisor = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self.environment(),
            cwd=self.setup.folder,
            start_new_session=True,
        )
        assert self._supervisor.stdout is not None
        self.group = int(self._supervisor.stdout.readline())
        return self

    def is_ready(self) -> bool:
        with contextlib.suppress(OSError, RuntimeError):
            get(self.port, "/health", timeout_s=10)
            return True
        return False

    def wait_ready(self) -> float:
        """Waits until it serves. Returns the seconds since its start."""
        deadline = time.monotonic() + READY_WITHIN_S
        while time.monotonic() < deadline:
            if not self.alive():
                raise RuntimeError(f"{self.name} died while starting; its log ends:\n{self.log_tail()}")
            if self.is_ready():
                return time.monotonic() - self._started
            time.sleep(0.5)
        raise RuntimeError(f"{self.name} not ready in {READY_WITHIN_S} s; its log ends:\n{self.log_tail()}")

    def alive(self) -> bool:
        return self._supervisor is not None and self._supervisor.poll() is None

    def log_text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def log_tail(self, lines: int = 25) -> str:
        return "\n".join(self.log_text().splitlines()[-lines:])

    def log_has(self, pattern: str) -> bool:
        return re.search(pattern, self.log_text()) is not None

    def kill(self) -> tuple[float, float]:
        """SIGKILL to the whole server at once, as in a power failure.

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

    def pause(self) -> None:
        """SIGSTOP to all processes of the server."""
        os.killpg(self.group, signal.SIGSTOP)

    def resume(self) -> None:
        os.killpg(self.group, signal.SIGCONT)

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Inside the block, none of its processes runs (SIGSTOP)."""
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def ask_to_stop(self) -> None:
        """SIGTERM to the server's first process, as an operator does."""
        if self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.group, signal.SIGTERM)

    def stop(self, within_s: float = 60) -> None:
        """SIGTERM, and waits for the end. Raises `RuntimeError` if processes are left."""
        self.ask_to_stop()
        deadline = time.monotonic() + within_s
        while self.members():
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"{self.name} has not ended {within_s:.0f} s after SIGTERM: {self.members()} are left"
                )
            time.sleep(0.05)
        self.release()

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
