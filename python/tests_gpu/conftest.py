"""The tests of GPUs in Python, for a machine with one: `make test-gpu`. `make test` does not collect them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

# JAX would take most of the GPU's memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import pytest

try:
    import torch

    WHY_NOT = "" if torch.cuda.is_available() else "torch finds no CUDA device"
except ImportError as error:
    WHY_NOT = f"torch is not installed: {error}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rounds", type=int, default=10_000, help="rounds of each stress")
    parser.addoption("--stress-seconds", type=float, default=60.0, help="the most that a stress takes")


def pytest_configure() -> None:
    # The tests import torch: none can be collected without it.
    if WHY_NOT:
        pytest.exit(f"SKIPPED: all tests of GPUs: {WHY_NOT}", returncode=0)


def pytest_report_header() -> str:
    import kvferry

    gpu = f"torch {torch.__version__} on {torch.cuda.get_device_name()}"
    return f"kvferry {kvferry.__version__} from {Path(kvferry.__file__).parent}; {gpu}"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Writes a line for each test to the file of KVFERRY_GPU_RESULTS at once, since a later test may hang."""
    file = os.environ.get("KVFERRY_GPU_RESULTS")
    if file is None or (report.when != "call" and report.outcome == "passed"):
        return
    why = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else str(report.longrepr or "")
    line = {"test": report.nodeid, "outcome": report.outcome, "seconds": report.duration, "why": why}
    with Path(file).open("a") as results:
        results.write(json.dumps(line) + "\n")


@pytest.fixture(params=["tcp", "local"])
def transports(request: pytest.FixtureRequest) -> str:
    return "tcp" if request.param == "tcp" else "local,tcp"


@pytest.fixture
def near(transports: str) -> Iterator[object]:
    import kvferry

    with kvferry.Agent("near", listen="127.0.0.1:0", transports=transports) as agent:
        yield agent


@pytest.fixture
def far(transports: str) -> Iterator[object]:
    import kvferry

    with kvferry.Agent("far", listen="127.0.0.1:0", transports=transports) as agent:
        yield agent
