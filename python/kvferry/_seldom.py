"""Warnings of what may happen in each step."""

from __future__ import annotations

import time
from typing import Any

_EVERY_S = 10.0


class Seldom:
    """At most one warning in ten seconds; the others are for debugging."""

    def __init__(self, logger: Any, prefix: str) -> None:
        self._logger, self._prefix = logger, prefix
        self._said_at = -_EVERY_S

    def say(self, text: str, *values: Any) -> None:
        now = time.monotonic()
        if now >= self._said_at + _EVERY_S:
            self._said_at = now
            self._logger.warning(self._prefix + text, *values)
        else:
            self._logger.debug(self._prefix + text, *values)
