"""How long the blocks of a request are to stay, from its ``kv_transfer_params``, within what the operator allows."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry._engine.settings import DURATION_MAX, StoreSettings

# A scheduler reads them, and a request may come from anyone. A prompt has a system part, documents and a question.
RANGES_MAX = 64

# Characters that an error shows of a client's text.
_SHOWN = 40


@dataclass(frozen=True)
class Retention:
    """`priority`: 0 to 100; lower ones leave first. `duration`: seconds after which it is the default again.

    The fields are parameters of `kvferry.Space.put`.
    """

    priority: int = 35
    duration: float | None = None


@dataclass(frozen=True)
class Limits:
    """What the operator allows."""

    # Of requests that say none.
    priority: int = 35
    # A request that asks for more gets this.
    priority_max: int = 100
    # Seconds for which a priority above `priority` holds at most; None: as long as a request says.
    duration_max: float | None = None

    @staticmethod
    def of_store(settings: StoreSettings) -> Limits:
        return Limits(settings.priority, settings.priority_max, settings.duration_max)

    def of(self, priority: int, duration: float | None) -> Retention:
        priority = min(priority, self.priority_max)
        if self.duration_max is not None and priority > self.priority:
            duration = self.duration_max if duration is None else min(duration, self.duration_max)
        return Retention(priority, duration)


@dataclass(frozen=True)
class _Range:
    """Tokens from `start` to before `end`; None: to the end of the request."""

    start: int
    end: int | None
    retention: Retention


class Plan:
    """The retention of a request's tokens. Where ranges overlap, the higher priority holds, and of equal ones that of
    the range that is named first.
    """

    def __init__(self, otherwise: Retention, ranges: Sequence[_Range] = ()) -> None:
        self.otherwise = otherwise
        self._starts, self._kept = _parts(ranges, otherwise)

    def at(self, last_token: int) -> Retention:
        """Of a block by its last token."""
        part = bisect_right(self._starts, last_token)
        return self._kept[part - 1] if part else self.otherwise

    @staticmethod
    def of(params: Mapping[str, Any] | None, limits: Limits) -> Plan:
        """Raises ValueError for a wrong value, with a text of bounded length."""
        params = params or {}
        priority, duration = _asked(params, (limits.priority, None), "kv_transfer_params")
        ranges = params.get("retention") or ()
        if not isinstance(ranges, list | tuple):
            raise ValueError(f"kv_transfer_params: retention must be a list of ranges, not {_shown(ranges)}")
        if len(ranges) > RANGES_MAX:
            raise ValueError(f"kv_transfer_params: retention must be at most {RANGES_MAX} ranges, not {len(ranges)}")
        return Plan(limits.of(priority, duration), [_range(it, (priority, duration), limits) for it in ranges])


def _parts(ranges: Sequence[_Range], otherwise: Retention) -> tuple[list[int], list[Retention]]:
    """Where each part begins in which one retention holds, and that retention."""
    waiting = sorted(range(len(ranges)), key=lambda it: ranges[it].start, reverse=True)
    starts = sorted({place for it in ranges for place in (it.start, it.end) if place is not None})
    # Ranges that have begun; one that has ended leaves when it is the first.
    begun: list[tuple[int, int]] = []
    kept = []
    for start in starts:
        while waiting and ranges[waiting[-1]].start <= start:
            number = waiting.pop()
            heapq.heappush(begun, (-ranges[number].retention.priority, number))
        while begun:
            end = ranges[begun[0][1]].end
            if end is None or end > start:
                break
            heapq.heappop(begun)
        kept.append(ranges[begun[0][1]].retention if begun else otherwise)
    return starts, kept


def _range(given: Any, otherwise: tuple[int, float | None], limits: Limits) -> _Range:
    if not isinstance(given, Mapping):
        raise ValueError(f"kv_transfer_params: a range of retention must be an object, not {_shown(given)}")
    start, end = given.get("start", 0), given.get("end")
    for name, value in (("start", start), ("end", end)):
        if (value is not None or name == "start") and (
            isinstance(value, bool) or not isinstance(value, int) or value < 0
        ):
            raise ValueError(
                f"kv_transfer_params: {name} of a range of retention must be a token's number, not {_shown(value)}"
            )
    if end is not None and end <= start:
        raise ValueError(
            f"kv_transfer_params: a range of retention ends at {_shown(end)}, which is not after its start "
            f"{_shown(start)}"
        )
    return _Range(start, end, limits.of(*_asked(given, otherwise, "a range of retention")))


def _asked(given: Mapping[str, Any], otherwise: tuple[int, float | None], where: str) -> tuple[int, float | None]:
    """Priority and duration."""
    priority, duration = given.get("priority"), given.get("duration")
    if priority is None:
        priority = otherwise[0]
    elif isinstance(priority, bool) or not isinstance(priority, int) or not 0 <= priority <= 100:
        raise ValueError(f"{where}: priority must be a whole number from 0 to 100, not {_shown(priority)}")
    if duration is None:
        duration = otherwise[1]
    elif isinstance(duration, bool) or not isinstance(duration, int | float) or not 0 < duration <= DURATION_MAX:
        raise ValueError(f"{where}: duration must be a number of seconds above 0, not {_shown(duration)}")
    return priority, None if duration is None else float(duration)


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return repr(value if len(value) <= _SHOWN else value[:_SHOWN] + "…")
    if isinstance(value, int) and value.bit_length() > 64:
        return f"a number of {value.bit_length()} bits"
    return repr(value) if isinstance(value, int | float | None) else f"a {type(value).__name__}"


class Plans:
    """The plans of requests. The first wrong value is logged, and no other: clients choose them."""

    def __init__(self, limits: Limits, who: str, logger: Any) -> None:
        self._limits, self._who, self._logger = limits, who, logger
        self._has_warned = False

    def of(self, params: Mapping[str, Any] | None) -> Plan:
        try:
            return Plan.of(params, self._limits)
        except ValueError as error:
            # An exception here would end the engine.
            if not self._has_warned:
                self._has_warned = True
                self._logger.warning(
                    "%s: %s; the blocks of such a request are kept like those of others. This is said once.",
                    self._who,
                    error,
                )
            return Plan.of(None, self._limits)
