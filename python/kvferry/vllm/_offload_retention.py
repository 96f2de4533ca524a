"""How long the blocks of a request are to stay, from its ``kv_transfer_params``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

DURATION_MAX = 10 * 365 * 86_400.0


@dataclass(frozen=True)
class Retention:
    """`priority`: 0 to 100; lower ones leave first. `duration`: seconds after which it is the default again."""

    priority: int = 35
    duration: float | None = None


@dataclass(frozen=True)
class Range:
    """Tokens from `start` to before `end`; None: to the end of the request."""

    start: int
    end: int | None
    retention: Retention


@dataclass(frozen=True)
class Plan:
    """The retention of a request's tokens. Where ranges overlap, the higher priority holds."""

    otherwise: Retention
    ranges: tuple[Range, ...] = field(default=())

    def at(self, last_token: int) -> Retention:
        """Of a block by its last token."""
        found = [
            it.retention for it in self.ranges if it.start <= last_token and (it.end is None or last_token < it.end)
        ]
        return max(found, key=lambda it: it.priority) if found else self.otherwise

    @staticmethod
    def of(params: Mapping[str, Any] | None, priority: int) -> Plan:
        """`priority`: of requests that say nothing. Raises ValueError for a wrong value."""
        params = params or {}
        otherwise = _retention(params, Retention(priority), "kv_transfer_params")
        ranges = params.get("retention") or ()
        if not isinstance(ranges, list | tuple):
            raise ValueError(f"kv_transfer_params: retention must be a list of ranges, not {ranges!r}")
        return Plan(otherwise, tuple(_range(it, otherwise) for it in ranges))


def _range(given: Any, otherwise: Retention) -> Range:
    if not isinstance(given, Mapping):
        raise ValueError(f"kv_transfer_params: a range of retention must be an object, not {given!r}")
    start, end = given.get("start", 0), given.get("end")
    for name, value in (("start", start), ("end", end)):
        if (value is not None or name == "start") and (
            isinstance(value, bool) or not isinstance(value, int) or value < 0
        ):
            raise ValueError(
                f"kv_transfer_params: {name} of a range of retention must be a token's number, not {value!r}"
            )
    if end is not None and end <= start:
        raise ValueError(
            f"kv_transfer_params: a range of retention ends at {end}, which is not after its start {start}"
        )
    return Range(start, end, _retention(given, otherwise, "a range of retention"))


def _retention(given: Mapping[str, Any], otherwise: Retention, where: str) -> Retention:
    priority, duration = given.get("priority"), given.get("duration")
    if priority is None:
        priority = otherwise.priority
    elif isinstance(priority, bool) or not isinstance(priority, int) or not 0 <= priority <= 100:
        raise ValueError(f"{where}: priority must be a whole number from 0 to 100, not {priority!r}")
    if duration is None:
        duration = otherwise.duration
    elif isinstance(duration, bool) or not isinstance(duration, int | float) or not 0 < duration <= DURATION_MAX:
        raise ValueError(f"{where}: duration must be a number of seconds above 0, not {duration!r}")
    return Retention(priority, None if duration is None else float(duration))
