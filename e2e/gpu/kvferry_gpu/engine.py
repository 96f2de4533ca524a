"""The paged engine in PyTorch, which hands KV over by KVFerryConnector and compares tokens."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from . import process, wheel
from .report import Part

#: The longest time of all rows together, in seconds.
ENGINE_SECONDS = 240


def run(part: Part, options: argparse.Namespace, out: Path, until: float) -> None:
    site = wheel.installed(part, options, out)
    if site is None:
        return
    folder = options.packed / "engine"
    command = [sys.executable, str(folder / "paged_engine.py"), "--device", "cuda:0", "--out", str(out)]
    environment = {"PYTHONPATH": os.pathsep.join([str(site), str(folder)])}
    ended = process.run(command, out / "engine.log", min(ENGINE_SECONDS, until - time.monotonic()), environment)
    for line in ended.output.splitlines():
        if line.endswith("  ok"):
            part.passed += 1
            part.said.append(line)
        elif line.endswith("  WRONG"):
            part.failed[line.split("  ")[0]] = line
    if ended.timed_out or (ended.status != 0 and not part.failed):
        part.failed["the engine"] = f"{ended.how}: {ended.output.strip()[-400:]}"
