"""The settings of `KVFerryOffloadingSpec` and `KVFerryTier`, and how they open the store."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import kvferry
from kvferry.vllm._offload_retention import DURATION_MAX, Limits

if TYPE_CHECKING:
    import logging

GIB = 1 << 30
# How long the blocks of a put wait for space in a full store. They keep the pages of their request meanwhile.
PUT_WAIT_S = 2.0
# For how long an engine that starts tries again to open a store whose processes do not answer: another rank may be
# reading a large store after a crash, or be stopped by a debugger. Each try waits by itself, too.
BUSY_S = 180.0
BUSY_PAUSE_S = 1.0
# Read by vLLM itself from the same mapping.
_OF_VLLM = {
    "block_size",
    "blocks_per_chunk",
    "canonical_layout",
    "offload_prompt_only",
    "self_describing_kv_events",
    "spec_module_path",
    "spec_name",
}
_DIRECT = ("auto", "off", "require")


@dataclass(frozen=True)
class OffloadSettings:
    """What a deployment may choose. See docs/storage.md."""

    # In the order in which the store was made.
    directories: tuple[str, ...]
    disk_bytes: int
    # Of all ranks together.
    host_bytes: int = 0
    object: str | None = None
    object_options: Mapping[str, str | float] = field(default_factory=dict)
    # What names the weights, instead of the model's name and revision.
    model: str | None = None
    # Ranks of the largest tensor parallelism that shares the store.
    share_tp: int = 8
    # Of blocks whose request does not say one, and the highest that a request gets.
    priority: int = 35
    priority_max: int = 100
    # Seconds for which a request's priority above `priority` holds at most.
    duration_max: float | None = None
    # Seconds for which the blocks of a load can't leave.
    lease: float = 60.0
    blocks_max: int | None = None
    segment_mib: int | None = None
    direct: Literal["auto", "off", "require"] = "off"
    # Whether an empty directory takes the place of one that the store has lost.
    adopt_empty: bool = False
    # Whether opening fails where none of the directories has a store, instead of making one.
    must_exist: bool = False

    @property
    def limits(self) -> Limits:
        return Limits(self.priority, self.priority_max, self.duration_max)

    @staticmethod
    def of(config: Mapping[str, Any], where: str = "kv_connector_extra_config") -> OffloadSettings:
        """Raises ValueError for a setting that does not exist or has a wrong value."""
        known = {
            "disk",
            "disk_gib",
            "host_gib",
            "object",
            "object_options",
            "model",
            "share_tp",
            "priority",
            "priority_max",
            "duration_max",
            "lease",
            "blocks_max",
            "segment_mib",
            "direct",
            "adopt_empty",
            "must_exist",
        }
        unknown = sorted(set(config) - known - _OF_VLLM)
        if unknown:
            raise ValueError(
                f"kvferry's store has no setting {', '.join(map(repr, unknown))} in {where}; "
                f"it has {', '.join(sorted(known))}"
            )
        read = _Reader(config, where)
        blocks_max, segment_mib = (
            int(read.number(name, 0, 1, 2**31, whole=True)) if config.get(name) is not None else None
            for name in ("blocks_max", "segment_mib")
        )
        priority = int(read.number("priority", 35, 0, 100, whole=True))
        duration_max = None
        if config.get("duration_max") is not None:
            duration_max = read.number("duration_max", None, 1, DURATION_MAX)
        direct = config.get("direct", "off")
        if direct not in _DIRECT:
            raise ValueError(f"{where}: direct must be one of {', '.join(_DIRECT)}, not {direct!r}")
        return OffloadSettings(
            directories=read.directories(),
            disk_bytes=int(read.number("disk_gib", None, 1 / 1024, 1 << 24) * GIB),
            host_bytes=int(read.number("host_gib", 0, 0, 1 << 20) * GIB),
            object=read.text("object"),
            object_options=read.options(),
            model=read.text("model"),
            share_tp=int(read.number("share_tp", 8, 1, 1024, whole=True)),
            priority=priority,
            priority_max=int(read.number("priority_max", 100, priority, 100, whole=True)),
            duration_max=duration_max,
            lease=read.number("lease", 60, 1, 3600),
            blocks_max=blocks_max,
            segment_mib=segment_mib,
            direct=direct,
            adopt_empty=read.switch("adopt_empty"),
            must_exist=read.switch("must_exist"),
        )


class _Reader:
    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self._config, self._where = config, where

    def number(self, name: str, default: float | None, least: float, most: float, *, whole: bool = False) -> float:
        value = self._config.get(name, default)
        if value is None:
            raise ValueError(f"{self._where}: {name} is missing; it is needed")
        kind = int if whole else int | float
        if isinstance(value, bool) or not isinstance(value, kind) or not least <= value <= most:
            what = "a whole number" if whole else "a number"
            raise ValueError(f"{self._where}: {name} must be {what} from {least:g} to {most:g}, not {value!r}")
        return float(value)

    def switch(self, name: str) -> bool:
        value = self._config.get(name, False)
        if not isinstance(value, bool):
            raise ValueError(f"{self._where}: {name} must be true or false, not {value!r}")
        return value

    def text(self, name: str) -> str | None:
        value = self._config.get(name)
        if not isinstance(value, str | None):
            raise ValueError(f"{self._where}: {name} must be a string, not {value!r}")
        return value or None

    def directories(self) -> tuple[str, ...]:
        value = self._config.get("disk")
        names = [value] if isinstance(value, str) else value
        if not isinstance(names, list | tuple) or not names or not all(isinstance(it, str) and it for it in names):
            raise ValueError(f"{self._where}: disk must be a directory or a list of directories, not {value!r}")
        return tuple(names)

    def options(self) -> Mapping[str, str | float]:
        value = self._config.get("object_options") or {}
        if not isinstance(value, Mapping):
            raise ValueError(f"{self._where}: object_options must be a mapping, not {value!r}")
        if value and not self._config.get("object"):
            raise ValueError(f"{self._where}: object_options needs object, the URL that they are for")
        return value


@dataclass
class OpenStore:
    """A store with its agent. `close` ends both."""

    agent: kvferry.Agent
    store: kvferry.Store

    def close(self) -> None:
        self.store.close()
        self.agent.shutdown()


def open_store(settings: OffloadSettings, host_bytes: int, logger: logging.Logger) -> OpenStore | None:
    """None, with a warning, if the store can't be used now. Raises ValueError if a setting is wrong."""
    # No peer may connect: the agent only registers memory for the store.
    agent = kvferry.Agent(listen="127.0.0.1:0", transports="local")
    try:
        store = _open(agent, settings, host_bytes, logger)
    except kvferry.InvalidArgumentError as error:
        agent.shutdown()
        raise ValueError(f"kvferry's store can't be opened with these settings: {error}") from error
    except (kvferry.Error, OSError) as error:
        agent.shutdown()
        where = ", ".join(settings.directories)
        logger.warning(
            "kvferry's store in %s can't be opened, so no block is stored or found until the engine is restarted: %s",
            where,
            error,
        )
        return None
    return OpenStore(agent, store)


def _open(agent: kvferry.Agent, settings: OffloadSettings, host_bytes: int, logger: logging.Logger) -> kvferry.Store:
    until = None
    while True:
        try:
            return kvferry.Store(
                agent,
                list(settings.directories),
                settings.disk_bytes,
                segment_bytes=None if settings.segment_mib is None else settings.segment_mib << 20,
                blocks_max=settings.blocks_max,
                direct=settings.direct,
                host_bytes=host_bytes,
                put_wait=PUT_WAIT_S,
                adopt_empty=settings.adopt_empty,
                must_exist=settings.must_exist,
                objects=settings.object,
                object_options=dict(settings.object_options) if settings.object else None,
            )
        except kvferry.BusyError as error:
            now = time.monotonic()
            if until is None:
                until = now + BUSY_S
                where = ", ".join(settings.directories)
                logger.warning("kvferry's store in %s can't be opened yet, and is tried again: %s", where, error)
            elif now >= until:
                raise
            time.sleep(BUSY_PAUSE_S)
