"""`python -m kvferry_peers.environment`: the interpreter that has the other engines, built once per machine."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

NIXL = "nixl-cu12==1.5.1"
REQUIREMENTS = Path(__file__).parent.parent / "requirements.txt"
SYSTEM_PACKAGES = ("libibverbs1", "libnuma1", "libcurl4")
IMPORTS = "import mooncake.engine, nixl_cu12._api"
# The wheels are a quarter of a gigabyte.
PATIENCE_S = 900


class UnavailableError(Exception):
    """The engines can't be had here; the words say why."""


def cache_root() -> Path:
    named = os.environ.get("KVFERRY_CACHE")
    if named:
        return Path(named).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "kvferry"


def run(*command: str) -> None:
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise UnavailableError(f"`{' '.join(command[:5])} …` failed: {error}") from error
    if ran.returncode != 0:
        last = (ran.stderr.strip() or ran.stdout.strip() or "no output").splitlines()[-1]
        raise UnavailableError(f"`{' '.join(command[:5])} …` failed: {last}")


def why_not(interpreter: Path) -> str:
    """Why the engines can't be imported; empty if they can."""
    # Left at once: with UCX's libraries loaded, the ordinary way out may crash.
    code = f"import os; {IMPORTS}; os._exit(0)"
    ran = subprocess.run([interpreter, "-c", code], capture_output=True, text=True, check=False)
    return "" if ran.returncode == 0 else (ran.stderr.strip() or f"exit status {ran.returncode}").splitlines()[-1]


def recipe() -> str:
    """Another one means that the environment is built anew."""
    return hashlib.sha256("\0".join([NIXL, REQUIREMENTS.read_text(), sys.version]).encode()).hexdigest()


def build(folder: Path) -> None:
    say(f"installing Mooncake and NIXL into {folder} (half a gigabyte, once per machine)")
    shutil.rmtree(folder, ignore_errors=True)
    run(sys.executable, "-m", "venv", str(folder))
    pip = (str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "-q")
    run(*pip, "-r", str(REQUIREMENTS))
    run(*pip, "--no-deps", NIXL)
    (folder / "ready").write_text(recipe())


def interpreter() -> Path:
    folder = cache_root() / f"peers-py{sys.version_info.major}{sys.version_info.minor}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    python, ready = folder / "bin" / "python", folder / "ready"
    with open(folder.with_name(folder.name + ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not ready.exists() or ready.read_text() != recipe():
            build(folder)
        why = why_not(python)
        if why and os.geteuid() == 0 and shutil.which("apt-get"):
            say(f"{why}: installing {', '.join(SYSTEM_PACKAGES)}")
            run("apt-get", "update", "-qq")
            run("apt-get", "install", "-y", "-qq", "--no-install-recommends", *SYSTEM_PACKAGES)
            why = why_not(python)
    if why:
        raise UnavailableError(f"{why}; Mooncake needs the system packages {', '.join(SYSTEM_PACKAGES)}")
    return python


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    try:
        print(interpreter())
    except UnavailableError as why:
        sys.exit(f"the peers cannot be installed: {why}")


if __name__ == "__main__":
    main()
