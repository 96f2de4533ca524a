"""Processes with a limit of time, whose children end with them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Ended:
    """The output of a process, and how the process ended."""

    output: str
    status: int
    seconds: float
    timed_out: bool

    @property
    def how(self) -> str:
        if self.timed_out:
            return f"did not end within {self.seconds:.0f} s"
        if self.status < 0:
            return f"was ended by {signal.Signals(-self.status).name}"
        return f"ended with status {self.status}"


def run(command: list[str], log: Path, limit: float, environment: dict[str, str] | None = None) -> Ended:
    """Runs a command that writes to `log`, for at most `limit` seconds. Its whole process group ends with it."""
    began = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
        timed_out = False
        try:
            process.wait(timeout=max(limit, 1))
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:
            _kill_group(process)
    seconds = time.monotonic() - began
    output = log.read_text(errors="replace")
    return Ended(output, process.returncode, seconds, timed_out)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
