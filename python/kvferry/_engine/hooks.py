"""The names of an engine that an adapter needs, looked up at start.

An engine that renames a hook never calls the adapter's, without an error: handoffs wait for their time-outs.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import inspect
import textwrap
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Names = Mapping[str, Sequence[str]]
"""By module: classes, functions, or `Class.attribute`, private ones included."""


class EngineError(RuntimeError):
    """The engine lacks a name that the adapter needs."""


def check(engine: str, version: str, tried: Sequence[str], missing: Iterable[str], logger: Any) -> None:
    """Raises `EngineError` with all that is missing. Warns of a version that was not tried.

    `tried`: how the versions begin that the tests ran with.
    """
    gone = sorted(set(missing))
    versions = f"it was tried with {', '.join(tried)}" if tried else "it was tried with no version of it"
    if gone:
        raise EngineError(f"kvferry does not fit {engine} {version}, which lacks {', '.join(gone)}; {versions}")
    if not any(version == it or version.startswith((f"{it}.", f"{it}+")) for it in tried):
        logger.warning("kvferry was not tried with %s %s: all names that it needs exist; %s", engine, version, versions)


def missing_hooks(cls: type, bases: Sequence[type], own: Iterable[str] = (), optional: Iterable[str] = ()) -> list[str]:
    """The public methods of `cls` that none of the engine's `bases` has, or has with other parameters.

    `own`: methods that are no hooks. `optional`: hooks that some versions lack, and that are not needed then.
    """
    found = []
    for name, method in vars(cls).items():
        if name.startswith("_") or name in own or not callable(getattr(cls, name)):
            continue
        base = next((base for base in bases if hasattr(base, name)), None)
        where = f"{bases[0].__name__}.{name}"
        if base is None:
            found += [where] if name not in optional else []
        elif unfit := _unfit(_signature(getattr(base, name)), _signature(getattr(method, "__func__", method))):
            found.append(f"{where}({unfit})")
    return found


def _signature(function: Any) -> list[inspect.Parameter]:
    function = getattr(function, "__func__", function)
    parameters = list(inspect.signature(function).parameters.values())
    return [it for it in parameters if it.name not in ("self", "cls")]


def _unfit(theirs: list[inspect.Parameter], ours: list[inspect.Parameter]) -> str | None:
    """The parameters of ours that the engine does not pass, or those of theirs that ours does not take."""
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    given = [it for it in theirs if it.kind not in variable]
    taken = [it for it in ours if it.kind not in variable]
    any_more = any(it.kind in variable for it in ours)
    names = [it.name for it in given]
    needed = [it.name for it in taken if it.name not in names and it.default is inspect.Parameter.empty]
    # An engine may hand anything on by `**kwargs`.
    if needed and not any(it.kind in variable for it in theirs):
        return ", ".join(needed)
    if not any_more and len(given) > len(taken):
        return ", ".join(names[len(taken) :])
    return None


def missing_names(module: str, *names: str) -> list[str]:
    """The functions and classes, or `Class.attribute`, that a module lacks; all of them if it is gone."""
    try:
        found = importlib.import_module(module)
    except ImportError:
        return [f"{module}.{name}" for name in names]
    missing = []
    for name in names:
        first, _, attribute = name.partition(".")
        value = getattr(found, first, None)
        if value is None or (attribute and attribute not in attributes(value)):
            missing.append(f"{module}.{name}")
    return missing


def names_of(cls: str, names: str) -> tuple[str, ...]:
    """``Class.attribute`` for each of the names, which spaces separate."""
    return tuple(f"{cls}.{name}" for name in names.split())


def missing_in(*tables: Names) -> list[str]:
    """What `missing_names` says of all that the tables name."""
    return [it for table in tables for module, names in table.items() for it in missing_names(module, *names)]


def missing_parameters(methods: Mapping[str, Mapping[str, str]]) -> list[str]:
    """By module and method: a parameter that the engine's own method has."""
    found = []
    for module, of_module in methods.items():
        for method, parameter in of_module.items():
            gone = missing_names(module, method)
            if not gone:
                cls, _, name = method.partition(".")
                function = getattr(getattr(importlib.import_module(module), cls), name)
                if parameter not in {it.name for it in _signature(function)}:
                    gone = [f"{module}.{method}({parameter})"]
            found += gone
    return found


def attributes(cls: Any) -> set[str]:
    """What instances of a class have: fields, annotations, and what its methods assign to ``self``."""
    found = set(dir(cls))
    for base in inspect.getmro(cls) if inspect.isclass(cls) else ():
        found |= set(getattr(base, "__annotations__", {}))
        found |= set(getattr(base, "__slots__", ()) or ())
        for fields in (getattr(base, "__dataclass_fields__", None), getattr(base, "__struct_fields__", None)):
            # msgspec's own class has a descriptor there.
            found |= set(fields) if isinstance(fields, Mapping | tuple) else set()
        if base is not object:
            found |= _assigned(base)
    return found


# To find a class in its file takes some 50 ms, and adapters look up many names of one class.
_found: weakref.WeakKeyDictionary[type, frozenset[str]] = weakref.WeakKeyDictionary()


def _assigned(cls: type) -> frozenset[str]:
    if cls not in _found:
        _found[cls] = _assigned_in_source(cls)
    return _found[cls]


def _assigned_in_source(cls: type) -> frozenset[str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):
        # A class without source.
        return frozenset()
    return frozenset(
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )


def installed(*distributions: str) -> str | None:
    """The version of the first of these that is installed."""
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def lazily(
    package: str,
    modules: Mapping[str, str],
    engine: str,
    tried: Sequence[str],
    version: Callable[[], str],
    roots: Sequence[str],
) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package whose classes need an engine, and which is also loaded where it is a plug-in.

    `modules`: where each class is. `roots`: the packages without which there is no engine.
    """

    def find(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            return getattr(importlib.import_module(f"{package}.{modules[name]}"), name)
        except ImportError as error:
            if (error.name or "").partition(".")[0] not in roots:
                raise
            here = version()
            raise RuntimeError(f"{name} needs {engine} {', '.join(tried)}; this one is {here}: {error}") from error

    return find
