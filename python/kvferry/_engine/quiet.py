"""Transfers whose memory is used again."""

from __future__ import annotations

import time
from typing import Final

import kvferry

_LOOK_EVERY_S: Final = 0.01


def is_quiet(transfer: kvferry.Transfer, timeout: float | None = None) -> bool:
    """Waits until nothing uses the memory of a transfer that has ended: a GPU that does not answer ends the copies of a
    failed one later. False if the time in seconds passed first.
    """
    until = None if timeout is None else time.monotonic() + timeout
    while not transfer.is_quiet():
        if until is not None and time.monotonic() >= until:
            return False
        time.sleep(_LOOK_EVERY_S)
    return True
