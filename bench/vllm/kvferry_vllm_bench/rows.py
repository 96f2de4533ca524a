"""Rows of figures: what is required, what was reached, and its spread."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvferry_e2e.table import aligned

RESAMPLES = 10_000
SEED = 20_261


@dataclass(frozen=True)
class Row:
    """`spread`: a 95 % interval of the figure, or the quartiles of what it is the median of. `ok`: None where nothing
    is required.
    """

    part: str
    what: str
    unit: str
    required: str
    reached: float
    spread: tuple[float, float]
    ok: bool | None


def shown(part: str, what: str, unit: str, values: Sequence[float]) -> Row:
    """The median and the quartiles; nothing is required."""
    return Row(part, what, unit, "", statistics.median(values), quartiles(values), None)


def at_most(part: str, what: str, unit: str, values: Sequence[float], bound: float) -> Row:
    """The median, with quartiles, against a bound."""
    median = statistics.median(values)
    return Row(part, what, unit, f"≤ {figure(bound)}", median, quartiles(values), median <= bound)


def at_least(part: str, what: str, unit: str, values: Sequence[float], bound: float) -> Row:
    """The median, with quartiles, against a bound."""
    median = statistics.median(values)
    return Row(part, what, unit, f"≥ {figure(bound)}", median, quartiles(values), median >= bound)


def none_of(part: str, what: str, number: int) -> Row:
    """A number of things that must not be."""
    return Row(part, what, "", "0", number, (number, number), number == 0)


def below_zero(part: str, what: str, unit: str, differences: Sequence[float]) -> Row:
    """The median of paired differences; its 95 % interval must lie below 0."""
    low, high = interval(differences)
    return Row(part, what, unit, "95 % below 0", statistics.median(differences), (low, high), high < 0)


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the median, by bootstrap with a fixed seed."""
    chance = random.Random(SEED)
    medians = sorted(statistics.median(chance.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES) - 1]


def figure(value: float) -> str:
    """Three digits; more only before the point."""
    if value == 0:
        return "0"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def table(rows: Sequence[Row]) -> str:
    verdict = {True: "ok", False: "SHORT", None: ""}
    lines = [
        [
            f"{row.part}: {row.what}",
            row.required,
            figure(row.reached),
            f"[{figure(row.spread[0])} {figure(row.spread[1])}]",
            row.unit,
            verdict[row.ok],
        ]
        for row in rows
    ]
    return aligned(["", "required", "reached", "[spread]", "", ""], lines)


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [asdict(row) for row in rows]
