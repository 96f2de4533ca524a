"""`run [--out FOLDER] [--limit SECONDS] [--only PART...]`: all tests of GPUs, on this machine's GPU.

Without a GPU nothing is measured; the program reports that, and it is no failure.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

from . import engine, programs, report, suite
from .probe import in_short, probe
from .report import Part


def main() -> int:
    options = _options()
    out: Path = options.out.resolve()
    began = time.monotonic()
    until = began + options.limit
    work = _parts(options, out, until)
    unknown = set(options.only or ()) - {"probe", *work}
    if unknown:
        print(f"no such part: {' '.join(sorted(unknown))}; there are {' '.join(['probe', *work])}", file=sys.stderr)
        return 2
    if not (options.packed / "bin").is_dir():
        print(f"{options.packed} has no programs: `make gpu-pack` builds target/gpu, start its `run`", file=sys.stderr)
        return 2
    out.mkdir(parents=True, exist_ok=True)
    print(f"results go to {out}; {options.limit:.0f} s at most")
    found = probe(options.packed, out)
    print(f"probe ({time.monotonic() - began:.0f} s): {in_short(found)}")
    if "failed" in found:
        # A driver that ends or hangs the probe is a failure: the machine may have a GPU.
        print(f"FAILED: {found['failed']}")
        report.write(out, found, [])
        return 1
    if "unavailable" in found:
        print(f"NOT MEASURED: {found['unavailable']}")
        report.write(out, found, [])
        return 0
    parts: list[Part] = []
    for name, run in work.items():
        if options.only and name not in options.only:
            continue
        part = Part(name)
        parts.append(part)
        at = time.monotonic()
        print(f"== {name} ({at - began:.0f} s so far)")
        if until - at < 10:
            part.not_run = "no time was left"
        else:
            try:
                run(part)
            except Exception as error:  # Another part may work.
                part.failed["the part itself"] = repr(error)
        part.seconds = time.monotonic() - at
        print(f"== {name}: {part.outcome}, {part.passed} passed, {part.seconds:.0f} s")
        report.write(out, found, parts)
    print()
    for part in parts:
        for line in part.said:
            print(f"{part.name}: {line}")
    print(report.table(parts))
    print(f"{time.monotonic() - began:.0f} s")
    return 1 if any(part.failed or part.not_run for part in parts) else 0


def _parts(options: argparse.Namespace, out: Path, until: float) -> dict[str, Callable[[Part], None]]:
    binaries = options.packed / "bin"

    def tests(program: str, wanted: str, jobs: int = options.jobs, **environment: str) -> Callable[[Part], None]:
        return lambda part: programs.run(part, binaries / program, wanted, out, jobs, until, environment)

    by_method = {
        f"by-{method}": tests("gpu", "^(order|stress|suite)::", KVFERRY_GPU_METHOD=method)
        for method in ("kernel", "gather", "copy")
    }
    return {
        "driver": tests("cuda", "^device::"),
        "transfers": tests("gpu", "^(bytes|order|refused|faults|ptx|kernel|calibrate)::"),
        "stress": tests("gpu", "^stress::", jobs=2),
        "suite": tests("gpu", "^suite::"),
        "faults": tests("gpu", "^hardware::", jobs=1),
        "python": lambda part: suite.run(part, options, out, until),
        "engine": lambda part: engine.run(part, options, out, until),
        **by_method,
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="run", description="All tests of GPUs, on this machine's GPU.")
    parser.add_argument("--packed", type=Path, required=True, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), metavar="FOLDER", help="where results go")
    parser.add_argument(
        "--limit", type=float, default=590, metavar="SECONDS", help="tests that would start later do not run (590)"
    )
    parser.add_argument("--only", nargs="+", metavar="PART", help="these parts; `probe` always runs")
    parser.add_argument("--jobs", type=int, default=8, help="tests at once (8)")
    parser.add_argument("--rounds", type=int, default=10_000, help="rounds of the stress in Python (10000)")
    parser.add_argument(
        "--stress-seconds", type=float, default=60, help="the most that each stress in Python takes (60)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
