"""Test programs in Rust: each test in a process of its own, several at once."""

from __future__ import annotations

import os
import re
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import process
from .report import Part

#: The longest time of a test, in seconds.
TEST_SECONDS = 150
#: Lines of a test that failed that are shown at once. Its log has all.
SHOWN_LINES = 25


def tests_of(program: Path) -> list[str]:
    """The tests of a program that are not ignored."""

    def listed(*options: str) -> list[str]:
        command = [str(program), "--list", "--format", "terse", *options]
        said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        return [line.removesuffix(": test") for line in said.stdout.splitlines() if line.endswith(": test")]

    ignored = set(listed("--ignored"))
    return [name for name in listed() if name not in ignored]


def run(
    part: Part, program: Path, wanted: str, out: Path, jobs: int, until: float, environment: dict[str, str]
) -> None:
    """Runs the tests that match the pattern `wanted`, with these variables."""
    names = [name for name in tests_of(program) if re.search(wanted, name)]
    folder = out / part.name
    folder.mkdir(exist_ok=True)

    def one(name: str) -> tuple[str, process.Ended | None]:
        left = until - time.monotonic()
        if left < 5:
            return name, None
        log = folder / (name.replace("::", ".") + ".log")
        command = [str(program), "--exact", name, "--nocapture"]
        machine = {"KVFERRY_TEST_GPU": os.environ.get("KVFERRY_TEST_GPU", "real"), "RUST_BACKTRACE": "1"}
        return name, process.run(command, log, min(TEST_SECONDS, left), machine | environment)

    missed = 0
    with ThreadPoolExecutor(jobs) as pool:
        for name, ended in pool.map(one, names):
            if ended is None:
                missed += 1
            else:
                _judge(part, name, ended)
    if missed:
        part.not_run = f"no time was left for {missed} of {len(names)} tests"
    if not names:
        part.not_run = f"no test matches {wanted}"
    _join(folder, out / f"{part.name}.log")


def _judge(part: Part, name: str, ended: process.Ended) -> None:
    ran = "1 passed" in ended.output
    skips = [line.split("SKIPPED: ", 1)[1] for line in ended.output.splitlines() if "SKIPPED: " in line]
    part.said += [line.split("FIGURE: ", 1)[1] for line in ended.output.splitlines() if "FIGURE: " in line]
    if ended.timed_out or ended.status != 0 or not ran:
        part.failed[name] = ended.how if ended.timed_out or ended.status else "it did not run"
        print(f"   FAILED {name}: {part.failed[name]}")
        for line in ended.output.splitlines()[-SHOWN_LINES:]:
            print(f"      {line}")
    elif skips:
        for skip in skips:
            part.skip(skip.replace(name, "tests"))
    else:
        part.passed += 1


def _join(folder: Path, log: Path) -> None:
    with log.open("w") as all_of_them:
        for file in sorted(folder.glob("*.log")):
            all_of_them.write(f"######## {file.stem}\n{file.read_text(errors='replace')}\n")
            file.unlink()
    folder.rmdir()
