"""Compares two builds of the command on this machine: `make bench-builds BEFORE=v0.1.0`.

In each round both builds run the same benches, one after the other and in random order, and a figure is the ratio of
theirs in that round, with the worse of two builds above 1 whatever the unit. A figure is worse if its median is above
--limit and three quarters of its rounds are above 1; if only its median is, it is unclear: measure it again with more
rounds. Exit status 1 if one is worse.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
CACHE = Path(os.environ.get("KVFERRY_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "kvferry")
BENCHES = {"transfers": ["--quick"], "handoff": ["--quick"]}
# Of all else, such as milliseconds and bytes, less is better.
MORE_IS_BETTER = ("GB/s", "MB/s", "per s", "%")
# Ratio to zero. No figure of two builds comes near it.
BEYOND = 1000.0

Figures = dict[str, tuple[str, float]]


def build(wanted: str) -> Path:
    """The command of a build: a path to one, or a revision, which is built in the cache."""
    if "/" in wanted and Path(wanted).is_file():
        return Path(wanted).resolve()
    parsed = subprocess.run(
        ["git", "rev-parse", "--verify", "--quiet", wanted + "^{commit}"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    if parsed.returncode:
        raise SystemExit(f"{wanted} is neither a file nor a revision: give a path with a slash in it, or a commit")
    revision = parsed.stdout.strip()
    builds = CACHE.expanduser() / "builds"
    command = builds / f"kvferry-{revision}"
    if command.is_file():
        return command
    print(f"building {wanted} ({revision[:8]}), some ten minutes on two cores", file=sys.stderr)
    source = builds / "source"
    source.mkdir(parents=True, exist_ok=True)
    # One folder for all builds, which share what they depend on.
    for old in source.iterdir():
        if old.name != "target":
            subprocess.run(["rm", "-rf", old], check=True)
    # With the time of now (`m`): cargo takes files that are older than what it has built for unchanged.
    with subprocess.Popen(["git", "archive", revision], cwd=ROOT, stdout=subprocess.PIPE) as archive:
        subprocess.run(["tar", "-xm"], cwd=source, stdin=archive.stdout, check=True)
    if archive.returncode:
        raise SystemExit(f"git archive {revision} has failed")
    cargo = ["cargo", "build", "--quiet", "--locked", "--profile", "dist", "-p", "kvferry-cli"]
    environment = os.environ | {"CARGO_TARGET_DIR": str(source / "target")}
    subprocess.run(cargo, cwd=source, env=environment, check=True)
    built = source / "target/dist/kvferry"
    built.rename(command)
    return command


def measure(command: Path, bench: str, options: list[str]) -> Figures:
    """kvferry's figures of one run, by what they are of: the unit and the median."""
    arguments = [str(command), "bench", bench, *options, "--json", "--quiet"]
    # Status 1 says that a bound is missed, which is not the question here.
    done = subprocess.run(arguments, stdout=subprocess.PIPE, text=True)
    if done.returncode not in (0, 1):
        raise SystemExit(f"{' '.join(arguments)} has ended with status {done.returncode}")
    return figures(json.loads(done.stdout))


def figures(report: dict) -> Figures:
    found = {}
    for row in report["rows"]:
        first = row["figures"][0]
        if first.get("median") is not None:
            names = [row["part"], row.get("transport"), row["work"].strip()]
            found[" · ".join(name for name in names if name)] = (row["unit"], first["median"])
    return found


def worse(unit: str, before: float, after: float) -> float:
    """How many times worse `after` is; below 1 if it is better. At most BEYOND, and at least its inverse."""
    over, under = (before, after) if unit in MORE_IS_BETTER else (after, before)
    if over == under:
        return 1.0
    ratio = over / under if under else BEYOND
    return min(max(ratio, 1 / BEYOND), BEYOND)


def verdict(rounds: list[float], limit: float) -> str:
    if statistics.median(rounds) <= limit:
        return "ok"
    above = sum(it > 1 for it in rounds)
    return "WORSE" if above >= 0.75 * len(rounds) else "unclear"


def table(rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [it.rjust(width) for it, width in zip(row, widths, strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells[1:]]).rstrip())
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="bench/builds/run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", help="revision, or path of the command, that is compared with")
    parser.add_argument("after", nargs="?", default="HEAD", help="the other one (default: %(default)s)")
    parser.add_argument(
        "--rounds", type=int, default=7, help="rounds; seven or more to judge by (default: %(default)s)"
    )
    parser.add_argument("--limit", type=float, default=1.03, help="median that is still as good (default: %(default)s)")
    parser.add_argument("--bench", action="append", choices=BENCHES, help="a bench to run (default: all of these)")
    parser.add_argument("--options", help='options of the bench instead of --quick, such as "--quick --only latency"')
    parser.add_argument("--json", action="store_true", help="print all ratios as JSON")
    options = parser.parse_args()
    if options.options and len(options.bench or []) != 1:
        parser.error("--options needs one --bench: each bench has its own")
    builds = {"before": build(options.before), "after": build(options.after)}
    benches = {it: options.options.split() if options.options else BENCHES[it] for it in options.bench or BENCHES}
    ratios: dict[str, list[float]] = {}
    units: dict[str, str] = {}
    seen: dict[str, dict[str, list[float]]] = {}
    for number in range(options.rounds):
        for bench, arguments in benches.items():
            print(f"round {number + 1} of {options.rounds}: {bench}", file=sys.stderr)
            found = {}
            for which in random.sample(list(builds), 2):
                found[which] = measure(builds[which], bench, arguments)
            for name in found["before"].keys() & found["after"].keys():
                (unit, before), (other, after) = found["before"][name], found["after"][name]
                if unit == other:
                    key = f"{bench}: {name}"
                    ratios.setdefault(key, []).append(worse(unit, before, after))
                    units[key] = unit
                    both = seen.setdefault(key, {"before": [], "after": []})
                    both["before"].append(before)
                    both["after"].append(after)
    if not ratios:
        raise SystemExit("the two builds have no figure in common")
    verdicts = {key: verdict(rounds, options.limit) for key, rounds in ratios.items()}
    if options.json:
        print(
            json.dumps(
                {
                    key: {"unit": units[key], "worse": ratios[key], "verdict": verdicts[key], **seen[key]}
                    for key in ratios
                }
            )
        )
    else:
        rows = [("", "before", "after", "unit", "worse", "rounds", "")]
        for key, rounds in ratios.items():
            least, most = min(rounds), max(rounds)
            medians = [f"{statistics.median(seen[key][it]):.4g}" for it in ("before", "after")]
            ratio = f"{statistics.median(rounds):.3f}"
            rows.append((key, *medians, units[key], ratio, f"{least:.2f} to {most:.2f}", verdicts[key]))
        print(table(rows))
        count = {it: list(verdicts.values()).count(it) for it in ("ok", "unclear", "WORSE")}
        print(f"\nas good as before: {count['ok']}, unclear: {count['unclear']}, worse: {count['WORSE']}")
    return 1 if "WORSE" in verdicts.values() else 0


if __name__ == "__main__":
    sys.exit(main())
