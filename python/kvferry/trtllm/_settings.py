"""The settings of the connector, and where they come from.

TensorRT-LLM's configuration of a connector names a module and two classes and, so far, has no room for more. Ranks that
it spawns inherit only variables whose names begin with TRTLLM or TLLM.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvferry._engine.address import has_port
from kvferry._engine.secret import PeerSettings
from kvferry._engine.settings import GIB, OF_STORE, Reader, StoreSettings, check_known

PREFIX = "TLLM_KVFERRY_"
_FILE = PREFIX + "CONFIG"
_WHERE = "the settings of kvferry.trtllm"
_OF_STORE = tuple(it for it in OF_STORE if it not in ("share_tp", "duration_max", "lease"))
_TEXTS = ("direct", "handoff", "listen", "load", "model", "object", "save", "secret_file")
_SWITCHES = ("adopt_empty", "must_exist")
_OF_HANDOFF = ("handoff", "handoff_gib", "handoff_timeout", "listen", "prefill", "producers", "secret_file")
_OWN = ("load", "load_wait", "save", "staging_gib", *_OF_HANDOFF)
# Where a deployment may have put more into `KvCacheConnectorConfig`.
_EXTRAS = ("extra_config", "connector_extra_config", "connector_config", "model_extra")


@dataclass(frozen=True, kw_only=True)
class HandoffSettings(PeerSettings):
    """See docs/trtllm.md."""

    WHERE = "kvferry.trtllm"

    role: Literal["off", "prefill", "decode", "both"]
    # Memory of rank 0, for all ranks.
    nbytes: int
    # Seconds for which a prompt is kept for an engine that decodes.
    timeout: float
    # "host:port"; None leaves it to kvferry's own environment and default, loopback.
    listen: str | None = None
    # Where engines that prefill listen.
    prefill: tuple[str, ...] = ()

    @property
    def prefills(self) -> bool:
        return self.role in ("prefill", "both")

    @property
    def decodes(self) -> bool:
        return self.role in ("decode", "both")

    @staticmethod
    def of(read: Reader) -> HandoffSettings:
        """Raises ValueError."""
        made = HandoffSettings(
            role=read.choice("handoff", ("off", "prefill", "decode", "both"), "off"),
            nbytes=int(read.number("handoff_gib", 1.0, 1 / 1024, 1 << 12) * GIB),
            timeout=read.number("handoff_timeout", 60.0, 1, 86_400),
            listen=read.text("listen"),
            prefill=tuple(dict.fromkeys(it.strip() for it in read.texts("prefill", "a list of host:port") or () if it)),
            secret_file=read.path("secret_file"),
            producers=read.texts("producers"),
        )
        if made.listen is not None and not has_port(made.listen):
            raise read.wrong("listen", "host:port, such as 0.0.0.0:7600")
        for address in made.prefill:
            if not has_port(address):
                raise ValueError(f"{_WHERE}: prefill must be a list of host:port, and has {address!r}")
        if made.decodes and not made.prefill:
            raise ValueError(f"{_WHERE}: handoff {made.role} needs prefill, where the engines listen that prefill")
        if made.prefills and made.listen is None:
            raise ValueError(f"{_WHERE}: handoff {made.role} needs listen, where the engines that decode find this one")
        return made


@dataclass(frozen=True)
class Settings:
    """See docs/trtllm.md."""

    store: StoreSettings
    handoff: HandoffSettings
    load: Literal["sync", "async", "off"]
    # Seconds for which a request's look-up may hold the executor.
    load_wait: float
    save: Literal["async", "sync", "off"]
    staging_bytes: int

    @staticmethod
    def of(llm_args: Any) -> Settings:
        """Later sources win: the file, KVFERRY_*, TLLM_KVFERRY_*, the connector's configuration. Raises ValueError."""
        found: dict[str, Any] = {}
        path = os.environ.get(_FILE)
        if path:
            found |= _of_file(path)
        found |= _of_environment("KVFERRY_", strict=False)
        found |= _of_environment(PREFIX, strict=True)
        found |= _of_config(getattr(llm_args, "kv_connector_config", None))
        check_known(found, (*_OF_STORE, *_OWN), f"{_WHERE}: no setting {{}}; there are {{}}")
        if not found.get("disk"):
            raise ValueError(
                f"{_WHERE}: set disk, the directory of the store: {PREFIX}DISK=/var/cache/kv {PREFIX}DISK_GIB=200"
            )
        read = Reader(found, _WHERE)
        return Settings(
            load=read.choice("load", ("sync", "async", "off"), "sync"),
            load_wait=read.number("load_wait", 2.0, 0, 600),
            save=read.choice("save", ("async", "sync", "off"), "async"),
            staging_bytes=int(read.number("staging_gib", 1.0, 1 / 1024, 1 << 12) * GIB),
            handoff=HandoffSettings.of(read),
            store=StoreSettings.of(found, _WHERE, _OWN),
        )


def _of_file(path: str) -> Mapping[str, Any]:
    try:
        found = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{_FILE}: {path} can't be read as a JSON object: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{_FILE}: {path} must hold a JSON object, not {type(found).__name__}")
    return found


def _of_environment(prefix: str, *, strict: bool) -> Mapping[str, Any]:
    """Numbers, lists and objects are JSON; switches are true or false."""
    known = {name.upper(): name for name in (*_OF_STORE, *_OWN)}
    found = {}
    for variable, text in os.environ.items():
        if not variable.startswith(prefix) or variable == _FILE:
            continue
        name = known.get(variable.removeprefix(prefix))
        if name is not None:
            if name in _SWITCHES:
                found[name] = {"true": True, "false": False}.get(text.lower(), text)
            else:
                found[name] = text if name in _TEXTS else _value(text)
        elif strict:
            raise ValueError(f"{variable} is no setting; there are {', '.join(prefix + it for it in sorted(known))}")
    return found


def _value(text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, int | float | list | dict) and not isinstance(value, bool) else text


def _of_config(config: Any) -> Mapping[str, Any]:
    for name in _EXTRAS:
        extra = getattr(config, name, None)
        if isinstance(extra, Mapping):
            return {str(key): value for key, value in extra.items()}
    return {}
