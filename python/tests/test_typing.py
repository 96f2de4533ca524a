"""The stubs match the native module, and the package type-checks."""

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


def test_the_stubs_match_the_native_module(tmp_path: Path) -> None:
    # `kvferry.vllm` and `kvferry.sglang` have no stubs and cannot be imported without their engines.
    without = tmp_path / "without"
    without.write_text(r"kvferry\.(vllm|sglang)(\..*)?")
    options = ["--concise", "--ignore-disjoint-bases", "--mypy-config-file", str(ROOT / "pyproject.toml")]
    # In another folder, so that stubtest finds the installed package and not the checkout.
    assert run("-m", "mypy.stubtest", "kvferry", *options, "--allowlist", str(without), cwd=tmp_path) == ""


def test_the_package_passes_strict_type_checking() -> None:
    assert run("-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), cwd=ROOT) == ""


@pytest.fixture(scope="session")
def strict(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """The arguments of a strict mypy. What it finds in other packages is kept for the next test."""
    return "-m", "mypy", "--strict", "--cache-dir", str(tmp_path_factory.mktemp("mypy"))


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.14"])
def test_type_checkers_know_arrays_of_numpy_as_memory(version: str, strict: tuple[str, ...], tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import kvferry\n"
        "import numpy as np\n"
        "with kvferry.Agent() as agent:\n"
        "    kv = np.zeros((4, 8), np.float16)\n"
        "    agent.register(kv, 'r')\n"
        "    agent.register_batch([kv, np.empty(8, np.uint8), bytearray(8), memoryview(bytearray(8))])\n"
    )
    assert run(*strict, "--python-version", version, str(program), cwd=tmp_path) == ""


def test_type_checkers_refuse_wrong_arguments(strict: tuple[str, ...], tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    lines = (
        "import kvferry\n"
        "agent = kvferry.Agent('a', timeout=1.5)\n"
        "region = agent.register(bytearray(8), access='r')\n"
        "peer = agent.peer(agent.address)\n"
        "nbytes: int = peer.write([region.addr], [1], 8, notify=('n', b'm')).nbytes\n"
        "async def go() -> int: return (await peer.read_async([1], [1], [8])).nbytes\n"
        "stats: kvferry.TransferStats = peer.read(kvferry.Batch(), timeout=1, notify=kvferry.Notification('n'))\n"
        "running: kvferry.Transfer = peer.write_async((1, 2), (3, 4), 8, streams=2)\n"
        "agent.register((4096, 8))\n"
        "space = kvferry.Store(agent, ['a', 'b'], 1 << 30).space('model', shard=(1, 2))\n"
        "count: int = space.get([b'hash'], kvferry.Blocks(region, [0], 8))\n"
        "async def put() -> int: return (await space.put_async([b'hash'], [[(region, 0, 8)]])).stored\n"
        "cold = kvferry.Store(agent, 'a', 1, objects='s3://bucket', object_options={'concurrency': 4})\n"
        "here: int = space.prefetch([b'hash'])\n"
        "kept = kvferry.RetentionConfig([(0, 16, 90, 1000), (16, None, 50)], directory='kv')\n"
        "retained: kvferry.RetentionConfig = kvferry.RetentionConfig.from_bytes(kept.to_bytes())\n"
        "kvferry.RetentionConfig([(0, 16)])  # wrong\n"
        "kvferry.RetentionConfig(transfer_mode='nvme')  # wrong\n"
        "async def bring() -> int: return await space.prefetch_async([b'hash'])\n"
        "space.lookup(['hash'])  # wrong\n"
        "space.prefetch('hash')  # wrong\n"
        "space.put([b'hash'], [region])  # wrong\n"
        "agent.register(bytearray(8), access='x')  # wrong\n"
        "agent.register('text')  # wrong\n"
        "peer.write([1], [1], [1], timeout='soon')  # wrong\n"
        "peer.write([1], [1])  # wrong\n"
        "peer.write(kvferry.Batch(), [1], [1])  # wrong\n"
        "peer.write(['1'], [1], [1])  # wrong\n"
    ).splitlines()
    program.write_text("\n".join(lines))
    output = run(*strict, str(program), cwd=tmp_path)
    refused = [int(line.split(":")[1]) for line in output.splitlines() if "error:" in line]
    assert refused == [number for number, line in enumerate(lines, 1) if line.endswith("# wrong")], output
