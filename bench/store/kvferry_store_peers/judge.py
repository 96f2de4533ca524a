"""What kvferry must reach beside each peer, and what it has reached."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvferry_e2e.table import aligned
from kvferry_vllm_bench.rows import figure, quartiles

from kvferry_store_peers.turns import DISK, Figure

# Times as fast as the peer, by the median of the rounds.
REQUIRED = 2.0
GB = 1e9

# By store, then by what was measured: a figure per round.
Rounds = dict[str, dict[str, list[Figure]]]


@dataclass(frozen=True)
class Row:
    """Speeds are medians in GB/s; ratios are kvferry / peer, taken round by round; `spread` are their quartiles.
    `disk`: what the disk did in the same rounds, where the figure depends on it.
    """

    case: str
    what: str
    peer: str
    kvferry: float
    theirs: float
    reached: float
    spread: tuple[float, float]
    disk: float | None
    # Processor seconds per GB.
    cpu: tuple[float, float]
    rounds: int
    ok: bool
    # Blocks read, blocks refused by kvferry, of a trace.
    hits: tuple[int, int] | None = None
    refused: int = 0


def speed(one: Figure) -> float:
    return one.moved_bytes / one.seconds / GB if one.seconds else 0.0


def judged(case: str, rounds: Rounds, is_direct: bool, judged_store: str) -> list[Row]:
    ours, disk = rounds.get(judged_store, {}), rounds.get(DISK, {})
    rows = []
    for peer, figures in rounds.items():
        if peer in (judged_store, DISK):
            continue
        for what, theirs in figures.items():
            if ours.get(what) and theirs[0].moved_bytes:
                kind = what.split(",")[0].split()[0] if is_direct or "cold" in what else ""
                rows.append(_row(case, what, peer, ours[what], theirs, disk.get(kind, [])))
    return rows


def _row(case: str, what: str, peer: str, ours: list[Figure], theirs: list[Figure], disk: list[Figure]) -> Row:
    ratios = [speed(our) / speed(their) for our, their in zip(ours, theirs, strict=True)]
    reached = statistics.median(ratios)
    our, their = ours[-1], theirs[-1]
    return Row(
        case=case,
        what=what,
        peer=peer,
        kvferry=statistics.median(map(speed, ours)),
        theirs=statistics.median(map(speed, theirs)),
        reached=reached,
        spread=quartiles(ratios),
        disk=statistics.median(map(speed, disk)) if disk else None,
        cpu=(_cpu(ours), _cpu(theirs)),
        rounds=len(ratios),
        ok=reached >= REQUIRED,
        hits=(our.hits, their.hits) if our.hits or their.hits else None,
        refused=our.refused,
    )


def _cpu(figures: Sequence[Figure]) -> float:
    return statistics.median(one.cpu_s / max(one.moved_bytes, 1) * GB for one in figures)


def table(rows: Sequence[Row]) -> str:
    header = ["", "required", "reached", "[spread]", "", "GB/s", "peer", "disk", "CPU s/GB", "peer", "hits", "peer"]
    lines = [
        [
            f"{row.case}, {row.what} / {row.peer}",
            f"≥ {REQUIRED:g}",
            figure(row.reached),
            f"[{figure(row.spread[0])} {figure(row.spread[1])}]",
            "ok" if row.ok else "SHORT",
            figure(row.kvferry),
            figure(row.theirs),
            "" if row.disk is None else figure(row.disk),
            figure(row.cpu[0]),
            figure(row.cpu[1]),
            "" if row.hits is None else str(row.hits[0]),
            "" if row.hits is None else str(row.hits[1]),
        ]
        for row in rows
    ]
    return aligned(header, lines)


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    return [asdict(row) | {"required": REQUIRED} for row in rows]
