"""Waits for operations in an asyncio event loop, by their event descriptors: no thread, no polling."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from kvferry._kvferry import Transfer, TransferStats

T_co = TypeVar("T_co", covariant=True)


class Operation(Protocol[T_co]):
    """Something in the background, with one outcome."""

    def poll(self) -> T_co | None: ...
    def fileno(self) -> int: ...


async def wait(transfer: Transfer) -> TransferStats:
    """Returns the transfer's result or raises its error. Cancelling the waiting task cancels the transfer.

    The transfer uses its memory until the outcome is known. After a cancellation, wait for it with ``transfer.wait()``
    or await the transfer again.
    """
    try:
        return await outcome(transfer)
    except asyncio.CancelledError:
        transfer.cancel()
        raise


async def outcome(operation: Operation[T_co]) -> T_co:
    """Returns the operation's result or raises its error. Cancelling the waiting task does not end the operation."""
    while (result := operation.poll()) is None:
        loop = asyncio.get_running_loop()
        ended = loop.create_future()
        # Each waiter needs its own descriptor: a loop accepts one reader per descriptor.
        fd = os.dup(operation.fileno())
        try:
            loop.add_reader(fd, _end, ended)
            try:
                await ended
            finally:
                loop.remove_reader(fd)
        finally:
            os.close(fd)
    return result


def _end(ended: asyncio.Future[None]) -> None:
    if not ended.done():
        ended.set_result(None)
