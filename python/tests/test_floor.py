"""The floor of the adapters, `kvferry._engine`: who imports it, and what it says of addresses, secrets and loggers."""

from __future__ import annotations

import ast
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kvferry
import pytest
from kvferry._engine import address, log
from kvferry._engine.jobs import runs, settled
from kvferry._engine.secret import PeerSettings

PACKAGE = Path(kvferry.__file__).parent
ADAPTERS = ("nixl", "sglang", "trtllm", "vllm")


def imported(tree: ast.AST) -> Iterator[str]:
    """The second name of each ``kvferry.NAME`` that a module imports."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [it.name for it in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [f"{node.module}.{it.name}" for it in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names = [it.value for it in node.args if isinstance(it, ast.Constant)]
        for name in names:
            package, _, rest = name.partition(".")
            if package == "kvferry" and rest:
                yield rest.partition(".")[0]


def strangers(folder: str, tree: ast.AST) -> set[str]:
    """What a module of a folder imports besides kvferry itself, the floor and the folder."""
    return set(imported(tree)) - {folder, "_engine", "_kvferry", "connector", *kvferry.__all__}


@pytest.mark.parametrize("folder", ["_engine", *ADAPTERS])
def test_an_adapter_imports_kvferry_and_the_floor_and_the_floor_no_adapter(folder: str) -> None:
    modules = sorted((PACKAGE / folder).rglob("*.py"))
    assert modules
    found = {str(it.relative_to(PACKAGE)): strangers(folder, ast.parse(it.read_text())) for it in modules}
    assert not {module: names for module, names in found.items() if names}


def test_every_folder_of_the_package_is_an_adapter_or_the_floor() -> None:
    folders = {it.parent.name for it in PACKAGE.glob("*/__init__.py")}
    assert folders == {"_engine", *ADAPTERS}


@pytest.mark.parametrize(
    "text",
    [
        "from kvferry.vllm._settings import Settings",
        "from kvferry.vllm import KVFerryTier",
        "from kvferry import vllm",
        "import kvferry.vllm as it",
        "def f():\n    importlib.import_module('kvferry.vllm')",
        "if TYPE_CHECKING:\n    from kvferry.vllm._settings import Settings",
    ],
)
def test_what_the_walk_over_imports_finds(text: str) -> None:
    assert strangers("sglang", ast.parse(text)) == {"vllm"}
    assert strangers("vllm", ast.parse(text)) == set()
    assert strangers("sglang", ast.parse("import kvferry\nfrom kvferry import Agent, _engine, connector")) == set()
    assert strangers("vllm", ast.parse("from kvferry._buffers import span")) == {"_buffers"}


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("10.0.0.1:7600", "10.0.0.1", "7600"),
        ("node-3:7600", "node-3", "7600"),
        ("node-3", "node-3", ""),
        ("[fe80::1]:7600", "fe80::1", "7600"),
        ("[fe80::1]", "fe80::1", ""),
        ("fe80::1", "fe80::1", ""),
        (":7600", "", "7600"),
        ("7600", "", "7600"),
    ],
)
def test_an_address_is_a_host_and_a_port(text: str, host: str, port: str) -> None:
    assert address.split(text) == (host, port)
    assert address.split(address.with_port(text)) == (host, port or "0")
    assert address.has_port(text) == bool(port)
    if host and port:
        assert address.join(host, port) == text


class Peers(PeerSettings):
    WHERE = "here"


def test_a_secret_is_read_from_its_file_or_the_errors_name_it(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    with pytest.raises(ValueError, match=f"here: secret_file can't be read: .*{file}"):
        Peers(secret_file=file).secret()
    file.write_bytes(b" \n")
    with pytest.raises(ValueError, match=f"here: secret_file {file} is empty"):
        Peers(secret_file=file).secret()
    file.write_bytes(b"of the file\n")
    elsewhere = {"KVFERRY_SECRET_FILE": str(file), "KVFERRY_SECRET": "of the environment"}
    assert Peers(secret_file=file).secret() == Peers().any_secret(elsewhere) == b"of the file"
    assert Peers().any_secret({"KVFERRY_SECRET": "of the environment"}) == b"of the environment"
    assert Peers().secret() is Peers().any_secret({}) is None


@pytest.mark.parametrize(
    ("host", "secret", "is_open"),
    [("127.0.0.1", None, False), ("::1", None, False), ("0.0.0.0", None, True), ("10.0.0.1", Path("secret"), False)],
)
def test_an_agent_beyond_this_host_without_a_secret_is_open_to_hosts(host: str, secret: Any, is_open: bool) -> None:
    agent: Any = SimpleNamespace(local_address=(host, 7600))
    assert Peers(secret_file=secret).is_open_to_hosts(agent) == is_open


def test_the_loggers_have_the_names_that_engines_show_and_the_pages_say() -> None:
    names = {it: log.name_of(it) for it in ADAPTERS}
    assert names == {
        "nixl": "kvferry.nixl",
        "sglang": "sglang.kvferry",
        "trtllm": "kvferry.trtllm",
        "vllm": "vllm.kvferry",
    }
    assert log.logger_of("vllm") is logging.getLogger("vllm.kvferry")


def test_items_that_follow_each_other_are_a_run_up_to_its_longest() -> None:
    def next_to(last: int, it: int) -> bool:
        return it == last + 1

    assert runs([], next_to) == []
    assert runs([1, 2, 3, 5, 6, 4], next_to) == [[1, 2, 3], [5, 6], [4]]
    assert runs([1, 2, 3, 4, 5], next_to, 2) == [[1, 2], [3, 4], [5]]


def test_operations_are_waited_for_whatever_they_raise_and_not_beyond_the_deadline() -> None:
    waits: list[Any] = []

    class Operation:
        def __init__(self, *, ends: bool) -> None:
            self.ends = ends

        def done(self) -> bool:
            return self.ends

        def wait(self, timeout: float | None = None) -> None:
            waits.append(timeout)
            raise RuntimeError("its outcome")

    ends, lasts = Operation(ends=True), Operation(ends=False)
    assert settled([])
    assert settled([ends, ends])
    # What comes behind an operation that lasts is not waited for.
    assert not settled([ends, lasts, ends], deadline=0.0)
    assert waits == [None, None, 0.0, 0.0]
