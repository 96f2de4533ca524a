"""What vLLM's scheduler calls never raises: an exception there would end the engine and all its requests."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from kvferry._seldom import Seldom

_Call = TypeVar("_Call", bound=Callable[..., Any])
_Result = TypeVar("_Result")

_seldom = Seldom(logging.getLogger("vllm.kvferry"), "KVFerryConnector: ")


def guarded(instead: Callable[..., Any]) -> Callable[[_Call], _Call]:
    """Logs what a method raises, and returns what `instead` returns for the same arguments."""

    def decorate(call: _Call) -> _Call:
        @functools.wraps(call)
        def guard(*args: Any) -> Any:
            try:
                return call(*args)
            except Exception as error:
                _seldom.say("%s failed, and the request gets no handoff: %r", call.__name__, error)
                return instead(*args)

        return guard  # type: ignore[return-value]

    return decorate


def tried(call: Callable[..., _Result], *args: Any) -> _Result | None:
    """What a call returns; None if it raises, which is logged."""
    try:
        return call(*args)
    except Exception as error:
        name = getattr(call, "__name__", "a call")
        _seldom.say("%s failed, and the request gets no handoff: %r", name, error)
        return None
