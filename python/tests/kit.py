"""Helpers of the tests: other processes, memory, waiting."""

from __future__ import annotations

import ast
import base64
import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from child import Memory

__all__ = [
    "NEVER",
    "OVER_TCP",
    "PATIENCE",
    "Child",
    "ChildError",
    "Memory",
    "eventually",
    "kept_port",
    "remove",
    "run_python",
    "ticks_during",
]

HERE = Path(__file__).parent
PATIENCE = 60.0
# A silence limit that no test reaches: a loaded machine stops a process for seconds.
NEVER = 600.0

# Most tests cut peers off, stop them and wait for them. Copies within one host do not involve the peer; test_local.py
# tests them.
OVER_TCP = "tcp,mooncake"


# CPython 3.11 raises SystemError where several threads parse at once.
_PARSING = threading.Lock()


class ChildError(Exception):
    """The statements raised in the child."""

    def __init__(self, kind: str, message: str, seconds: float) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.seconds = seconds


def clean_environment(**extra: str) -> dict[str, str]:
    """The environment without settings of kvferry, Mooncake or the host's address, and with the transports of the tests and
    a silence limit that no test reaches.
    """
    mine = {
        k: v for k, v in os.environ.items() if not k.startswith(("KVFERRY_", "MC_")) and k not in ("HOST_IP", "POD_IP")
    }
    return mine | {"KVFERRY_TRANSPORTS": OVER_TCP, "KVFERRY_SILENCE_MS": str(int(NEVER * 1000))} | extra


class Child:
    """Another Python process. `run` executes statements there and returns the value of the last one. Statements call
    `begun` where a test waits for them with `has_begun`.
    """

    def __init__(
        self, setup: str = "", *, python: str = sys.executable, env: dict[str, str] | None = None, quiet: bool = False
    ) -> None:
        self.process = subprocess.Popen(
            [python, str(HERE / "child.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if quiet else subprocess.PIPE,
            env=clean_environment(**(env or {})),
            # Ctrl-C in the terminal is for pytest only.
            start_new_session=True,
        )
        self._buffer = bytearray()
        self._errors = b""
        self.pid = self.result()
        if setup:
            self.run(setup)

    def start(self, code: str) -> None:
        """Starts statements without waiting for their end."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(textwrap.dedent(code)).encode() + b"\n")
        self.process.stdin.flush()

    def result(self, patience: float = PATIENCE) -> Any:
        """The result of the statements started last."""
        answer = self._answer(patience)
        self.seconds = answer.get("seconds", 0.0)
        if "error" in answer:
            raise ChildError(answer["error"], answer["message"], self.seconds)
        if "bytes" in answer:
            return base64.b64decode(answer["bytes"])
        try:
            with _PARSING:
                return ast.literal_eval(answer["value"])
        except (SyntaxError, ValueError):
            return answer["value"]

    def run(self, code: str, patience: float = PATIENCE) -> Any:
        self.start(code)
        return self.result(patience)

    def has_begun(self) -> None:
        """Waits until the statements started last have called `begun`."""
        line = self._line(PATIENCE)
        assert line == {"begun": True}, line

    def _answer(self, patience: float) -> dict[str, Any]:
        until = time.monotonic() + patience
        while "begun" in (line := self._line(until - time.monotonic())):
            continue
        return line

    def _line(self, patience: float) -> dict[str, Any]:
        out, err = self.process.stdout, self.process.stderr
        assert out is not None
        until = time.monotonic() + patience
        open_ends = [end for end in (out, err) if end is not None]
        while b"\n" not in self._buffer:
            left = until - time.monotonic()
            ready = select.select(open_ends, [], [], max(left, 0))[0]
            if not ready:
                raise TimeoutError(f"the child has not answered within {patience} s; stderr: {self._errors.decode()}")
            for end in ready:
                data = os.read(end.fileno(), 1 << 16)
                if end is out:
                    self._buffer += data
                    if not data:
                        raise EOFError(f"the child is gone ({self.process.wait()}); stderr: {self._errors.decode()}")
                elif data:
                    self._errors += data
                else:
                    open_ends.remove(end)
        line, rest = bytes(self._buffer).split(b"\n", 1)
        self._buffer = bytearray(rest)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)
        if number is signal.SIGSTOP:
            # The signal takes effect asynchronously, in each thread for itself.
            eventually(self._is_stopped)

    def _is_stopped(self) -> bool:
        try:
            stats = [stat.read_text() for stat in Path(f"/proc/{self.process.pid}/task").glob("*/stat")]
        except (FileNotFoundError, ProcessLookupError):
            return False  # a thread has ended meanwhile
        return bool(stats) and all(stat.rsplit(")", 1)[1].split()[0] == "T" for stat in stats)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def finish(self, patience: float = PATIENCE) -> tuple[int, str]:
        """Ends the child by end of input. Returns its exit status and all that it wrote to stderr."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(patience)
        rest = self.process.stderr.read() if self.process.stderr is not None else b""
        return self.process.returncode, (self._errors + rest).decode()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for end in (self.process.stdin, self.process.stdout, self.process.stderr):
            if end is not None:
                with contextlib.suppress(BrokenPipeError):
                    end.close()


def eventually(condition: Callable[[], Any], patience: float = PATIENCE, what: str = "it") -> Any:
    """Waits until something is true, and returns it."""
    until = time.monotonic() + patience
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < until, f"{what} did not happen within {patience} s"
        time.sleep(0.005)


def remove(folder: Path) -> None:
    """Removes a folder with all that is in it. A thread that still writes there may make a file meanwhile."""

    def is_gone() -> bool:
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)
        return not folder.exists()

    eventually(is_gone, what=f"the removal of {folder}")


def ticks_during(call: Callable[[], object]) -> int:
    """How often another thread runs meanwhile, which does so each millisecond. Three times show that the call lets other
    threads run; on a busy machine it takes several calls to see it.
    """
    ticks: list[float] = []
    stop = threading.Event()

    def tick() -> None:
        while not stop.wait(0.001):
            ticks.append(time.monotonic())

    thread = threading.Thread(target=tick)
    thread.start()
    began = time.monotonic()
    call()
    ended = time.monotonic()
    stop.set()
    thread.join()
    return sum(began < at < ended for at in ticks)


@contextlib.contextmanager
def kept_port() -> Iterator[str]:
    """The address of a port at which servers listen, one after another. The kernel gives it to no other socket, also between
    two of them.
    """
    with socket.socket() as bound:
        # Sockets that listen may share an address with one that has the option, too, and does not listen.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


def run_python(
    code: str, *, env: dict[str, str] | None = None, python: str = sys.executable
) -> subprocess.CompletedProcess[str]:
    """Runs a program in a new interpreter and waits for its end."""
    return subprocess.run(
        [python, "-c", textwrap.dedent(code)],
        env=clean_environment(**(env or {})),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
