"""Bytes arrive between GPUs, the host and files, in one process and in two."""

from __future__ import annotations

from pathlib import Path

import kvferry
import pytest
import torch
from gpu_kit import KIB, MIB, filled, moved, pattern, peer_process, scattered, skip_unless_files_take, whole

SHAPES = [(1, 3), (7, 1), (1000, 64), (300, 4 * KIB), (64, 256 * KIB), (5, 5 * MIB)]


@pytest.mark.parametrize(("count", "nbytes"), SHAPES)
def test_scattered_blocks_from_gpu_to_gpu(near: kvferry.Agent, far: kvferry.Agent, count: int, nbytes: int) -> None:
    mine, theirs = pattern(2 * count * nbytes, 1), pattern(2 * count * nbytes, 2)
    expected = moved(mine, theirs, count, nbytes)
    batch = scattered(near.register(mine), far.register(theirs).remote(), count, nbytes)
    torch.cuda.synchronize()
    near.peer(far.address).write(batch, after="host")
    assert torch.equal(theirs, expected)
    mine.zero_()
    near.peer(far.address).read(batch, after=torch.cuda.current_stream())
    back = mine.view(-1, nbytes)[: 2 * count : 2].flip(0)
    assert torch.equal(back, theirs.view(-1, nbytes)[: 2 * count : 2])
    assert int(mine.view(-1, nbytes)[1 : 2 * count : 2].sum()) == 0


@pytest.mark.parametrize(("count", "nbytes"), SHAPES)
def test_two_processes(transports: str, near: kvferry.Agent, count: int, nbytes: int) -> None:
    with peer_process(transports) as other:
        total = 2 * count * nbytes
        mine, remote = pattern(total, 1), other.region(total, 9)
        region = near.register(mine)
        expected = moved(mine, filled(total, 9), count, nbytes)
        batch = scattered(region, remote, count, nbytes)
        stats = near.peer(other.address).write(batch, after=torch.cuda.current_stream())
        assert stats.nbytes == count * nbytes
        assert other.call("content", 0) == bytes(expected.cpu().numpy())
        other.call("fill", 0, 77)
        near.peer(other.address).read(batch, after=torch.cuda.current_stream())
        assert bool((mine.view(-1, nbytes)[: 2 * count : 2] == 77).all())


def test_host_and_gpu_in_one_batch(near: kvferry.Agent, far: kvferry.Agent) -> None:
    part = 96 * KIB
    gpu, host = pattern(8 * part, 1), pattern(8 * part, 2, "cpu")
    to = bytearray(16 * part)
    regions, remote = [near.register(gpu), near.register(host)], far.register(to).remote()
    batch = kvferry.Batch()
    for i in range(16):
        batch.push(regions[i % 2], i // 2 * part, remote, i * part, part)
    near.peer(far.address).write(batch, after="host")
    expected = torch.stack([gpu.cpu().view(8, -1), host.view(8, -1)], 1)
    assert bytes(to) == bytes(expected.reshape(-1).numpy())


def test_a_large_transfer_both_ways_at_once(near: kvferry.Agent, far: kvferry.Agent) -> None:
    nbytes = 256 * MIB
    mine, theirs = pattern(nbytes, 1), pattern(nbytes, 2)
    to, source = filled(nbytes, 0), filled(nbytes, 0)
    torch.cuda.synchronize()
    there, back = far.register(to).remote(), far.register(theirs).remote()
    peer = near.peer(far.address)
    out = peer.write_async(whole(near.register(mine), there, nbytes), after="host")
    into = peer.read_async(whole(near.register(source), back, nbytes), after="host")
    assert out.wait(60) is not None
    assert into.wait(60) is not None
    assert torch.equal(to, mine)
    assert torch.equal(source, theirs)


@pytest.mark.parametrize(("count", "nbytes"), SHAPES)
@pytest.mark.parametrize("transports", ["tcp"])
def test_files(near: kvferry.Agent, tmp_path: Path, count: int, nbytes: int) -> None:
    skip_unless_files_take(near, tmp_path)
    total = 2 * count * nbytes
    mine = pattern(total, 1)
    before = mine.clone()
    file = near.open_file(tmp_path / "kv", "rw", create=True, nbytes=total)
    batch = scattered(near.register(mine), file.remote(), count, nbytes)
    near.files.write(batch, after=torch.cuda.current_stream())
    held = (tmp_path / "kv").read_bytes().ljust(total, b"\0")
    expected = moved(before, filled(total, 0), count, nbytes)
    assert held[: len(held)] == bytes(expected.cpu().numpy())[: len(held)]
    mine.fill_(3)
    near.files.read(batch, after=torch.cuda.current_stream())
    rows = mine.view(-1, nbytes)
    assert torch.equal(rows[: 2 * count : 2], before.view(-1, nbytes)[: 2 * count : 2])
    assert bool((rows[1 : 2 * count : 2] == 3).all())


def test_a_peer_that_is_killed_ends_transfers_and_writes_nothing_late(transports: str) -> None:
    nbytes = 64 * MIB
    with kvferry.Agent("near", listen="127.0.0.1:0", transports=transports, silence=2.0) as near:
        for way in ("write", "read", "written"):
            with peer_process(transports) as other:
                mine = filled(nbytes, 1)
                torch.cuda.synchronize()
                region, remote = near.register(mine), other.region(nbytes, 9)
                peer = near.peer(other.address)
                batch = whole(region, remote, nbytes)
                running = []
                if way == "written":
                    other.call("write_for_ever", 0, near.address, region.remote().to_bytes(), nbytes)
                else:
                    start = peer.write_async if way == "write" else peer.read_async
                    running = [start(batch, after="host") for _ in range(100)]
                    # Long before the last one can have ended.
                    running[0].wait(0.02)
                other.kill()
                failed = 0
                for transfer in running:
                    try:
                        assert transfer.wait(60) is not None, "it hangs"
                    except kvferry.Error:
                        failed += 1
                assert failed > 0 or way == "written"
                near.unregister(region)
                mine.fill_(0xA5)
                torch.cuda.synchronize()
                late = torch.cuda.Event()
                torch.cuda._sleep(200_000_000)
                late.record()
                late.synchronize()
                assert bool((mine == 0xA5).all()), f"{way}: a late byte"
