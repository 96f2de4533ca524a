"""Jobs over the store: the blocks that one operation carries out, and the ends of operations."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
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


class Behind:
    """Carries out calls one after another on a thread. The end of the process does not wait for it: a call may wait for
    a GPU that does not answer.
    """

    def __init__(self, name: str) -> None:
        # None ends the thread.
        self._calls: SimpleQueue[tuple[Future[None], Callable[[], None]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=_carry_out, args=(self._calls,), name=name, daemon=True)
        self._thread.start()
        # The thread ends with this object.
        weakref.finalize(self, self._calls.put, None)

    def begin(self, call: Callable[[], None]) -> Future[None]:
        ended: Future[None] = Future()
        self._calls.put((ended, call))
        return ended

    def close(self) -> None:
        """Waits for the calls before."""
        self._calls.put(None)
        self._thread.join()


def _carry_out(calls: SimpleQueue[tuple[Future[None], Callable[[], None]] | None]) -> None:
    while (begun := calls.get()) is not None:
        ended, call = begun
        try:
            call()
        except BaseException as error:
            ended.set_exception(error)
        else:
            ended.set_result(None)
        # They may have the memory of a cache.
        del begun, ended, call
