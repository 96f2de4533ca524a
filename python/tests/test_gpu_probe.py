"""What is recorded of a machine with GPUs before its tests: e2e/gpu/kvferry_gpu/probe.py."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "e2e" / "gpu"))
    return importlib.import_module("kvferry_gpu.probe")


def test_the_probe_records_module_library_and_folder_with_what_the_driver_says(probe: Any, tmp_path: Path) -> None:
    packed, out = tmp_path / "packed", tmp_path / "out"
    (packed / "bin").mkdir(parents=True)
    out.mkdir()
    program = packed / "bin" / "gpu_probe"
    program.write_text(f'#!{sys.executable}\nprint(\'a line\')\nprint(\'{{"gpus": [{{"name": "H100"}}]}}\')\n')
    program.chmod(0o755)
    found = probe.probe(packed, out)
    kept = json.loads((out / "probe.json").read_text())
    assert kept == found
    assert kept["gpus"] == [{"name": "H100"}] and "failed" not in kept
    machine, folder = kept["machine"], kept["folder"]
    assert machine["kernel_module"]["flavour"] in ("open", "closed", "none")
    assert machine["libcufile"] == "" or Path(machine["libcufile"]).exists()
    assert set(folder) == {"path", "file_system", "mounted_from", "block_device", "direct_io"}
    assert folder["path"] == str(out) and folder["file_system"] and folder["direct_io"]
    assert not folder["block_device"] or (Path("/sys/class/block") / folder["block_device"]).exists()
    assert sorted(file.name for file in out.iterdir() if file.name.startswith("direct-io")) == []


@pytest.mark.parametrize(
    ("line", "flavour"),
    [
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs-builder)", "open"),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 23 2025", "closed"),
        ("", "none"),
    ],
)
def test_open_and_closed_kernel_modules_are_told_apart(probe: Any, line: str, flavour: str) -> None:
    assert probe._kernel_module(f"{line}\nGCC version: 13") == {"flavour": flavour, "version": line}


def test_a_folders_file_system_is_found_by_its_device(probe: Any) -> None:
    mounts = (
        "22 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw\n"
        "23 22 0:21 / /dev/shm rw - tmpfs tmpfs rw\n"
        "24 22 0:50 / /mnt/kv rw - nfs4\n"
    )
    assert probe._mount(mounts, "259:2") == ("ext4", "/dev/nvme0n1p2")
    assert probe._mount(mounts, "0:21") == ("tmpfs", "tmpfs")
    assert probe._mount(mounts, "0:50") == ("nfs4", "")
    assert probe._mount(mounts, "8:1") == ("", "")


def test_a_folder_without_direct_io_says_why(probe: Any, tmp_path: Path) -> None:
    assert "No such file" in probe._direct_io(tmp_path / "missing")
    # A file system in memory may refuse it, or not.
    assert probe._direct_io(tmp_path)
    assert list(tmp_path.iterdir()) == []
