"""Aligned tables: the first column to the left, the others to the right."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, *rows]
    widths = [max(len(line[at]) for line in lines) for at in range(len(header))]

    def text(line: Sequence[str]) -> str:
        cells = [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        return "  ".join([line[0].ljust(widths[0]), *cells]).rstrip()

    return "\n".join(text(line) for line in lines)
