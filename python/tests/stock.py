"""An environment with stock Mooncake, built once, outside the checkout."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

NAME = "mooncake-transfer-engine-non-cuda"
VERSION = "0.3.13.post1"
SYSTEM_PACKAGES = ["libibverbs1", "libnuma1", "libcurl4"]

# Mooncake logs every transfer otherwise.
QUIET = {"GLOG_minloglevel": "3", "MC_LOG_LEVEL": "ERROR"}


class UnavailableError(Exception):
    """Stock Mooncake is not available, and why."""


def cache_root() -> Path:
    named = os.environ.get("KVFERRY_CACHE")
    if named:
        return Path(named).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "kvferry"


def _run(*command: str) -> None:
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if ran.returncode != 0:
        last = (ran.stderr.strip() or ran.stdout.strip() or "no output").splitlines()[-1]
        raise UnavailableError(f"`{' '.join(command[:3])} …` failed: {last}")


def _imports(python: Path) -> str:
    """Why the engine can't be imported; empty if it can."""
    ran = subprocess.run([python, "-c", "import mooncake.engine"], capture_output=True, text=True, check=False)
    return "" if ran.returncode == 0 else (ran.stderr.strip() or "it crashes").splitlines()[-1]


@cache
def python(version: str = VERSION) -> str:
    """The interpreter that has stock Mooncake."""
    folder = cache_root() / f"stock-{version}-py{sys.version_info.major}{sys.version_info.minor}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    interpreter = folder / "bin" / "python"
    try:
        with open(folder.with_name(folder.name + ".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / "complete").exists():
                shutil.rmtree(folder, ignore_errors=True)
                _run(sys.executable, "-m", "venv", str(folder))
                _run(
                    str(interpreter),
                    "-m",
                    "pip",
                    "install",
                    "--quiet",
                    "--disable-pip-version-check",
                    f"{NAME}=={version}",
                )
                (folder / "complete").touch()
            why = _imports(interpreter)
            if why and os.geteuid() == 0 and shutil.which("apt-get"):
                _run("apt-get", "update", "-qq")
                _run("apt-get", "install", "-y", "-qq", "--no-install-recommends", *SYSTEM_PACKAGES)
                why = _imports(interpreter)
    except (OSError, subprocess.SubprocessError) as error:
        why = str(error)
    if why:
        raise UnavailableError(f"mooncake.engine can't be imported: {why} (it needs {', '.join(SYSTEM_PACKAGES)})")
    return str(interpreter)
