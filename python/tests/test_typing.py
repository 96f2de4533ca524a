"""The stubs say what the native module has, and the package type-checks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mypy")
ROOT = Path(__file__).parents[2]


def run(*args: str, cwd: Path) -> str:
    ran = subprocess.run([sys.executable, *args], capture_output=True, text=True, cwd=cwd, timeout=150, check=False)
    return "" if ran.returncode == 0 else ran.stdout + ran.stderr


def test_the_stubs_are_those_of_the_native_module(tmp_path: Path) -> None:
    # From elsewhere, so that the installed package is looked at and not the checkout's.
    assert run("-m", "mypy.stubtest", "kvferry", "--concise", "--ignore-disjoint-bases", cwd=tmp_path) == ""


def test_the_package_is_strictly_typed() -> None:
    assert run("-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), cwd=ROOT) == ""


def test_programs_that_use_it_are_checked(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import kvferry\n"
        "agent = kvferry.Agent('a', timeout=1.5)\n"
        "region = agent.register(bytearray(8), access='r')\n"
        "peer = agent.peer(agent.address)\n"
        "moved: int = peer.write([region.addr], [1], 8, notify=('n', b'm')).nbytes\n"
        "async def go() -> int: return (await peer.read_async([1], [1], [8])).nbytes\n"
        "agent.register(bytearray(8), access='x')  # wrong\n"
        "peer.write([1], [1], [1], timeout='soon')  # wrong\n"
    )
    said = run("-m", "mypy", "--strict", str(program), cwd=tmp_path)
    wrong = [line for line in said.splitlines() if "error:" in line]
    assert len(wrong) == 2, said
    assert ":7:" in wrong[0]
    assert ":8:" in wrong[1]
