"""`kvferry.nixl` with VRAM: agents in two processes, torch tensors as memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gpu_kit import KIB, filled, pattern, peer_process

BLOCK, BLOCKS = 16 * KIB, 64
NBYTES = BLOCK * BLOCKS


@pytest.fixture
def here(transports: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    from kvferry.nixl import nixl_agent, nixl_agent_config

    monkeypatch.setenv("KVFERRY_LISTEN", "127.0.0.1:0")
    monkeypatch.setenv("KVFERRY_TRANSPORTS", transports)
    agent = nixl_agent("here", nixl_agent_config())
    yield agent
    agent.shutdown()


def run(agent: Any, handle: Any) -> str:
    state, until = agent.transfer(handle), time.monotonic() + 60
    while state == "PROC" and time.monotonic() < until:
        time.sleep(0.0005)
        state = agent.check_xfer_state(handle)
    return str(state)


def test_vram_between_two_processes(here: Any, transports: str) -> None:
    environment = {"KVFERRY_LISTEN": "127.0.0.1:0", "KVFERRY_TRANSPORTS": transports}
    with peer_process(transports, environment) as other:
        metadata, address = other.call("nixl_agent", NBYTES, 9)
        name = here.add_remote_agent(metadata)
        mine = pattern(NBYTES, 1)
        here.register_memory(mine)
        mine_rows = [(mine.data_ptr() + i * BLOCK, BLOCK, 0) for i in range(BLOCKS)]
        their_rows = [(address + i * BLOCK, BLOCK, 0) for i in range(BLOCKS)]
        local, remote = here.prep_xfer_dlist("", mine_rows, "VRAM"), here.prep_xfer_dlist(name, their_rows, "VRAM")
        evens, odds = list(range(0, BLOCKS, 2)), list(range(1, BLOCKS, 2))
        assert run(here, here.make_prepped_xfer("WRITE", local, evens, remote, odds, b"done")) == "DONE"
        rows = filled(NBYTES, 9).view(BLOCKS, -1)
        rows[1::2] = mine.view(BLOCKS, -1)[::2]
        assert other.call("content", 0) == bytes(rows.view(-1).cpu().numpy())
        until, notes = time.monotonic() + 20, {}
        while not notes and time.monotonic() < until:
            notes = other.call("notifications")
        assert notes == {"here": [b"done"]}
        other.call("fill", 0, 77)
        assert run(here, here.make_prepped_xfer("READ", local, odds, remote, evens)) == "DONE"
        assert bool((mine.view(BLOCKS, -1)[1::2] == 77).all())


def test_vram_of_this_side_and_host_memory_of_the_other(here: Any, transports: str) -> None:
    from kvferry.nixl import nixl_agent, nixl_agent_config

    there = nixl_agent("there", nixl_agent_config())
    mine, host = pattern(NBYTES, 1), torch.zeros(NBYTES, dtype=torch.uint8)
    here.register_memory(mine)
    there.register_memory(host)
    name = here.add_remote_agent(there.get_agent_metadata())
    local = here.get_xfer_descs([(mine.data_ptr(), NBYTES, 0)], "VRAM")
    remote = here.get_xfer_descs([(host.data_ptr(), NBYTES, 0)], "DRAM")
    assert run(here, here.initialize_xfer("WRITE", local, remote, name)) == "DONE"
    assert torch.equal(host, mine.cpu())
    there.shutdown()
