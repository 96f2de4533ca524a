"""Waiting for transfers in an asyncio event loop, by their event descriptors: no thread, no polling."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvferry._kvferry import Moved, Transfer


async def wait(transfer: Transfer) -> Moved:
    """The transfer's outcome. A task that is cancelled while it waits cancels the transfer.

    The memory may be in use until the outcome is known; who cancels and wants it back waits for that with
    ``transfer.wait()`` or by awaiting the transfer again.
    """
    while (moved := transfer.poll()) is None:
        loop = asyncio.get_running_loop()
        ended = loop.create_future()
        # A descriptor of its own for each waiter: a loop knows one reader for each.
        fd = os.dup(transfer.fileno())
        try:
            loop.add_reader(fd, _end, ended)
            try:
                await ended
            finally:
                loop.remove_reader(fd)
        except asyncio.CancelledError:
            transfer.cancel()
            raise
        finally:
            os.close(fd)
    return moved


def _end(ended: asyncio.Future[None]) -> None:
    if not ended.done():
        ended.set_result(None)
