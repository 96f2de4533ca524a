"""The settings of the connector, and where they come from.

TensorRT-LLM's configuration of a connector names a module and two classes and, so far, has no room for more. Ranks that
it spawns inherit only variables whose names begin with TRTLLM or TLLM.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kvferry.vllm._offload_settings import GIB, OffloadSettings

PREFIX = "TLLM_KVFERRY_"
_FILE = PREFIX + "CONFIG"
_LOADS = ("sync", "async", "off")
_SAVES = ("async", "sync", "off")
_OF_STORE = (
    "disk",
    "disk_gib",
    "host_gib",
    "object",
    "object_options",
    "model",
    "priority",
    "priority_max",
    "blocks_max",
    "segment_mib",
    "direct",
    "adopt_empty",
    "must_exist",
)
_HANDOFFS = ("off", "prefill", "decode", "both")
_TEXTS = ("direct", "handoff", "listen", "load", "model", "object", "save", "secret_file")
_SWITCHES = ("adopt_empty", "must_exist")
_OF_HANDOFF = ("handoff", "handoff_gib", "handoff_timeout", "listen", "prefill", "producers", "secret_file")
_OWN = ("load", "load_wait", "save", "staging_gib", *_OF_HANDOFF)
# Where a deployment may have put more into `KvCacheConnectorConfig`.
_EXTRAS = ("extra_config", "connector_extra_config", "connector_config", "model_extra")


@dataclass(frozen=True)
class HandoffSettings:
    """See docs/trtllm.md."""

    role: Literal["off", "prefill", "decode", "both"] = "off"
    # Memory of rank 0, for all ranks.
    nbytes: int = GIB
    # Seconds for which a prompt is kept for an engine that decodes.
    timeout: float = 60.0
    # "host:port"; None leaves it to kvferry's own environment and default, loopback.
    listen: str | None = None
    # Where engines that prefill listen.
    prefill: tuple[str, ...] = ()
    secret_file: str | None = None
    # Hosts, networks and names that KV may come from; None: this host and its network, or any with a secret.
    producers: tuple[str, ...] | None = None

    @property
    def prefills(self) -> bool:
        return self.role in ("prefill", "both")

    @property
    def decodes(self) -> bool:
        return self.role in ("decode", "both")

    def secret(self) -> bytes | None:
        """None leaves it to kvferry's own environment. Raises ValueError."""
        if self.secret_file is None:
            return None
        try:
            secret = Path(self.secret_file).read_bytes().rstrip()
        except OSError as error:
            raise ValueError(f"kvferry.trtllm: secret_file can't be read: {error}") from error
        if not secret:
            raise ValueError(f"kvferry.trtllm: secret_file {self.secret_file} is empty")
        return secret

    def has_secret(self) -> bool:
        """Whether peers need a secret."""
        return bool(self.secret_file or os.environ.get("KVFERRY_SECRET_FILE") or os.environ.get("KVFERRY_SECRET"))

    @staticmethod
    def take(found: dict[str, Any], where: str) -> HandoffSettings:
        """Takes its settings out of `found`. Raises ValueError."""
        role = _choice(where, "handoff", found.pop("handoff", "off"), _HANDOFFS)
        nbytes = int(_number(where, "handoff_gib", found.pop("handoff_gib", 1.0), 1 / 1024, 1 << 12) * GIB)
        timeout = _number(where, "handoff_timeout", found.pop("handoff_timeout", 60.0), 1, 86_400)
        texts = {name: found.pop(name, None) for name in ("listen", "secret_file")}
        for name, value in texts.items():
            if not isinstance(value, str | None):
                raise ValueError(f"{where}: {name} must be a text, not {value!r}")
        listen = texts["listen"] or None
        if listen is not None and not listen.rpartition(":")[2].isdigit():
            raise ValueError(f"{where}: listen must be host:port, such as 0.0.0.0:7600, not {listen!r}")
        given = found.pop("prefill", ())
        prefill = tuple(given.split(",")) if isinstance(given, str) else tuple(given)
        prefill = tuple(it.strip() if isinstance(it, str) else it for it in prefill if it != "")
        for address in prefill:
            if not isinstance(address, str) or not address.rpartition(":")[2].isdigit():
                raise ValueError(f"{where}: prefill must be a list of host:port, and has {address!r}")
        if role in ("decode", "both") and not prefill:
            raise ValueError(f"{where}: handoff {role} needs prefill, where the engines listen that prefill")
        if role in ("prefill", "both") and listen is None:
            raise ValueError(f"{where}: handoff {role} needs listen, where the engines that decode find this one")
        secret_file = texts["secret_file"] or None
        named = found.pop("producers", None)
        if isinstance(named, str):
            named = [it.strip() for it in named.split(",") if it.strip()]
        if named is not None and not (isinstance(named, list | tuple) and all(isinstance(it, str) for it in named)):
            raise ValueError(f"{where}: producers must be a list of texts, not {named!r}")
        producers = None if named is None else tuple(named)
        return HandoffSettings(role, nbytes, timeout, listen, prefill, secret_file, producers)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Settings:
    """See docs/trtllm.md."""

    store: OffloadSettings
    load: Literal["sync", "async", "off"] = "sync"
    # Seconds for which a request's look-up may hold the executor.
    load_wait: float = 2.0
    save: Literal["async", "sync", "off"] = "async"
    staging_bytes: int = GIB
    handoff: HandoffSettings = field(default_factory=HandoffSettings)

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
        where = "the settings of kvferry.trtllm"
        load, save = (
            _choice(where, name, found.pop(name, names[0]), names)
            for name, names in (("load", _LOADS), ("save", _SAVES))
        )
        load_wait = _number(where, "load_wait", found.pop("load_wait", 2.0), 0, 600)
        staging = _number(where, "staging_gib", found.pop("staging_gib", 1.0), 1 / 1024, 1 << 12)
        handoff = HandoffSettings.take(found, where)
        unknown = sorted(set(found) - set(_OF_STORE))
        if unknown:
            known = ", ".join(sorted((*_OF_STORE, *_OWN)))
            raise ValueError(f"{where}: no setting {', '.join(map(repr, unknown))}; there are {known}")
        if not found.get("disk"):
            raise ValueError(
                f"{where}: set disk, the directory of the store: {PREFIX}DISK=/var/cache/kv {PREFIX}DISK_GIB=200"
            )
        store = OffloadSettings.of(found, where)
        return Settings(store, load, load_wait, save, int(staging * GIB), handoff)  # type: ignore[arg-type]


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


def _choice(where: str, name: str, value: Any, names: tuple[str, ...]) -> str:
    if value not in names:
        raise ValueError(f"{where}: {name} must be one of {', '.join(names)}, not {value!r}")
    return str(value)


def _number(where: str, name: str, value: Any, least: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise ValueError(f"{where}: {name} must be a number from {least:g} to {most:g}, not {value!r}")
    return float(value)
