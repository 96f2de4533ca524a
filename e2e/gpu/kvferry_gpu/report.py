"""Results of parts, the table at the end, and results.json."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Part:
    """The results of a part."""

    name: str
    passed: int = 0
    #: Names of tests that failed, each with the failure.
    failed: dict[str, str] = field(default_factory=dict)
    #: Reasons why tests were skipped, each with the number of tests.
    skipped: dict[str, int] = field(default_factory=dict)
    #: Lines with figures that tests have printed.
    said: list[str] = field(default_factory=list)
    seconds: float = 0.0
    #: Why the part did not run, or not all its tests did; empty if they did.
    not_run: str = ""

    @property
    def outcome(self) -> str:
        if self.failed:
            return "FAILED"
        if self.not_run:
            return "NOT RUN"
        return "passed" if self.passed else "SKIPPED"

    def skip(self, reason: str, count: int = 1) -> None:
        self.skipped[reason] = self.skipped.get(reason, 0) + count


def table(parts: list[Part]) -> str:
    lines = [f"{'part':<12} {'outcome':<8} {'passed':>6} {'failed':>6} {'skipped':>7} {'s':>6}"]
    for part in parts:
        counts = f"{part.passed:>6} {len(part.failed):>6} {sum(part.skipped.values()):>7} {part.seconds:>6.0f}"
        lines.append(f"{part.name:<12} {part.outcome:<8} {counts}")
    for part in parts:
        lines += [f"{part.name}: NOT RUN: {part.not_run}"] if part.not_run else []
        lines += [f"{part.name}: FAILED: {name}: {how}" for name, how in part.failed.items()]
        lines += [f"{part.name}: SKIPPED: {reason} ({count})" for reason, count in sorted(part.skipped.items())]
    return "\n".join(lines)


def write(out: Path, found: dict[str, Any], parts: list[Part]) -> None:
    results = {"probe": found, "parts": [asdict(part) | {"outcome": part.outcome} for part in parts]}
    (out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    (out / "summary.txt").write_text(table(parts) + "\n")
