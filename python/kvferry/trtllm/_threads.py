"""Threads for calls to other engines, each of which takes as long as the other engine likes."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("kvferry.trtllm")


class Threads:
    """Carries out calls in order, on `most` threads at most, which are started when there is a call for them.

    At its exit the interpreter carries out all that `concurrent.futures` has queued, before any function of `atexit`
    can cancel it. It does not wait for these threads.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name = most, name
        self._calls: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._changed = threading.Condition()
        self._count = self._idle = 0
        self._is_closed = False

    def submit(self, call: Callable[..., object], *given: Any) -> bool:
        """False if the call is not carried out: after `close`, or where no thread runs and none can be started."""
        with self._changed:
            if self._is_closed:
                return False
            if self._idle <= len(self._calls) and self._count < self._most:
                self._start()
            if self._count == 0:
                return False
            self._calls.append((call, given))
            self._changed.notify()
            return True

    def _start(self) -> None:
        try:
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
        except RuntimeError:
            # There are no more threads. Those that run carry it out later.
            return
        self._count += 1

    def _run(self) -> None:
        while True:
            with self._changed:
                self._idle += 1
                self._changed.wait_for(lambda: self._calls or self._is_closed)
                self._idle -= 1
                if self._is_closed:
                    return
                call, given = self._calls.popleft()
            try:
                call(*given)
            except Exception:
                logger.exception("kvferry.trtllm: a call to another engine has failed")
            # An idle thread keeps nothing alive.
            del call, given

    def close(self) -> None:
        """Drops what is queued, and ends each thread after its call. Does not wait for them."""
        with self._changed:
            self._is_closed = True
            self._calls.clear()
            self._changed.notify_all()
