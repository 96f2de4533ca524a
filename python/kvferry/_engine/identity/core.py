"""What an engine core of vLLM does with its weights, as its own calls say it: the version that it is given, LoRA
adapters that it loads before a request has them, and whether its cache has no blocks of earlier weights.

vLLM tells neither its connectors nor its stores. The core is found among the callers of the object that asks, and three
of its methods are wrapped in the instance. Engine cores run these calls between steps, on the scheduler's thread.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from types import FrameType
from typing import Any

# The version of its weights that an engine of vLLM has until it is given one.
_FIRST_VERSION = "default"

Named = Callable[[], object]
"""Called after a version was given, also the one that the engine had."""
Emptied = Callable[[], object]
"""Called after the prefix cache was emptied, and with it what another connector keeps of it: vLLM's own tiers have
blocks by the same names. A reset that vLLM says has failed empties nothing, whatever the connector was told of it."""
Loads = Callable[[Any], Callable[[bool], object]]
"""Called with the adapter before it is loaded. What it returns is called after it, with whether that succeeded."""


class Core:
    """Of one engine, or of none: where no caller is an engine core, there is no version, and nothing is told."""

    def __init__(self, engine: Any | None) -> None:
        self._engine: Callable[[], Any | None] = weakref.ref(engine) if engine is not None else lambda: None
        # How often the engine was given a version.
        self.times_named = 0
        self._on_emptied: list[Emptied] = []
        self._on_named: list[Named] = []
        self._on_load: list[Loads] = []
        if engine is not None:
            _wrap(engine, "set_weight_version", self._name)
            _wrap(engine, "add_lora", self._load)
            _wrap(engine, "reset_prefix_cache", self._reset)

    @property
    def is_known(self) -> bool:
        """Whether there is an engine, which tells of resets of its cache."""
        return self._engine() is not None

    def version(self) -> str | None:
        """The version of the weights; None: that of the engine's start. Trainers give it with
        `POST /finish_weight_update` and `POST /update_weight_version`.
        """
        engine = self._engine()
        given = engine.get_weight_version() if engine is not None else None
        return None if given in (None, _FIRST_VERSION) else str(given)

    def on_named(self, call: Named) -> None:
        self._on_named.append(call)

    def on_emptied(self, call: Emptied) -> None:
        self._on_emptied.append(call)

    def on_load(self, call: Loads) -> None:
        self._on_load.append(call)

    def _name(self, original: Callable[..., Any], *given: Any, **more: Any) -> Any:
        result = original(*given, **more)
        self.times_named += 1
        for call in self._on_named:
            call()
        return result

    def _reset(self, original: Callable[..., Any], *given: Any, **more: Any) -> Any:
        result = original(*given, **more)
        asked = inspect.signature(original).bind(*given, **more).arguments
        if result and not _keeps_blocks(self._engine(), is_reset=bool(asked.get("reset_connector"))):
            for call in self._on_emptied:
                call()
        return result

    def _load(self, original: Callable[..., Any], lora: Any) -> Any:
        ends = [call(lora) for call in self._on_load]
        has_loaded = False
        try:
            result = original(lora)
            has_loaded = True
        finally:
            with ExitStack() as stack:
                for end in ends:
                    stack.callback(end, has_loaded)
        return result


class Cached:
    """Whether vLLM's prefix cache may have blocks of other weights than the engine: it names blocks by tokens alone.

    Only a reset of all that may have such blocks ends that (`Core.on_emptied`).
    """

    def __init__(self, core: Core) -> None:
        self.are_mixed = False
        self._core = core
        self._has_blocks = False
        core.on_emptied(self._was_emptied)

    def add(self) -> None:
        """A step or a load may have blocks cached."""
        self._has_blocks = True

    def step_of_callers(self) -> None:
        """vLLM schedules a step, and this is called while it tells its connector. Some compute nothing: they tell
        workers of requests that have ended, also while the engine is paused.
        """
        if _scheduled_tokens_of_callers() != 0:
            self.add()

    def _was_emptied(self) -> None:
        """There is no step between that and this call."""
        self.are_mixed = self._has_blocks = False

    def got_other_weights(self) -> None:
        """The weights have another version, or may be others. Blocks that are cached may be of the weights before, also
        those since a reset of the connector: weights may have stayed the same at that reset, and changed after these
        blocks. Without an engine, which tells of resets of its cache, nothing is mixed: nothing would end it.
        """
        self.are_mixed |= self._has_blocks and self._core.is_known


def _keeps_blocks(engine: Any | None, *, is_reset: bool) -> bool:
    """Whether a connector of the engine may keep blocks beyond a reset of vLLM's cache, by names that say nothing of
    the weights. `is_reset`: vLLM has reset the connectors, too.
    """
    given = getattr(getattr(engine, "vllm_config", None), "kv_transfer_config", None)
    return _keeps({name: getattr(given, name, None) for name in _OF_CONNECTOR}, is_reset=is_reset)


_OF_CONNECTOR = ("kv_connector", "kv_connector_module_path", "kv_connector_extra_config")
# Connectors of vLLM 0.32 that have no cache: what they load is of the request alone, and they read it from its engine.
KEEP_NOTHING = (
    "NixlConnector",
    "NixlPullConnector",
    "NixlPushConnector",
    "MooncakeConnector",
    "MoRIIOConnector",
    "DecodeBenchConnector",
    "ExampleHiddenStatesConnector",
)
# Those that drop their blocks when they are reset. Others say the same of a reset and keep them, or share them with
# engines that have other weights.
DROP_ALL = ("SimpleCPUOffloadConnector",)
# Those of vLLM's own offloading. Another one may keep blocks in files.
_OWN_SPECS = ("CPUOffloadingSpec", "TieringOffloadingSpec")


def _keeps(given: Mapping[str, Any], *, is_reset: bool) -> bool:
    """`given`: what vLLM has of a connector, by the names of its configuration."""
    connector, module, more = (given.get(name) for name in _OF_CONNECTOR)
    if module is not None and not _is_kvferrys(module):
        # Another class may have the name of one that is known.
        return True
    more = more if isinstance(more, Mapping) else {}
    if connector == "KVFerryConnector" or connector in KEEP_NOTHING:
        return False
    if connector == "MultiConnector":
        parts = [it for it in more.get("connectors") or () if isinstance(it, Mapping)]
        return not parts or any(_keeps(it, is_reset=is_reset) for it in parts)
    if connector == "OffloadingConnector":
        spec, module = more.get("spec_name", _OWN_SPECS[0]), more.get("spec_module_path")
        if spec == "KVFerryOffloadingSpec" and _is_kvferrys(module):
            # It stores nothing while vLLM's cache may be mixed, and its names say of which weights the rest is.
            return False
        # vLLM resets host memory, and no tier behind it. kvferry's takes other names then.
        return not (is_reset and spec in _OWN_SPECS and all(map(_is_tier, more.get("secondary_tiers") or ())))
    return not (is_reset and connector in DROP_ALL)


def _is_tier(given: Any) -> bool:
    return isinstance(given, Mapping) and given.get("type") == "KVFerryTier" and _is_kvferrys(given.get("module_path"))


def _is_kvferrys(module: Any) -> bool:
    """Whether a module that a setting names is kvferry's. None: the class has a name in vLLM's own tables."""
    return module is None or str(module).split(".")[:2] == ["kvferry", "vllm"]


def core_of_callers() -> Core:
    """Of the engine core that makes the caller."""
    for frame in callers():
        engine = frame.f_locals.get("self")
        if callable(getattr(type(engine), "get_weight_version", None)):
            found = _cores.get(engine)
            if found is None:
                found = _cores[engine] = Core(engine)
            return found
    return Core(None)


def callers() -> Iterator[FrameType]:
    """The frames of who has called the caller: vLLM gives the objects that it makes a part of what it knows.

    The caller's own frame is not among them: its locals, once read, would keep it alive.
    """
    frame = sys._getframe(1).f_back
    while frame is not None:
        yield frame
        frame = frame.f_back


def _scheduled_tokens_of_callers() -> int | None:
    """Tokens of the step that vLLM's connector is told of now; None if that is not known."""
    for frame in callers():
        if frame.f_code.co_name == "build_connector_meta":
            tokens = getattr(frame.f_locals.get("scheduler_output"), "total_num_scheduled_tokens", None)
            if tokens is not None:
                return int(tokens)
    return None


# An engine has several of kvferry's objects, and one is enough to wrap its methods.
_cores: weakref.WeakKeyDictionary[Any, Core] = weakref.WeakKeyDictionary()


def _wrap(engine: Any, name: str, around: Callable[..., Any]) -> None:
    """Has `around` called with the method and its arguments instead of the method."""
    bound = getattr(engine, name, None)
    if bound is None:
        return
    function = getattr(bound, "__func__", None)
    # A bound method would keep its engine alive.
    found = weakref.ref(engine)

    def call(*given: Any, **more: Any) -> Any:
        original = bound if function is None else functools.partial(function, found())
        return around(original, *given, **more)

    # vLLM converts the arguments of a call from another process by its signature.
    call.__signature__ = inspect.signature(bound)  # type: ignore[attr-defined]
    call.__name__ = name
    if function is not None:
        bound = None
    setattr(engine, name, call)
