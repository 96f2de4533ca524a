"""`KVFERRY_SHIMS=nixl`: unchanged programs get kvferry; an installed NIXL stays unchanged."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from kit import run_python

WHERE = "import nixl._api as api; print(api.nixl_agent.__module__, api.__name__)"
ON = {"KVFERRY_SHIMS": "nixl"}


@pytest.fixture
def _not_installed() -> None:
    if any(Path(p, name).exists() for p in sys.path if p for name in ("nixl", "nixl_cu12", "nixl_cu13")):
        pytest.skip("SKIPPED: a real nixl is installed in this environment")


@pytest.mark.usefixtures("_not_installed")
def test_without_the_variable_nothing_is_imported() -> None:
    for env in ({}, {"KVFERRY_SHIMS": "mooncake"}):
        assert "ModuleNotFoundError" in run_python(WHERE, env=env).stderr


@pytest.mark.parametrize("value", ["nixl", "mooncake, nixl"])
def test_with_the_variable_nixl_is_kvferrys(value: str) -> None:
    ended = run_python(WHERE, env={"KVFERRY_SHIMS": value})
    assert (ended.stdout, ended.stderr) == ("kvferry.nixl._api nixl._api\n", "")


@pytest.mark.usefixtures("_not_installed")
def test_engines_find_the_package_without_importing_it_and_then_all_names_that_they_use() -> None:
    ended = run_python(
        """
        import importlib.util, sys
        assert importlib.util.find_spec("nixl") is not None
        assert not any(name.startswith("kvferry") for name in sys.modules)
        from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t, nixl_xfer_handle
        from nixl._api import nixl_prepped_dlist_handle, nixl_backend_handle, DEFAULT_COMM_PORT
        from nixl._bindings import nixlXferTelemetry, nixlRegDList, nixlXferDList, DRAM_SEG, nixlRemoteDisconnectError
        from nixl._utils import malloc_passthru, free_passthru
        from nixl.logging import get_logger
        import nixl, nixl_cu12._api, nixl_cu13
        assert nixl.nixl_agent is nixl_cu12._api.nixl_agent is nixl_cu13.nixl_agent is nixl_agent
        try: import nixl.other
        except ModuleNotFoundError as e: print(e.name)
        """,
        env=ON,
    )
    assert (ended.stdout, ended.stderr) == ("nixl.other\n", "")


def test_the_rest_of_an_installed_nixl_stays_reachable(tmp_path: Path) -> None:
    # As NIXL's wheels have it: a package per CUDA version, and one that gives its modules another name.
    package, meta = tmp_path / "nixl_cu12", tmp_path / "nixl"
    package.mkdir()
    meta.mkdir()
    (package / "__init__.py").write_text("from ._api import nixl_agent\nreal = True\n")
    (package / "_api.py").write_text("class nixl_agent: pass\n")
    (package / "other.py").write_text("from ._api import nixl_agent\n")
    (meta / "__init__.py").write_text(
        "import sys, nixl_cu12, nixl_cu12._api\nsys.modules['nixl._api'] = nixl_cu12._api\nreal = True\n"
    )
    program = """
    import nixl, nixl_cu12.other
    from nixl._api import nixl_agent
    print(nixl.real, nixl_cu12.real, nixl_agent.__module__, nixl_cu12.other.nixl_agent is nixl_agent)
    """
    path = {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    with_shim = run_python(program, env=ON | path)
    assert (with_shim.stdout, with_shim.stderr) == ("True True kvferry.nixl._api True\n", "")
    without = run_python(program, env=path)
    assert (without.stdout, without.stderr) == ("True True nixl_cu12._api True\n", "")


def test_memory_by_address_is_compared_and_freed_once() -> None:
    from kvferry.nixl import _utils

    first, second = _utils.malloc_passthru(300), _utils.malloc_passthru(300)
    _utils.ba_buf(first, 300)
    with pytest.raises(AssertionError):
        _utils.verify_transfer(first, second, 300)
    _utils.ba_buf(second, 300)
    _utils.verify_transfer(first, second, 300)
    for address in (first, second):
        _utils.free_passthru(address)
        with pytest.raises(ValueError, match="allocated"):
            _utils.free_passthru(address)
