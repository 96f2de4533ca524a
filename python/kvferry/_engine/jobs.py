"""Jobs over the store: the blocks that one operation carries out, and the ends of operations."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, TypeVar

_T = TypeVar("_T")
# For puts that are about to end where their memory is needed: what a disk takes in this time waits in front of few.
_MOMENT_S = 0.5


def runs(items: Iterable[_T], follows: Callable[[_T, _T], bool], longest: float = float("inf")) -> list[list[_T]]:
    """Items that follow each other, `longest` at most in a run. `follows`: whether the second follows the first."""
    made: list[list[_T]] = []
    for it in items:
        if made and len(made[-1]) < longest and follows(made[-1][-1], it):
            made[-1].append(it)
        else:
            made.append([it])
    return made


def settled(operations: Iterable[Any], deadline: float | None = None) -> bool:
    """Waits for operations. False if not all have ended by the deadline. Errors are left to who takes the outcomes."""
    for it in operations:
        with suppress(Exception):
            if deadline is None:
                it.wait()
            else:
                it.wait(max(0.0, deadline - time.monotonic()))
        if not it.done():
            return False
    return True


def hurried(operations: Iterable[Any]) -> None:
    """Waits for operations whose memory is needed. Puts that have not begun a moment later are cancelled."""
    operations = list(operations)
    if not settled(operations, time.monotonic() + _MOMENT_S):
        for it in operations:
            it.cancel()
        settled(operations)
