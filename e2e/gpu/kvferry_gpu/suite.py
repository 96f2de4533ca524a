"""The tests in Python, with the wheel that users get. Each file of tests is a process of its own."""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import process, wheel
from .report import Part

#: Files of tests at once: they wait more than they compute.
FILES_AT_ONCE = 3
#: The longest time of a file, in seconds.
FILE_SECONDS = 400
#: Lines of a failure that are shown at once. The log has all.
SHOWN_LINES = 20


def run(part: Part, options: argparse.Namespace, out: Path, until: float) -> None:
    """Runs all tests with this Python."""
    site = wheel.installed(part, options, out)
    if site is None:
        return
    files = sorted((options.packed / "tests").glob("test_*.py"))

    def one(file: Path) -> tuple[Path, process.Ended]:
        return file, _run_file(file, site, options, out, until)

    with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        for file, ended in pool.map(one, files):
            _judge(part, file, out, ended)


def _run_file(file: Path, site: Path, options: argparse.Namespace, out: Path, until: float) -> process.Ended:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v", "--tb=short", "--durations=5", "-s"]
    command += [f"--rounds={options.rounds}", f"--stress-seconds={options.stress_seconds}"]
    command += ["--rootdir", str(file.parent), "-c", str(file.parent / "pytest.ini"), str(file)]
    results = out / f"{file.stem}.jsonl"
    results.unlink(missing_ok=True)
    environment = {"PYTHONPATH": str(site), "KVFERRY_GPU_RESULTS": str(results)}
    limit = min(FILE_SECONDS, until - time.monotonic())
    return process.run(command, out / f"{file.stem}.log", limit, environment)


def _judge(part: Part, file: Path, out: Path, ended: process.Ended) -> None:
    lines = ended.output.splitlines()
    part.said += [line.split("FIGURE: ", 1)[1] for line in lines if "FIGURE: " in line]
    results = out / f"{file.stem}.jsonl"
    tests = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    for test in tests:
        if test["outcome"] == "failed":
            why = test["why"].splitlines()
            told = next((line.removeprefix("E").strip() for line in why if line.startswith("E ")), "failed")
            part.failed[test["test"]] = told[:200]
            print(f"   FAILED {test['test']}")
            for line in why[-SHOWN_LINES:]:
                print(f"      {line}")
        elif test["outcome"] == "skipped":
            part.skip(test["why"].removeprefix("Skipped: "))
        else:
            part.passed += 1
    if ended.timed_out:
        part.failed[file.name] = f"{ended.how}, after {len(tests)} tests"
    elif ended.status not in (0, 1) or (ended.status == 1 and not any(test["outcome"] == "failed" for test in tests)):
        # With status 1, tests have failed, and those are listed already.
        part.failed[file.name] = f"{ended.how}: {' '.join(lines[-3:])[:300]}"
    elif not tests:
        reason = next((line.split("SKIPPED: ", 1)[1] for line in lines if "SKIPPED: " in line), "no test ran")
        part.skip(reason)
