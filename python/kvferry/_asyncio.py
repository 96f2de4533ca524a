"""Waits for transfers in an asyncio event loop, by their event descriptors: no thread, no polling."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvferry._kvferry import Transfer, TransferStats


async def wait(transfer: Transfer) -> TransferStats:
    """Returns the transfer's result or raises its error. Cancelling the waiting task cancels the transfer.

    The transfer uses its memory until the outcome is known. After a cancellation, wait for it with ``transfer.wait()``
    or await the transfer again.
    """
    while (stats := transfer.poll()) is None:
        loop = asyncio.get_running_loop()
        ended = loop.create_future()
        # Each waiter needs its own descriptor: a loop accepts one reader per descriptor.
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
    return stats


def _end(ended: asyncio.Future[None]) -> None:
    if not ended.done():
        ended.set_result(None)
