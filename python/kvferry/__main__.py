"""``python -m kvferry libdir``: where the C libraries of this installation are."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def libdir() -> Path | None:
    """The folder of ``libkvferry.so.0`` and ``libtransfer_engine.so``; None if this installation has none."""
    folder = Path(__file__).resolve().parent / "lib"
    return folder if (folder / "libkvferry.so.0").is_file() else None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m kvferry", description="kvferry's Python package")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("libdir", help="print the folder of the C libraries, their headers and kvferry.pc")
    parser.parse_args()
    folder = libdir()
    if folder is None:
        print("this installation of kvferry has no C libraries; install its wheel", file=sys.stderr)
        return 1
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
