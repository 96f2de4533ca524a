"""Compute, save, overwrite, load, compare: again and again. Without edges the comparison must fail."""

from __future__ import annotations

import random
import time
from pathlib import Path

import kvferry
import pytest
import torch
from gpu_kit import KIB, figure, filled, pattern, skip_unless_files_take, spin, whole

#: Bytes of a block, and blocks of a round.
BLOCK, BLOCKS = 4 * KIB, 8
NBYTES = BLOCK * BLOCKS


class Cache:
    """Blocks on the GPU, and where they are saved: memory of a peer, or a file."""

    def __init__(self, near: kvferry.Agent, far: kvferry.Agent | None, folder: Path) -> None:
        self.blocks = filled(4 * NBYTES, 0).view(4, NBYTES)
        self.region = near.register(self.blocks)
        if far is None:
            self.remote = near.open_file(folder / "kv", "rw", create=True, nbytes=4 * NBYTES).remote()
            self.save, self.load = near.files.write, near.files.read
        else:
            self.held = filled(4 * NBYTES, 0)
            self.remote = far.register(self.held).remote()
            peer = near.peer(far.address)
            self.save, self.load = peer.write, peer.read

    def batch(self, random_: random.Random, place: int) -> kvferry.Batch:
        """A batch of one row of blocks, each in a place of its own at the other side."""
        batch = kvferry.Batch()
        order = random_.sample(range(BLOCKS), BLOCKS)
        here = [place * NBYTES + i * BLOCK for i in range(BLOCKS)]
        there = [place * NBYTES + i * BLOCK for i in order]
        batch.extend_regions(self.region, here, self.remote, there, BLOCK)
        return batch


@pytest.mark.parametrize("to", ["peer", "file"])
def test_with_edges_no_round_has_a_wrong_byte(
    near: kvferry.Agent, far: kvferry.Agent, tmp_path: Path, request: pytest.FixtureRequest, to: str, transports: str
) -> None:
    if to == "file" and transports != "tcp":
        pytest.skip("files do not depend on the transport")
    if to == "file":
        skip_unless_files_take(near, tmp_path)
    rounds, limit = request.config.getoption("--rounds"), request.config.getoption("--stress-seconds")
    chance, streams = random.Random(20261127), [torch.cuda.Stream() for _ in range(2)]
    cache = Cache(near, None if to == "file" else far, tmp_path)
    # A count for each stream: kernels of two add at the same time.
    source, wrong = pattern(NBYTES, 3), torch.zeros(2, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    began, done = time.monotonic(), 0
    for done in range(1, rounds + 1):
        stream, row = streams[done % 2], cache.blocks[done % 4]
        batch = cache.batch(chance, done % 4)
        with torch.cuda.stream(stream):
            spin(chance.uniform(0, 0.2))
            torch.add(source, done % 251, out=row)
        cache.save(batch, after=stream if done % 3 else stream.record_event())
        with torch.cuda.stream(stream):
            spin(chance.uniform(0, 0.2))
            row.fill_(0xEE)
        cache.load(batch, after=stream)
        with torch.cuda.stream(stream):
            # The load has ended on the host, so that what is launched now sees it.
            wrong[done % 2].add_((row != source + done % 251).any())
        if done % 100 == 0:
            torch.cuda.synchronize()
            assert int(wrong.sum()) == 0, f"{int(wrong.sum())} of the first {done} rounds"
            if time.monotonic() - began > limit:
                break
    torch.cuda.synchronize()
    assert int(wrong.sum()) == 0
    figure(f"{to}, {transports}: {done} rounds with edges in {time.monotonic() - began:.0f} s, no wrong byte")


@pytest.mark.parametrize("to", ["peer", "file"])
def test_without_edges_rounds_have_wrong_bytes(
    near: kvferry.Agent, far: kvferry.Agent, tmp_path: Path, request: pytest.FixtureRequest, to: str, transports: str
) -> None:
    """The caller says "host" and has not waited. This shows that the test above can fail."""
    if to == "file" and transports != "tcp":
        pytest.skip("files do not depend on the transport")
    if to == "file":
        skip_unless_files_take(near, tmp_path)
    rounds = min(request.config.getoption("--rounds"), 1000)
    chance, stream = random.Random(20261127), torch.cuda.Stream()
    cache = Cache(near, None if to == "file" else far, tmp_path)
    source = pattern(NBYTES, 3)
    torch.cuda.synchronize()
    wrong = 0
    for round_ in range(1, rounds + 1):
        row, batch = cache.blocks[round_ % 4], cache.batch(chance, round_ % 4)
        with torch.cuda.stream(stream):
            spin(chance.uniform(0, 2))
            torch.add(source, round_ % 251, out=row)
        cache.save(batch, after="host")
        with torch.cuda.stream(stream):
            row.fill_(0xEE)
        stream.synchronize()
        cache.load(batch, after="host")
        wrong += int(bool((row != source + round_ % 251).any()))
    figure(f"{to}, {transports}: {wrong} of {rounds} rounds without edges have wrong bytes")
    assert wrong > 0


def test_many_transfers_at_once_have_the_bytes_of_their_own_kernels(
    near: kvferry.Agent, far: kvferry.Agent, request: pytest.FixtureRequest
) -> None:
    limit, slots = request.config.getoption("--stress-seconds") / 2, 32
    mine, theirs = filled(slots * NBYTES, 0).view(slots, -1), filled(slots * NBYTES, 0).view(slots, -1)
    region, remote, peer = near.register(mine), far.register(theirs).remote(), near.peer(far.address)
    streams = [torch.cuda.Stream() for _ in range(4)]
    chance, began, rounds = random.Random(5), time.monotonic(), 0
    torch.cuda.synchronize()
    while rounds == 0 or (time.monotonic() - began < limit and rounds < request.config.getoption("--rounds") // slots):
        rounds += 1
        running = []
        for slot in chance.sample(range(slots), slots):
            stream = chance.choice(streams)
            with torch.cuda.stream(stream):
                spin(chance.uniform(0, 0.1))
                mine[slot].fill_((slot + rounds) % 256)
            batch = kvferry.Batch()
            batch.push(region, slot * NBYTES, remote, slot * NBYTES, NBYTES)
            running.append(peer.write_async(batch, after=stream))
        for transfer in running:
            assert transfer.wait(60) is not None, "it hangs"
        torch.cuda.synchronize()
        expected = (torch.arange(slots, device="cuda") + rounds) % 256
        assert bool((theirs == expected.to(torch.uint8)[:, None]).all()), f"round {rounds}"
    figure(f"{rounds * slots} transfers, {slots} at once in {rounds} rounds, no wrong byte")


def test_agents_come_and_go_and_the_gpus_memory_is_as_before(transports: str, request: pytest.FixtureRequest) -> None:
    tensor = filled(NBYTES, 1)
    torch.cuda.synchronize()

    def cycle() -> None:
        with (
            kvferry.Agent("near", listen="127.0.0.1:0", transports=transports) as near,
            kvferry.Agent("far", listen="127.0.0.1:0", transports=transports) as far,
        ):
            batch = whole(near.register(tensor), far.register(bytearray(NBYTES)).remote(), NBYTES)
            near.peer(far.address).write(batch, after="host")

    for _ in range(3):
        cycle()
    before, cycles = torch.cuda.mem_get_info()[0], min(request.config.getoption("--rounds"), 200)
    for _ in range(cycles):
        cycle()
    after = torch.cuda.mem_get_info()[0]
    figure(
        f"{transports}: {cycles} cycles, {(before - after) / (1 << 20):.1f} MiB of the GPU's memory less than before"
    )
    assert before - after < 64 << 20
