"""Fixtures of tests on the fake driver. A test module imports those that it uses."""

from __future__ import annotations

from collections.abc import Iterator

import kvferry
import pytest
from fake_gpu import LIBRARY, Driver
from kit import NEVER

__all__ = ["driver", "far", "loaded", "no_session_ends_by_silence"]


@pytest.fixture(scope="module")
def loaded() -> Driver:
    assert LIBRARY.exists(), f"{LIBRARY} is missing: make test-wheel"
    return Driver()


@pytest.fixture
def driver(loaded: Driver) -> Iterator[Driver]:
    yield loaded
    loaded.hold(0)
    assert loaded.findings() == ""


@pytest.fixture(autouse=True)
def no_session_ends_by_silence(_settings_come_from_the_tests: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_SILENCE_MS", str(int(NEVER * 1000)))


@pytest.fixture
def far() -> Iterator[kvferry.Agent]:
    with kvferry.Agent("far", listen="127.0.0.1:0") as far:
        yield far
