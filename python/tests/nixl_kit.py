"""What the tests of `kvferry.nixl` share: an agent with its memory, and running a transfer to its end."""

from __future__ import annotations

from typing import Any

from kit import Memory, eventually
from kvferry.nixl import nixl_agent, nixl_agent_config

BLOCK = 4096
BLOCKS = 64


class Side:
    """An agent with registered memory of `BLOCKS` blocks."""

    def __init__(self, name: str, **settings: Any) -> None:
        self.agent = nixl_agent(name, nixl_agent_config(**settings))
        self.memory = Memory(BLOCK * BLOCKS)
        self.registered = self.agent.register_memory([(self.memory.addr, self.memory.nbytes, 0, "")], "DRAM")

    def rows(self, first: int = 0, count: int = BLOCKS) -> list[tuple[int, int, int]]:
        return [(self.memory.addr + at * BLOCK, BLOCK, 0) for at in range(first, first + count)]

    def block(self, at: int) -> bytes:
        return self.memory[at * BLOCK : (at + 1) * BLOCK]

    def fill(self) -> None:
        for at in range(BLOCKS):
            self.memory[at * BLOCK : (at + 1) * BLOCK] = bytes([at + 1]) * BLOCK


def run(agent: nixl_agent, handle: Any) -> str:
    state = agent.transfer(handle)
    if state == "PROC":
        eventually(lambda: agent.check_xfer_state(handle) != "PROC")
        state = agent.check_xfer_state(handle)
    return state
