"""What the tests of `kvferry.nixl` share: an agent with its memory, and running a transfer to its end."""

from __future__ import annotations

from typing import Any

from kit import Memory, eventually
from kvferry.nixl import nixl_agent, nixl_agent_config
from kvferry.nixl._errors import nixlBackendError, nixlRepostActiveError

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


def release(agent: nixl_agent, handle: Any) -> None:
    """Releases a handle. A transfer that runs may take longer to end than a call waits for it."""

    def is_released() -> bool:
        try:
            agent.release_xfer_handle(handle)
        except nixlRepostActiveError:
            return False
        return True

    eventually(is_released, what="the release")


def deregister(agent: nixl_agent, descs: Any) -> None:
    """Deregisters memory. Transfers that use it may take longer to end than a call waits for them."""

    def is_deregistered() -> bool:
        try:
            agent.deregister_memory(descs)
        except nixlBackendError as error:
            if "try again" not in str(error):
                raise
            return False
        return True

    eventually(is_deregistered, what="the deregistration")
