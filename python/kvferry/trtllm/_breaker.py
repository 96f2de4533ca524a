"""Look-ups that hold the executor, after one that took too long."""

from __future__ import annotations

import time
from collections.abc import Callable

_FIRST_S = 2.0
_LONGEST_S = 60.0


class Breaker:
    """After a look-up that took all its time there is none for some seconds; then one tries again.

    Each that fails again doubles the pause. A dead disk or engine then costs its time-out once in a minute, not with
    every request.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pause = 0.0
        self._until = 0.0

    def allows(self) -> bool:
        return self._pause == 0 or self._clock() >= self._until

    def worked(self) -> None:
        self._pause = 0.0

    def timed_out(self) -> float:
        """Returns for how many seconds there is no look-up."""
        self._pause = min(max(_FIRST_S, 2 * self._pause), _LONGEST_S)
        self._until = self._clock() + self._pause
        return self._pause
