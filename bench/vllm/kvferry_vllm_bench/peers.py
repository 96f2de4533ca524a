"""NIXL for vLLM's NixlConnector: a folder for PYTHONPATH, made once per machine. Mooncake's is `mooncake_overlay`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from kvferry_e2e.environment import Environment, package_overlay
from kvferry_e2e.steps import Say

NIXL = "1.5.1"
# NIXL chooses the build by torch's CUDA, also where there is no GPU; torch 2.13 has 13.
PACKAGES = (f"nixl=={NIXL}", f"nixl-cu13=={NIXL}")
# Left at once: with UCX's libraries loaded, the ordinary way out may crash.
PROBE = "import os; from nixl._api import nixl_agent; os._exit(0)"


def nixl_overlay(environment: Environment, say: Say) -> Path:
    site = package_overlay(environment, "NIXL", NIXL, PACKAGES, say)
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
