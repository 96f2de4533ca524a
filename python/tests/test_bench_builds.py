"""bench/builds, with programs in the place of builds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parents[2] / "bench/builds/run"


def build(folder: Path, name: str, *figures: tuple[str, str, float]) -> Path:
    """A program that prints a report with these figures: work, unit and median."""
    rows = [
        {"part": "part", "transport": "tcp", "work": work, "unit": unit, "figures": [{"who": "kvferry", "median": it}]}
        for work, unit, it in figures
    ]
    program = folder / name
    program.write_text(f"#!{sys.executable}\nprint({json.dumps({'rows': rows})!r})\n")
    program.chmod(0o755)
    return program


def compare(before: Path, after: Path, *options: str) -> tuple[int, str]:
    arguments = [str(RUN), str(before), str(after), "--bench", "transfers", *options]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, env={"PYTHON": sys.executable})
    return done.returncode, done.stdout or done.stderr


@pytest.mark.parametrize(
    ("unit", "before", "after", "worse"),
    [
        ("GB/s", 10, 9, True),
        ("GB/s", 10, 11, False),
        ("per s", 100, 90, True),
        ("µs", 10, 11, True),
        ("µs", 10, 9, False),
        ("KiB", 10, 10.2, False),
        ("KiB", 10, 11, True),
        ("%", 99, 90, True),
        ("%", 0, 3, False),
        ("blocks", 0, 3, True),
        ("blocks", 3, 0, False),
        ("blocks", 0, 0, False),
    ],
)
def test_a_figure_is_worse_that_is_lower_of_a_rate_or_higher_of_anything_else(
    tmp_path: Path, unit: str, before: float, after: float, worse: bool
) -> None:
    builds = [build(tmp_path, name, ("work", unit, it)) for name, it in (("before", before), ("after", after))]
    status, text = compare(*builds, "--json", "--rounds", "2")
    assert status == int(worse)
    found = json.loads(text)["transfers: part · tcp · work"]
    assert found["verdict"] == ("WORSE" if worse else "ok")
    assert found["before"] == [before] * 2
    assert found["after"] == [after] * 2


def test_figures_that_one_build_lacks_are_left_out_and_the_table_aligns(tmp_path: Path) -> None:
    before = build(
        tmp_path, "before", ("a long name of some work", "ms", 1.0), ("gone", "ms", 1.0), ("other", "ms", 2.0)
    )
    after = build(tmp_path, "after", ("a long name of some work", "ms", 1.0), ("new", "ms", 1.0), ("other", "µs", 2.0))
    status, text = compare(before, after, "--rounds", "1")
    assert status == 0
    lines = text.splitlines()
    assert len([line for line in lines if line.startswith("transfers")]) == 1
    assert lines[0].index("unit") + 4 == lines[1].index("ms") + 2
    assert lines[-1] == "as good as before: 1, unclear: 0, worse: 0"
    status, text = compare(before, build(tmp_path, "none"), "--rounds", "1")
    assert status == 1
    assert text.endswith("the two builds have no figure in common\n")


def test_a_build_that_fails_or_does_not_exist_is_named(tmp_path: Path) -> None:
    good = build(tmp_path, "good", ("work", "ms", 1.0))
    bad = tmp_path / "bad"
    bad.write_text("#!/bin/sh\nexit 3\n")
    bad.chmod(0o755)
    status, text = compare(good, bad, "--rounds", "1")
    assert status == 1
    assert f"{bad} bench transfers --quick --json --quiet has ended with status 3" in text
    status, text = compare(tmp_path / "nothing", good)
    assert status == 1
    assert "is neither a file nor a revision" in text


def test_a_median_above_the_limit_is_unclear_where_rounds_disagree(tmp_path: Path) -> None:
    good = build(tmp_path, "good", ("work", "ms", 1.0))
    # Takes turns, by what it finds in a file.
    unsteady = tmp_path / "unsteady"
    row = {"part": "part", "transport": "tcp", "work": "work", "unit": "ms"}
    report = {"rows": [row | {"figures": [{"who": "kvferry", "median": 0}]}]}
    unsteady.write_text(
        f"#!{sys.executable}\nimport json, pathlib\ncount = pathlib.Path({str(tmp_path / 'count')!r})\n"
        "with count.open('a') as file: file.write('.')\n"
        f"report = {report!r}\n"
        "report['rows'][0]['figures'][0]['median'] = [1.2, 0.9, 1.2][count.stat().st_size % 3]\n"
        "print(json.dumps(report))\n"
    )
    unsteady.chmod(0o755)
    status, text = compare(good, unsteady, "--rounds", "3", "--json")
    assert status == 0
    assert json.loads(text)["transfers: part · tcp · work"]["verdict"] == "unclear"
