"""The adapters' loggers, and warnings of what may happen in each step."""

from __future__ import annotations

import logging
import time
from typing import Any

_EVERY_S = 10.0
# These engines show lines of level info below their own names alone.
_BELOW_THE_ENGINE = ("vllm", "sglang")


def name_of(adapter: str) -> str:
    """The name of an adapter's logger: ``vllm.kvferry``, ``sglang.kvferry``, ``kvferry.trtllm``, ``kvferry.nixl``."""
    return f"{adapter}.kvferry" if adapter in _BELOW_THE_ENGINE else f"kvferry.{adapter}"


def logger_of(adapter: str) -> logging.Logger:
    """The logger of that name."""
    return logging.getLogger(name_of(adapter))


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
