"""`KVFERRY_SHIMS=mooncake`: unchanged programs get kvferry; an installed Mooncake stays unchanged."""

from __future__ import annotations

import importlib.metadata
import os
import site
import sys
import sysconfig
from pathlib import Path

import pytest
from kit import run_python

WHERE = "import mooncake.engine as e; print(e.TransferEngine.__module__, e.__name__)"
ON = {"KVFERRY_SHIMS": "mooncake"}


def no_mooncake_here() -> None:
    if any(Path(p, "mooncake").exists() for p in sys.path if p):
        pytest.skip("a real mooncake is installed in this environment")


def test_without_the_variable_nothing_is_imported() -> None:
    no_mooncake_here()
    for env in ({}, {"KVFERRY_SHIMS": ""}, {"KVFERRY_SHIMS": "nixl"}):
        ended = run_python(WHERE, env=env)
        assert "ModuleNotFoundError" in ended.stderr
    silent = run_python("import sys; print([m for m in sys.modules if 'kvferry' in m])")
    assert (silent.stdout, silent.stderr) == ("[]\n", "")


@pytest.mark.parametrize("value", ["mooncake", " mooncake ", "nixl,mooncake", "mooncake,nixl"])
def test_with_the_variable_mooncake_engine_is_kvferrys(value: str) -> None:
    ended = run_python(WHERE, env={"KVFERRY_SHIMS": value})
    assert (ended.stdout, ended.stderr) == ("kvferry.mooncake mooncake.engine\n", "")


def test_an_interpreter_that_does_not_import_mooncake_does_not_load_kvferry() -> None:
    ended = run_python("import sys; print('kvferry' in sys.modules, 'kvferry._kvferry' in sys.modules)", env=ON)
    assert (ended.stdout, ended.stderr) == ("False False\n", "")


def test_all_names_of_mooncake_engine_exist() -> None:
    ended = run_python(
        """
        from mooncake.engine import *
        import mooncake, mooncake.engine, sys, importlib.util, kvferry.mooncake as k
        from mooncake.engine import TransferEngine, TransferOpcode, TransferNotify, InnerTransferEngine
        assert TransferEngine is k.TransferEngine and mooncake.engine.Read is k.Read
        assert sys.modules["mooncake.engine"] is mooncake.engine
        assert mooncake.engine.__file__ == k.__file__
        assert importlib.util.find_spec("mooncake.engine") is not None
        assert mooncake.__path__ is not None
        try: import mooncake.store
        except ModuleNotFoundError as e: print(e.name)
        """,
        env=ON,
    )
    assert (ended.stdout, ended.stderr) == ("mooncake.store\n", "")


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A fake Mooncake on the path."""
    package = tmp_path / "site" / "mooncake"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("real = True\n")
    (package / "engine.py").write_text("class TransferEngine: pass\n")
    (package / "store.py").write_text("from mooncake.engine import TransferEngine\nclass Store: pass\n")
    return package.parent


def test_the_rest_of_an_installed_mooncake_stays_reachable(installed: Path) -> None:
    before = {p: p.read_bytes() for p in installed.rglob("*.py")}
    program = """
    import mooncake, mooncake.engine, mooncake.store
    print(mooncake.real, mooncake.engine.TransferEngine.__module__, mooncake.store.Store.__module__,
          mooncake.store.TransferEngine is mooncake.engine.TransferEngine)
    """
    path = {"PYTHONPATH": str(installed), "PYTHONDONTWRITEBYTECODE": "1"}
    with_shim = run_python(program, env=ON | path)
    assert (with_shim.stdout, with_shim.stderr) == ("True kvferry.mooncake mooncake.store True\n", "")
    without = run_python(program, env=path)
    assert (without.stdout, without.stderr) == ("True mooncake.engine mooncake.store True\n", "")
    assert {p: p.read_bytes() for p in installed.rglob("*.py")} == before


def test_the_vllm_plugin_installs_the_shim_if_the_startup_file_was_not_read() -> None:
    # -S skips site and so the .pth file, as in an embedded or isolated interpreter.
    paths = [p for p in sys.path if "site-packages" in p]
    program = f"""
    import sys
    sys.path[:0] = {paths!r}
    import importlib.metadata
    (plugin,) = [e for e in importlib.metadata.entry_points(group="vllm.general_plugins") if e.name == "kvferry"]
    register = plugin.load()
    assert register() is None and register() is None
    try:
        import mooncake.engine
        print(mooncake.engine.TransferEngine.__module__, sum("Mooncake" in type(f).__name__ for f in sys.meta_path))
    except ModuleNotFoundError:
        print("nothing")
    """
    import subprocess
    import textwrap

    from kit import clean_environment

    def ended(env: dict[str, str]) -> tuple[str, str]:
        ran = subprocess.run(
            [sys.executable, "-S", "-c", textwrap.dedent(program)],
            env=clean_environment(**env), capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        return ran.stdout, ran.stderr

    assert ended(ON) == ("kvferry.mooncake 1\n", "")
    if not any(Path(p, "mooncake").exists() for p in paths):
        assert ended({}) == ("nothing\n", "")


def test_the_plugins_are_the_only_entry_points_and_the_startup_file_lies_beside_the_package() -> None:
    distribution = importlib.metadata.distribution("kvferry")
    assert sorted((e.group, e.value) for e in distribution.entry_points) == [
        ("sglang.srt.plugins", "kvferry.sglang:register"),
        ("vllm.general_plugins", "kvferry.vllm:register"),
    ]
    root = Path(sysconfig.get_path("purelib"))
    assert root in [Path(p) for p in site.getsitepackages()]
    assert (root / "kvferry_shims.pth").read_text().startswith("import os;")
    assert (root / "_kvferry_shims.py").exists()


def test_a_broken_installation_does_not_break_interpreters(tmp_path: Path) -> None:
    # A broken module of that name is first on the path.
    (tmp_path / "_kvferry_shims.py").write_text("raise RuntimeError('broken')\n")
    ended = run_python("print('alive')", env=ON | {"PYTHONPATH": str(tmp_path)})
    assert (ended.stdout, ended.stderr) == ("alive\n", "")


def test_child_processes_inherit_the_shim() -> None:
    ended = run_python(
        """
        import multiprocessing
        def where(_):
            import mooncake.engine
            return mooncake.engine.TransferEngine.__module__
        print(multiprocessing.get_context("fork").Pool(1).map(where, [0]))
        """,
        env=ON,
    )
    assert (ended.stdout, ended.stderr) == ("['kvferry.mooncake']\n", "")
    assert "KVFERRY_SHIMS" not in os.environ
