"""What vLLM's scheduler calls never raises: an exception there would end the engine and all its requests."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from kvferry._engine.log import Seldom, logger_of

_Call = TypeVar("_Call", bound=Callable[..., Any])
_Result = TypeVar("_Result")

_LOGGER = logger_of("vllm")
_seldom = Seldom(_LOGGER, "KVFerryConnector: ")
_NO_HANDOFF = "the request gets no handoff"


def guarded(
    instead: Callable[..., Any], *, seldom: Seldom = _seldom, outcome: str = _NO_HANDOFF
) -> Callable[[_Call], _Call]:
    """Logs what a method raises, and returns what `instead` returns for the same arguments, which raises nothing."""

    def decorate(call: _Call) -> _Call:
        @functools.wraps(call)
        def guard(*args: Any, **more: Any) -> Any:
            try:
                return call(*args, **more)
            except Exception as error:
                seldom.say("%s failed, and %s: %r", call.__name__, outcome, error)
                return instead(*args, **more)

        return guard  # type: ignore[return-value]

    return decorate


def store_guarded(who: str) -> Callable[[Callable[..., Any]], Callable[[_Call], _Call]]:
    """As `guarded`, for what a store is asked for."""
    seldom = Seldom(_LOGGER, f"{who}: ")

    def guard(instead: Callable[..., Any]) -> Callable[[_Call], _Call]:
        return guarded(instead, seldom=seldom, outcome="the request does without the store")

    return guard


def tried(call: Callable[..., _Result], *args: Any) -> _Result | None:
    """What a call returns; None if it raises, which is logged."""
    try:
        return call(*args)
    except Exception as error:
        name = getattr(call, "__name__", "a call")
        _seldom.say("%s failed, and %s: %r", name, _NO_HANDOFF, error)
        return None
