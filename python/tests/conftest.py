"""Fixtures: agents in this process and in others."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import kvferry
import pytest
from fake_gpu import LIBRARY as FAKE_DRIVER
from kit import NEVER, OVER_TCP, Child
from kvferry._engine import identity

LOOPBACK = "127.0.0.1:0"

# A process looks for the CUDA driver once, whichever test makes it do so.
os.environ["KVFERRY_LIBCUDA"] = str(FAKE_DRIVER)

# A shell makes commands in the background ignore SIGINT, and child processes inherit that: the tests of Ctrl-C would hang.
# Child processes reset a signal that has a handler here.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _settings_come_from_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        kept = name in ("KVFERRY_CACHE", "KVFERRY_LIBCUDA")
        if (name.startswith(("KVFERRY_", "MC_")) and not kept) or name in ("HOST_IP", "POD_IP"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("KVFERRY_TRANSPORTS", OVER_TCP)
    monkeypatch.setenv("KVFERRY_SILENCE_MS", str(int(NEVER * 1000)))


@pytest.fixture(autouse=True)
def _models_are_older_than_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the tests are not: they would name nothing that another engine has."""
    monkeypatch.setattr(identity, "process_began", lambda: math.inf)


@pytest.fixture
def agent() -> Iterator[kvferry.Agent]:
    with kvferry.Agent("here", listen=LOOPBACK, silence=NEVER) as agent:
        yield agent


@pytest.fixture
def children() -> Iterator[Callable[..., Child]]:
    """Starts other processes, which end with the test."""
    with ExitStack() as stack:
        yield lambda *args, **kwargs: stack.enter_context(Child(*args, **kwargs))


TARGET = """
import kvferry
agent = kvferry.Agent("there", **{options})
memory = Memory({nbytes})
region = agent.register((memory.addr, memory.nbytes))
"""


class Target:
    """An agent in another process, with registered memory: by address, and as a region."""

    def __init__(self, child: Child, nbytes: int) -> None:
        self.child = child
        self.nbytes = nbytes
        self.address: str = child.run("agent.address")
        self.base: int = child.run("memory.addr")
        self.region = kvferry.RemoteRegion.from_bytes(child.run("region.remote().to_bytes()"))

    def bytes(self, at: int, nbytes: int) -> bytes:
        data: bytes = self.child.run(f"memory[{at}:{at + nbytes}]")
        return data


@pytest.fixture
def targets(children: Callable[..., Child]) -> Callable[..., Target]:
    """Starts agents in other processes."""

    def start(nbytes: int = 1 << 20, *, env: dict[str, str] | None = None, **options: object) -> Target:
        options = {"listen": LOOPBACK, "silence": NEVER} | options
        return Target(children(TARGET.format(options=options, nbytes=nbytes), env=env), nbytes)

    return start


@pytest.fixture
def target(targets: Callable[..., Target]) -> Target:
    return targets()
