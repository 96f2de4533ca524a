""".ci/parts, with a program in the place of make."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from kit import PATIENCE, eventually

PARTS = Path(__file__).parents[2] / ".ci/parts"
# What a target does, by the beginning of its name. Each prints a line at its beginning and one at its end.
MAKE = f"""#!{sys.executable}
import os, pathlib, signal, sys, time
folder, (option, target) = pathlib.Path(__file__).parent, sys.argv[1:]
assert option == "--no-print-directory"
with (folder / "made").open("a") as made:
    made.write(target + "\\n")
print(target, "begins", flush=True)
(folder / target).write_text(str(os.getpid()))
if target.startswith("meets-"):
    # The target that is named must run at the same time.
    deadline = time.monotonic() + {PATIENCE}
    while not (folder / target.removeprefix("meets-")).exists():
        assert time.monotonic() < deadline, "it has not begun"
        time.sleep(0.001)
elif target.startswith("stays"):
    signal.pause()
elif target.startswith("shell-killed"):
    os.kill(os.getppid(), signal.SIGKILL)
print(target, "ends", file=sys.stderr, flush=True)
sys.exit(3 if target.startswith("bad") else 0)
"""


@pytest.fixture
def make(tmp_path: Path) -> Path:
    program = tmp_path / "make"
    program.write_text(MAKE)
    program.chmod(0o755)
    return program


def environment(make: Path) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "MAKE": str(make)}


def is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    # Its new parent may not have taken its exit status yet.
    return stat.rpartition(")")[2].split()[0] != "Z"


def parts(make: Path, *groups: str) -> tuple[int, list[str], list[tuple[str, str]]]:
    """The exit status, the lines before the last ones, and what these say of each target."""
    done = subprocess.run(
        [str(PARTS), *groups],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=2 * PATIENCE,
        env=environment(make),
    )
    output, _, ends = done.stdout.partition("\n== ")
    total, *lines = ends.splitlines()
    named = [re.fullmatch(r" {3}(\S+) +(passed|FAILED) +\d+ s", line) for line in lines]
    assert all(named), done.stdout
    found = [(it[1], it[2]) for it in named if it is not None]
    passed = sum(outcome == "passed" for _, outcome in found)
    assert re.fullmatch(rf"{passed} of {len(found)} parts passed, \d+ s", total), done.stdout
    return done.returncode, output.splitlines(), found


def test_parts_that_all_pass_are_made_in_their_order_with_a_line_each(make: Path) -> None:
    status, output, found = parts(make, "one", "two", "three")
    assert status == 0
    assert found == [("one", "passed"), ("two", "passed"), ("three", "passed")]
    assert output == [f"{name} {what}" for name in ("one", "two", "three") for what in ("begins", "ends")]


@pytest.mark.parametrize("groups", [("bad", "one", "two"), ("one", "bad", "two"), ("one", "two", "bad")])
def test_a_part_that_fails_is_named_and_the_others_are_made_all_the_same(make: Path, groups: tuple[str, ...]) -> None:
    status, _, found = parts(make, *groups)
    assert status == 1
    assert found == [(name, "FAILED" if name == "bad" else "passed") for name in groups]
    assert (make.parent / "made").read_text().split() == list(groups)


@pytest.mark.parametrize("group", ["bad+one+two", "one+bad+two", "one+two+bad", "bad-1+bad-2+bad-3"])
def test_each_target_of_a_group_has_its_own_outcome(make: Path, group: str) -> None:
    status, _, found = parts(make, "first", group, "after")
    assert status == 1
    names = ["first", *group.split("+"), "after"]
    assert sorted(found) == sorted((name, "FAILED" if name.startswith("bad") else "passed") for name in names)
    assert (found[0], found[-1]) == (("first", "passed"), ("after", "passed"))


def test_targets_of_a_group_run_at_once_and_the_output_of_each_is_in_one_piece(make: Path) -> None:
    # The first two wait for the third one to begin, and that one waits for the first.
    status, output, found = parts(make, "meets-last+meets-meets-last+last")
    assert status == 0
    assert [name for name, _ in found] == ["last", "meets-last", "meets-meets-last"]
    assert output == [f"{name} {what}" for name, _ in found for what in ("begins", "ends")]
    (make.parent / "last").unlink()
    (make.parent / "meets-meets-last").unlink()
    status, output, found = parts(make, "last+meets-last", "meets-meets-last+one")
    assert status == 0
    assert [name for name, _ in found] == ["meets-last", "last", "one", "meets-meets-last"]


def test_a_target_whose_process_is_killed_has_failed(make: Path) -> None:
    status, _, found = parts(make, "shell-killed+one", "two")
    assert status == 1
    assert found == [("one", "passed"), ("shell-killed", "FAILED"), ("two", "passed")]


def test_a_run_that_is_ended_leaves_no_target_beside_another_one(make: Path) -> None:
    with subprocess.Popen(
        [str(PARTS), "stays-beside+stays-last"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment(make),
        start_new_session=True,
    ) as ran:
        names = ("stays-beside", "stays-last")
        eventually(lambda: all((make.parent / name).exists() and (make.parent / name).read_text() for name in names))
        beside, last = (int((make.parent / name).read_text()) for name in names)
        # As the terminal does: to all processes of its group, which the target beside the last one is not in.
        os.killpg(ran.pid, signal.SIGTERM)
        assert ran.wait(PATIENCE) != 0
    try:
        eventually(lambda: not any(is_running(pid) for pid in (beside, last)))
    finally:
        for pid in (beside, last):
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)
