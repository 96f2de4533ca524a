"""The demo's claims."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = [sys.executable, str(Path(__file__).parents[1] / "trtllm_demo.py")]


@pytest.mark.parametrize("load", ["sync", "async"])
def test_the_demo_loads_nothing_then_all_then_all_but_what_follows_the_flipped_byte(load: str, tmp_path: Path) -> None:
    command = [*DEMO, "--prompts", "4", "--load", load]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    blocks = re.search(r"(\d+) full blocks", ended.stdout)
    rows = re.findall(r"^(\w+) run.*?(\d+) +(\d+) +equal$", ended.stdout, re.M)
    assert blocks is not None
    assert [name for name, _, _ in rows] == ["first", "second", "third"]
    loaded = [int(count) for _, count, _ in rows]
    assert loaded[0] == 0
    assert loaded[1] == int(blocks[1])
    assert 0 < loaded[2] < loaded[1]


def test_the_demo_fails_where_a_directory_is_not_new(tmp_path: Path) -> None:
    command = [*DEMO, "--prompts", "2", "--directory", str(tmp_path / "kv")]
    assert subprocess.run(command, capture_output=True, timeout=120).returncode == 0
    again = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert again.returncode == 1
    assert "WRONG: 0 blocks must be loaded" in again.stdout


def test_the_demo_prints_json(tmp_path: Path) -> None:
    command = [*DEMO, "--prompts", "2", "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    report = json.loads(ended.stdout)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    loaded = [run["loaded_blocks"] for run in report["runs"]]
    assert loaded[:2] == [0, report["full_blocks"]]
    assert all(run["generated_equal"] and not run["complaint"] for run in report["runs"])


@pytest.mark.parametrize("load", ["sync", "async"])
def test_a_process_hands_prompts_to_another_and_is_killed(load: str) -> None:
    command = [*DEMO, "--handoff", "--prompts", "4", "--load", load, "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    runs = json.loads(ended.stdout)["runs"]
    assert [run["name"] for run in runs] == ["prefill", "decode", "prefill", "decode, prefill was killed"]
    moved = [run["moved_blocks"] for run in runs]
    assert moved[0] == moved[1] > 0 < moved[2]
    assert moved[3] == 0
    assert all(run["generated_equal"] and not run["complaint"] for run in runs)
