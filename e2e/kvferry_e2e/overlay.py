"""The engine under test, in a folder for PYTHONPATH: the cached vLLM stays unchanged."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from kvferry_e2e.environment import Environment, cache_root
from kvferry_e2e.steps import Say, run_step

MOONCAKE = "0.3.13.post1"


def newest_wheel(checkout: Path) -> Path | None:
    wheels = (checkout / "target" / "wheels").glob("kvferry-*.whl")
    return max(wheels, key=lambda wheel: wheel.stat().st_mtime, default=None)


def kvferry_overlay(environment: Environment, wheel: Path, site: Path, say: Say) -> Path:
    """Unpacks the wheel; Python finds its entry points as if it were installed."""
    shutil.rmtree(site, ignore_errors=True)
    _install(environment, site, site.with_name("overlay.log"), say, "--no-index", str(wheel))
    return site


def mooncake_overlay(environment: Environment, say: Say) -> Path:
    """The stock Mooncake engine, for a baseline run."""
    site = cache_root() / f"mooncake-{MOONCAKE}-py{sys.version_info.major}{sys.version_info.minor}"
    ready = site / "ready"
    if not ready.exists():
        shutil.rmtree(site, ignore_errors=True)
        what = f"mooncake-transfer-engine-non-cuda=={MOONCAKE}"
        _install(environment, site, site.with_name(site.name + ".log"), say, what)
        ready.touch()
    probe = subprocess.run(
        [str(environment.python), "-c", "import mooncake.engine"],
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )
    if probe.returncode != 0:
        needed = "apt-get install libibverbs1 libnuma1 libcurl4"
        raise RuntimeError(f"stock mooncake.engine can't be imported ({needed}): {probe.stderr}")
    return site


def _install(environment: Environment, site: Path, log: Path, say: Say, *what: str) -> None:
    pip = [str(environment.python), "-m", "pip", "--disable-pip-version-check"]
    command = [*pip, "install", "--no-deps", "--target", str(site), *what]
    run_step(f"overlay of {Path(what[-1]).name}", command, log, say)
