"""File regions: memory to files and back."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import kvferry
import pytest
from conftest import LOOPBACK

KIB = 1024


@pytest.fixture(params=["auto", "posix"])
def agent(request: pytest.FixtureRequest) -> Iterator[kvferry.Agent]:
    with kvferry.Agent(listen=LOOPBACK, file_engine=request.param) as agent:
        yield agent


def one(local: kvferry.Region, file: kvferry.FileRegion, nbytes: int, at: int = 0) -> kvferry.Batch:
    batch = kvferry.Batch()
    batch.push(local, 0, file.remote(), at, nbytes)
    return batch


def test_blocks_go_to_a_file_and_come_back(agent: kvferry.Agent, tmp_path: Path) -> None:
    source, target = bytearray(os.urandom(64 * KIB)), bytearray(64 * KIB)
    file = agent.open_file(tmp_path / "kv", "rw", create=True, nbytes=64 * KIB)
    assert (file.path, file.nbytes) == (tmp_path / "kv", 64 * KIB)
    offsets = list(range(0, 64 * KIB, 4 * KIB))
    out, back = kvferry.Batch(), kvferry.Batch()
    out.extend_regions(agent.register(source), offsets, file.remote(), offsets[::-1], 4 * KIB)
    stats = agent.files.write(out)
    assert (stats.nbytes, stats.descriptors, stats.transport) == (64 * KIB, 16, "file")
    file.sync()
    back.extend_regions(agent.register(target), offsets, file.remote(), offsets[::-1], 4 * KIB)
    assert agent.files.read(back, timeout=30).nbytes == 64 * KIB
    assert target == source
    assert (tmp_path / "kv").read_bytes()[: 4 * KIB] == source[-4 * KIB :]


def test_the_engine_is_known_once_a_file_was_opened(agent: kvferry.Agent, tmp_path: Path) -> None:
    assert agent.files.engine is None
    agent.open_file(tmp_path / "kv", "rw", create=True, nbytes=1)
    wanted = agent.config["file_engine"]
    engine = agent.files.engine
    assert engine is not None
    assert engine.startswith("posix: ") if wanted == "posix" else engine.startswith(("uring", "posix: "))


def test_transfers_in_the_background_can_be_awaited(agent: kvferry.Agent, tmp_path: Path) -> None:
    file = agent.open_file(tmp_path / "kv", "rw", create=True, nbytes=1 << 20)
    source, target = bytearray(os.urandom(1 << 20)), bytearray(1 << 20)
    near, far = agent.register(source), agent.register(target)

    async def go() -> int:
        await agent.files.write_async(one(near, file, 1 << 20))
        return (await agent.files.read_async(one(far, file, 1 << 20))).nbytes

    assert asyncio.run(go()) == 1 << 20
    assert target == source


def test_errors_name_the_file(agent: kvferry.Agent, tmp_path: Path) -> None:
    with pytest.raises(kvferry.IoError, match="missing"):
        agent.open_file(tmp_path / "missing")
    (tmp_path / "short").write_bytes(b"x" * 100)
    short = agent.open_file(tmp_path / "short")
    region = agent.register(bytearray(100))
    with pytest.raises(kvferry.AccessDeniedError, match="short"):
        agent.files.write(one(region, short, 100))
    os.truncate(tmp_path / "short", 50)
    with pytest.raises(kvferry.IoError, match=r"the file ends before the range.*short"):
        agent.files.read(one(region, short, 100))
    short.close()
    with pytest.raises(kvferry.NotRegisteredError):
        agent.files.read(one(region, short, 10))


def test_a_full_device_raises_and_the_agent_lives(agent: kvferry.Agent, tmp_path: Path) -> None:
    region = agent.register(bytearray(4096))
    with open("/dev/full", "r+b", buffering=0) as full:
        device = agent.register_file(full.fileno(), "rw", nbytes=4096)
    with pytest.raises(kvferry.IoError, match=os.strerror(errno.ENOSPC)):
        agent.files.write(one(region, device, 4096))
    file = agent.open_file(tmp_path / "kv", "rw", create=True, nbytes=4096)
    assert agent.files.write(one(region, file, 4096)).nbytes == 4096


@pytest.mark.parametrize(
    "keywords",
    [
        {"access": "w"},
        {"access": "rw", "create": True},
        {"create": True, "nbytes": 8},
        {"offset": 8},
        {"direct": "yes"},
        {"nbytes": 0},
    ],
)
def test_wrong_arguments_are_refused(agent: kvferry.Agent, tmp_path: Path, keywords: dict[str, object]) -> None:
    (tmp_path / "kv").write_bytes(b"x" * 100)
    with pytest.raises(kvferry.InvalidArgumentError):
        agent.open_file(tmp_path / "kv", **keywords)  # type: ignore[arg-type]


def test_a_descriptor_that_is_none_is_refused(agent: kvferry.Agent) -> None:
    with pytest.raises(kvferry.InvalidArgumentError):
        agent.register_file(-1, nbytes=8)
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        agent.register_file(1_000_000, nbytes=8)
