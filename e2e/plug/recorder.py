"""The recorder around the connector's `TransferEngine`: records the engine's origin, its calls and
their durations.

It writes JSON lines to the folder KVFERRY_E2E_RECORD, one file per process. It forwards every call
unchanged, with one exception: while the file `divert` exists in that folder (lines
`host:port host:port`), a write to the first address goes to the second. So the test can insert its
relay between prefill and decode for one case without a restart.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

_folder = Path(os.environ.get("KVFERRY_E2E_RECORD", "."))
_lock = threading.Lock()


def _note(**event: Any) -> None:
    event |= {"at": time.time(), "pid": os.getpid(), "thread": threading.current_thread().name}
    with _lock, open(_folder / f"engine-{os.getpid()}.jsonl", "a", encoding="utf-8") as out:
        out.write(json.dumps(event) + "\n")


def _kind(value: Any) -> str:
    """The type of an argument; for a list also the types of its elements and its length."""
    name = type(value).__name__
    if isinstance(value, list | tuple):
        inner = sorted({type(item).__name__ for item in value})
        return f"{name}[{', '.join(inner)}]*{len(value)}"
    return name


def _diverted(session: str) -> str:
    try:
        lines = (_folder / "divert").read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return session
    return dict(line.split() for line in lines).get(session, session)


def _origin(engine: type) -> dict[str, Any]:
    """The files of the engine, which tell kvferry's from stock Mooncake's."""
    module = sys.modules.get("mooncake.engine")
    own = sys.modules.get(engine.__module__)
    return {
        "engine": f"{engine.__module__}.{engine.__qualname__}",
        "module_file": getattr(module, "__file__", None),
        "class_file": getattr(own, "__file__", None),
        "mooncake_packages": sorted(
            name
            for d in importlib.metadata.distributions()
            if "mooncake" in (name := (d.metadata["Name"] or "").lower())
        ),
    }


def wrap(connector: ModuleType) -> type:
    """A stand-in for the connector's `TransferEngine` class."""
    real: type = connector.TransferEngine

    class Recorded:
        def __init__(self) -> None:
            self._engine = real()
            _note(event="engine", connector_file=connector.__file__, **_origin(real))

        def __getattr__(self, name: str) -> Any:
            value = getattr(self._engine, name)
            return _timed(self._engine, name, value) if callable(value) else value

    return Recorded


def _timed(engine: Any, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        event: dict[str, Any] = {
            "call": name,
            "args": [_kind(a) for a in args] + [f"{k}={_kind(v)}" for k, v in kwargs.items()],
        }
        if name == "batch_transfer_sync_write":
            session, *rest = args
            args = (_diverted(session), *rest)
            event |= {"session": session, "via": args[0]}
            event |= {"bytes": sum(rest[2]), "descriptors": len(rest[2])}
            _note(event="begin", **event)
        start = time.monotonic()
        try:
            result = call(*args, **kwargs)
        except BaseException as error:
            _note(event="raised", took=time.monotonic() - start, error=repr(error), **event)
            raise
        event |= {"took": time.monotonic() - start, "result": result}
        # Stock Mooncake's engine has no last_error.
        why = getattr(engine, "last_error", None)
        if result != 0 and name.startswith("batch_") and why is not None:
            event["why"] = str(why())
        _note(event="call", **event)
        return result

    return timed
