"""See the package."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from kvferry_e2e.report import Report
from kvferry_e2e.sglang.hicache import faults, hybrid, identity, pages
from kvferry_e2e.sglang.hicache.kit import Kit, Log


def main(models: Path, lines: Path) -> int:
    report = Report()
    kit = Kit(report, models)
    logging.getLogger("sglang.kvferry").addHandler(Log(kit))
    for part in (pages, identity, hybrid, faults):
        part.run(kit)
        report.write(lines)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
