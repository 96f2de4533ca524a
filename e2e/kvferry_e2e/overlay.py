"""The engine under test, in a folder for PYTHONPATH: the cached vLLM stays unchanged."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from kvferry_e2e.environment import Environment, cache_root, package_overlay
from kvferry_e2e.steps import Say, run_step

MOONCAKE = "0.3.13.post1"
MOTO = "5.2.5"
# What moto's S3 needs beside vLLM's environment. Without dependencies: the rest that it declares is for other services.
MOTO_PACKAGES = (
    f"moto=={MOTO}",
    "blinker==1.9.0",
    "boto3==1.44.5",
    "botocore==1.44.5",
    "flask==3.1.3",
    "flask-cors==6.0.5",
    "itsdangerous==2.2.0",
    "py-partiql-parser==0.6.3",
    "python-dateutil==2.9.0.post0",
    "responses==0.26.3",
    "s3transfer==0.19.3",
    "six==1.17.0",
    "werkzeug==3.1.9",
    "xmltodict==1.0.4",
)


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


def moto_overlay(environment: Environment, say: Say) -> Path:
    """A server that speaks S3."""
    return package_overlay(environment, "moto", MOTO, MOTO_PACKAGES, say)


def _install(environment: Environment, site: Path, log: Path, say: Say, *what: str) -> None:
    pip = [str(environment.python), "-m", "pip", "--disable-pip-version-check"]
    command = [*pip, "install", "--no-deps", "--target", str(site), *what]
    run_step(f"overlay of {Path(what[-1]).name}", command, log, say)
