"""What names KV, for every adapter: the model as it is computed, and what of a request is not in its tokens.

If two engines could differ in a thing and compute other KV for the same tokens, it is in `Identity` or
`PromptIdentity`. The module of an engine's name fills in every field; there are no defaults, so that a new field is a
question to each of them. Engines' settings are read through the tables of `known`: one that no table has is in the
field `settings`. docs/storage.md has the table.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kvferry._engine.identity.known import Settings, UnnamedError, plain
from kvferry._engine.identity.weights import folder_of, has_weights, sample_of
from kvferry._engine.log import logger_of

# A property of a handshake has 1024 bytes at most. What is longer is named by its hash.
_VALUE_MAX = 512
_COMMIT = re.compile("[0-9a-f]{40}")


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What all KV of an engine depends on. None: the engine has no such thing.

    Where the operator names the model, that name stands for `model`, `revision` and `weights`.
    """

    model: str
    # The commit of a hub's snapshot, where there is one.
    revision: str | None
    # A hash of samples.
    weights: str | None
    quantization: str | None
    dtype: str
    # How the weights are loaded, and by which implementation of the model.
    loading: str | None
    # Frequencies and scaling of rotary embeddings, with the branch that the engine's length chooses.
    rope: str | None
    # Changes of the model's configuration that are not in its folder.
    overrides: str | None
    # Number format and scales of the cache.
    cache: str | None
    # Where the kernels are not those of NVIDIA or of a CPU: what gives number formats and pages another meaning.
    platform: str | None
    # The model of speculative decoding, where it has KV and weights of its own.
    draft: str | None
    # Adapters that are loaded at start and that a request's identity does not tell apart.
    adapters: str | None
    # How images, audio and video are prepared and encoded, where a request's identity has only what they were before.
    media: str | None
    # Every other setting of the engine that is not known to leave KV as it is.
    settings: str | None

    def properties(self) -> dict[str, str]:
        """For the handshake of two engines, which compares what both give: every field is given."""
        return {it.name: bounded(_text(getattr(self, it.name))) for it in fields(self)}

    def text(self) -> str:
        """For the names of a store. Without these three they are those of earlier releases."""
        given = self.properties()
        for name in ("media", "platform", "settings"):
            if getattr(self, name) is None:
                del given[name]
        return json.dumps(given, sort_keys=True)


@dataclass(frozen=True, kw_only=True)
class PromptIdentity:
    """What the KV of a prompt depends on besides its tokens and the engine."""

    # Name and weights.
    adapter: tuple[str, str] | None
    # The content of each multimodal input, and where it is in the prompt.
    media: tuple[tuple[str, int], ...]
    # A hash of the bytes of prompt embeddings.
    embeddings: str | None
    tenant: str | None
    # The version of weights that were changed in the running engine.
    version: str | None

    def extra(self) -> list[str]:
        """For `kvferry.connector.prompt_id`. Empty for a prompt of tokens alone."""
        parts = [f"lora:{name}" for name in self.adapter or ()]
        parts += [f"mm:{offset}:{name}" for name, offset in self.media]
        if self.embeddings is not None:
            parts.append(f"embeds:{self.embeddings}")
        if self.tenant is not None:
            parts.append(f"salt:{self.tenant}")
        if self.version is not None:
            parts.append(f"version:{self.version}")
        return parts


def _text(value: str | None) -> str:
    # Not a text that a value could have.
    return "-" if value is None else f"={value}"


def bounded(text: str) -> str:
    return text if len(text.encode()) <= _VALUE_MAX else "#" + hashlib.sha256(text.encode()).hexdigest()


def hash_of(value: Any) -> str:
    """A hash of plain data, whatever the order of its mappings. Raises `UnnamedError` for what has no name of its own,
    as functions.
    """
    return _short(json.dumps(plain(value), sort_keys=True))


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def fingerprint(parts: Any, *, sort_keys: bool = True) -> bytes:
    """What names a layout of blocks: a hash of all that their bytes depend on."""
    return hashlib.sha256(json.dumps(parts, sort_keys=sort_keys).encode()).digest()


