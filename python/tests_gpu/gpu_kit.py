"""The tools of the tests: memory, kernels that take a while, and agents in other processes."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kvferry
import pytest
import torch

KIB, MIB = 1 << 10, 1 << 20
#: A transfer that takes longer hangs.
PATIENCE = 60.0


def figure(text: str) -> None:
    """Prints a line for the summary of all tests."""
    print(f"FIGURE: {text}")


def filled(nbytes: int, value: int, device: str = "cuda") -> torch.Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8, device=device)


def pattern(nbytes: int, seed: int, device: str = "cuda") -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    tensor = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator, device=device)
    torch.cuda.synchronize()
    return tensor


def spin(milliseconds: float) -> None:
    """Keeps the current stream busy. A GPU's clock runs at one to two GHz."""
    torch.cuda._sleep(int(milliseconds * 1.5e6))


def whole(local: kvferry.Region, remote: kvferry.RemoteRegion, nbytes: int) -> kvferry.Batch:
    batch = kvferry.Batch()
    batch.push(local, 0, remote, 0, nbytes)
    return batch


def scattered(local: kvferry.Region, remote: kvferry.RemoteRegion, count: int, nbytes: int) -> kvferry.Batch:
    """A batch whose block `i` has place `2 * i` in the local region. The remote blocks are in reverse order."""
    batch = kvferry.Batch()
    here = [2 * i * nbytes for i in range(count)]
    there = [2 * i * nbytes for i in reversed(range(count))]
    batch.extend_regions(local, here, remote, there, nbytes)
    return batch


def moved(local: torch.Tensor, remote: torch.Tensor, count: int, nbytes: int) -> torch.Tensor:
    """The content of `remote` after `scattered` was written from `local`."""
    rows = remote.clone().view(-1, nbytes)
    rows[: 2 * count : 2] = local.view(-1, nbytes)[: 2 * count : 2].flip(0)
    return rows.view(-1)


def skip_unless_files_take(near: kvferry.Agent, folder: Path) -> None:
    """Skips a test where files take host memory only."""
    tensor = filled(4096, 1)
    file = near.open_file(folder / "probe", "rw", create=True, nbytes=4096)
    try:
        near.files.write(whole(near.register(tensor), file.remote(), 4096), after="host")
    except kvferry.UnsupportedError as error:
        pytest.skip(f"files: {error}")


class PeerProcess:
    """An agent in a process of its own, which has tensors on the GPU. A killed one answers nothing."""

    def __init__(self, transports: str, environment: dict[str, str] | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, transports, environment or {}), daemon=True)
        self.process.start()
        theirs.close()
        self.address: str = self._answer()

    def _answer(self) -> Any:
        assert self._pipe.poll(PATIENCE), "the other process does not answer"
        outcome, value = self._pipe.recv()
        assert outcome == "ok", value
        return value

    def call(self, name: str, *args: Any) -> Any:
        self._pipe.send((name, args))
        return self._answer()

    def region(self, nbytes: int, value: int, device: str = "cuda") -> kvferry.RemoteRegion:
        return kvferry.RemoteRegion.from_bytes(self.call("region", nbytes, value, device))

    def kill(self) -> None:
        self.process.kill()
        self.process.join(PATIENCE)


@contextmanager
def peer_process(transports: str, environment: dict[str, str] | None = None) -> Iterator[PeerProcess]:
    peer = PeerProcess(transports, environment)
    try:
        yield peer
    finally:
        peer.kill()


class _Served:
    """The calls that the other process serves, by name."""

    def __init__(self, transports: str) -> None:
        self.agent = kvferry.Agent("peer", listen="127.0.0.1:0", transports=transports)
        self.tensors: list[torch.Tensor] = []
        self.regions: list[kvferry.Region] = []
        self.nixl: Any = None

    def region(self, nbytes: int, value: int, device: str) -> bytes:
        self.tensors.append(filled(nbytes, value, device))
        torch.cuda.synchronize()
        self.regions.append(self.agent.register(self.tensors[-1]))
        return self.regions[-1].remote().to_bytes()

    def fill(self, index: int, value: int) -> None:
        self.tensors[index].fill_(value)
        torch.cuda.synchronize()

    def content(self, index: int) -> bytes:
        return bytes(self.tensors[index].cpu().numpy())

    def write_for_ever(self, index: int, address: str, remote: bytes, nbytes: int) -> None:
        """Starts many transfers, of which some run when the process is killed."""
        batch = whole(self.regions[index], kvferry.RemoteRegion.from_bytes(remote), nbytes)
        peer = self.agent.peer(address)
        peer.write(batch, after="host")
        self.running = [peer.write_async(batch, after="host") for _ in range(200)]

    def nixl_agent(self, nbytes: int, value: int) -> tuple[bytes, int]:
        from kvferry.nixl import nixl_agent, nixl_agent_config

        self.nixl = nixl_agent("there", nixl_agent_config())
        self.tensors.append(filled(nbytes, value))
        torch.cuda.synchronize()
        self.nixl.register_memory(self.tensors[-1])
        return self.nixl.get_agent_metadata(), self.tensors[-1].data_ptr()

    def notifications(self) -> Any:
        return self.nixl.get_new_notifs()


def serve(pipe: Any, transports: str, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    try:
        served = _Served(transports)
    except Exception as error:
        pipe.send(("error", repr(error)))
        return
    pipe.send(("ok", served.agent.address))
    while True:
        try:
            name, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send(("ok", getattr(served, name)(*args)))
        except Exception as error:
            pipe.send(("error", repr(error)))


def run_python(program: str, environment: dict[str, str] | None = None, seconds: float = 120.0) -> str:
    """Runs a program in a process of its own, and returns what it has printed."""
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
        cwd=os.path.dirname(__file__),
    )
    assert ran.returncode == 0, f"status {ran.returncode}: {ran.stdout[-2000:]}{ran.stderr[-3000:]}"
    return ran.stdout
