"""NIXL for vLLM's NixlConnector: a folder for PYTHONPATH, made once per machine. Mooncake's is `mooncake_overlay`."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

from kvferry_e2e.environment import Environment, cache_root
from kvferry_e2e.steps import Say, run_step

NIXL = "1.5.1"
# NIXL chooses the build by torch's CUDA, also where there is no GPU; torch 2.13 has 13.
PACKAGES = (f"nixl=={NIXL}", f"nixl-cu13=={NIXL}")
# Left at once: with UCX's libraries loaded, the ordinary way out may crash.
PROBE = "import os; from nixl._api import nixl_agent; os._exit(0)"


def nixl_overlay(environment: Environment, say: Say) -> Path:
    site = cache_root() / f"nixl-{NIXL}-py{sys.version_info.major}{sys.version_info.minor}"
    site.parent.mkdir(parents=True, exist_ok=True)
    ready = site / "ready"
    with open(site.with_name(site.name + ".lock"), "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not ready.exists():
            shutil.rmtree(site, ignore_errors=True)
            pip = [str(environment.python), "-m", "pip", "--disable-pip-version-check", "--no-input", "install"]
            command = [*pip, "--no-deps", "--target", str(site), *PACKAGES]
            run_step(f"NIXL {NIXL}", command, site.with_name(site.name + ".log"), say)
            ready.touch()
    probe = subprocess.run(
        [str(environment.python), "-c", PROBE],
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )
    if probe.returncode != 0:
        raise RuntimeError(f"NIXL can't be imported: {probe.stderr}")
    return site