class Engine:
    """An engine that names its KV. What has no name of its own gets one that no other engine has.

    `token`: what neither another engine has nor another start of this one. `adapter`: whose logger is used.
    """

    def __init__(self, token: str, adapter: str) -> None:
        self.token, self._log = token, logger_of(adapter)

    def hash_of(self, value: Any) -> str:
        """As the function of this name, also for functions."""
        try:
            return hash_of(value)
        except (UnnamedError, RecursionError) as error:
            self._log.warning("kvferry: no other engine shares this one's KV, because a setting has no name: %s", error)
            return _short(self.token)

    def hash_if(self, value: Any) -> str | None:
        return self.hash_of(value) if value else None

    def others(self, *settings: Settings) -> str | None:
        """The field `settings`."""
        found = {name: value for it in settings for name, value in it.others().items()}
        if found:
            self._log.info("kvferry: engines share KV only if they agree on %s", ", ".join(sorted(found)))
        return joined(**{name: self.hash_of(value) for name, value in sorted(found.items())})

    def sampled(
        self,
        name: str | None,
        revision: str | None = None,
        cache: str | None = None,
        *,
        code: bool = False,
        made: bool = False,
    ) -> tuple[str | None, str | None]:
        """Revision and weights of a model. `code`: its Python files are run. `made`: its weights are read from no file.

        Adapters call this after the engine has loaded the weights. Files that have changed since the process began may
        be others than those it has loaded, so they name nothing that another engine has. A commit's files do not
        change.
        """
        folder = folder_of(name, revision, cache)
        found = sample_of(folder, code=code)
        commit = _commit(folder)
        if found and found.has_weights and not made and commit is None and found.changed > process_began():
            self._log.warning(
                "kvferry: files of %s, or folders on the way to them, have changed since this process began (%s), so "
                "that the weights it has loaded may be others: until it is started again, no other engine shares its "
                "KV. Put models where nothing else is made on the way to them, or set model",
                name,
                found.what,
            )
            return revision, self.hash_of([found.digest, self.token])
        if name and not made and commit is None and not (found and found.has_weights):
            self._log.warning(
                "kvferry: the weights of %s are in no folder of this host, so that they are named by name and revision "
                "only; set model to another name when they change",
                name,
            )
        return commit or revision, found.digest if found else None


def joined(**parts: Any) -> str | None:
    given = [f"{name}={value}" for name, value in parts.items() if value not in (None, "")]
    return " ".join(given) or None


def maybe(value: Any) -> str | None:
    return None if value is None else str(getattr(value, "value", value))


def unless(value: Any, default: Any) -> str | None:
    given = maybe(value)
    return None if given == default else given


def digest_of(path: str | Path | None, *, code: bool = False) -> str | None:
    found = sample_of(path, code=code)
    return found.digest if found else None


def check_weights_are_named(who: str, source: str, folder: Path | None, places: list[str] | None = None) -> None:
    """Raises ValueError where new weights of `source` would have the name of the old ones, and an adapter keeps blocks
    beyond the process. `places`: where the weights are instead of `folder`, if that is elsewhere.
    """
    if not (any(map(has_weights, places)) if places else _commit(folder) is not None or has_weights(folder)):
        raise ValueError(
            f"{who}: the weights of {source} are not in a folder of this host, so that new weights there would find "
            "the blocks of the old ones; set model to a name that says the weights, and to another when they change"
        )


def process_began() -> float:
    """Seconds since the epoch."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age


def _commit(folder: Path | None) -> str | None:
    """None for a folder that has not its place in the cache of Hugging Face's hub: its files may change."""
    if folder is None or _COMMIT.fullmatch(folder.name) is None or folder.parent.name != "snapshots":
        return None
    return folder.name if folder.parent.parent.name.startswith("models--") else None


def began(pid: int | None = None) -> str:
    """A process, and when it began, since numbers of processes come again."""
    pid = os.getpid() if pid is None else pid
    try:
        fields_ = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return f"{pid}@{fields_[19]}@{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
    except OSError:
        # The process is in another container: then each rank is alone.
        return secrets.token_hex(16)


# FP8 of MI300 and MI325: half of what the same bits mean elsewhere.
_FNUZ = "rocm fnuz"


def rocm(is_fnuz: Callable[[], bool]) -> str | None:
    """The field `platform`. Kernels of ROCm take `fp8_e5m2` for e4m3, and have the pages of sparse attention's indexer
    in tiles. `is_fnuz`: asked on ROCm alone.
    """
    if not getattr(getattr(sys.modules.get("torch"), "version", None), "hip", None):
        return None
    return _FNUZ if is_fnuz() else "rocm"
