"""The weights of LoRA adapters, as the engine has loaded them."""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from kvferry._engine.identity.weights import folder_of, sample_of

# Adapters that are remembered, and names under which an engine may have cached KV of them.
_KEPT = 1024
# How long an engine's scheduler waits for the files of one adapter, for which share of all time at most, and how much
# of that may come at once.
_WAIT_S = 1.0
_WAIT_SHARE = 0.1
_WAIT_BURST_S = 2.0
# An adapter's files are not looked at again before, where the engine does not follow them. A look that began no longer
# ago answers without waiting for another.
_LOOKED_S = 1.0
_ANSWERS_S = 5.0
# Threads that may wait for files.
_LOOKING_MAX = 16

_log = logging.getLogger("kvferry.adapters")

_State = tuple[Any, ...]
Files = tuple[Any, ...]
"""The files of an adapter as they were at one time: plain data, which other processes of the host compare."""


@dataclass
class _Adapter:
    name: str
    path: str
    # What the engine has loaded: the state of the files, and a hash of samples. Without a state: what the next look
    # finds, or if `is_lost` nobody knows.
    loaded: _State | None = None
    digest: str = ""
    is_lost: bool = False
    # Whether the files are known to have had this state when the engine read them.
    is_sure: bool = False
    # What the last look found that has ended, and when that began. No state: it failed.
    now: _State | None = None
    now_at: float = -math.inf
    look: _Look | None = None
    # Counts loads and new paths: a look that began before is about other files or other weights.
    turn: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begin_turn(self) -> None:
        """A look that is under way may end when it likes."""
        self.turn += 1
        self.look = None

    @property
    def looked_at(self) -> float:
        """When the last look began."""
        return self.look.began_at if self.look is not None else -math.inf

    @property
    def is_looking(self) -> bool:
        return self.look is not None and not self.look.ended.is_set()


class Adapters:
    """vLLM loads an adapter at `add_lora` or for its first request, and keeps it by its number, `lora_int_id`, whatever
    becomes of its files, until others take its place and it is read again, which the scheduler does not see. So an
    adapter whose files were found to be others since equals nothing, not even itself, until it is loaded anew, also
    where they have become those of before again. An adapter that vLLM was told to load in place has `load_inplace` in
    each request that follows, and is read in each step.

    Files are looked at on threads of their own: a file system that is slow, or hangs, does not stop the scheduler.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[int, _Adapter] = OrderedDict()
        self._looks: list[_Look] = []
        self._patience = _Patience()
        self._cached = _Cached()

    def saw(self, lora: Any) -> None:
        """A request has an adapter: the engine loads it for its first step, if it has not before."""
        is_new = lora.lora_int_id not in self._known
        it = self._adapter(lora)
        if is_new or (_in_place(lora) and time.monotonic() >= it.looked_at + _LOOKED_S):
            self._look(it, follows=_in_place(lora))

    def weights(self, lora: Any) -> str:
        """A name for the weights that the engine computes with now."""
        it, now = self._adapter(lora), time.monotonic()
        if _in_place(lora):
            # What an earlier look has found may be another by now.
            self._look_now(it, follows=True)
            least = now
        else:
            if not it.is_lost and now >= it.looked_at + _LOOKED_S:
                self._look(it)
            if it.loaded is None or it.now_at < now - _ANSWERS_S:
                self._wait(it)
            least = now - _ANSWERS_S
        is_known = not it.is_lost and it.loaded is not None and it.now == it.loaded and it.now_at >= least
        return it.digest if is_known else secrets.token_hex(16)

    def still(self, lora: Any, weights: str, *, looks: bool = False) -> bool:
        """Whether what the engine has computed since `weights` named them is computed with these weights. `looks`: by
        files as they are now, since the engine may have read them again for the last step.
        """
        if _in_place(lora):
            return self.weights(lora) == weights
        it = self._adapter(lora)
        if it.digest == weights and (looks or not it.is_sure):
            # The engine has loaded it for a request, after a look.
            began = time.monotonic()
            self._look_now(it)
            it.is_sure = it.now_at >= began and it.now == it.loaded
        return it.is_sure and it.digest == weights and it.now == it.loaded

    def files(self, lora: Any, weights: str) -> Files:
        """The files that `weights` name, as the engine has read them: none if they name others."""
        it = self._adapter(lora)
        with it.lock:
            return (it.loaded or ()) if it.digest == weights else ()

    @property
    def are_mixed(self) -> bool:
        """Whether `may_be_mixed` is true of any."""
        return self._cached.are_mixed

    def may_be_mixed(self, lora: Any) -> bool:
        """Whether blocks that the engine has cached under this adapter's name and path may be of other weights."""
        return self._cached.is_mixed((lora.lora_name, lora.lora_path))

    def cache_was_emptied(self) -> None:
        self._cached.clear()

    def loads(self, lora: Any) -> Callable[[bool], object]:
        """The engine loads an adapter now. What is returned is called when it has, with whether it succeeded."""
        is_known = lora.lora_int_id in self._known
        if is_known and not _in_place(lora):
            # It is loaded, or was and is read again: a look finds whether from the same files.
            return lambda _: None
        it = self._adapter(lora)
        began = time.monotonic()
        # The engine reads all of it here, which takes longer than a look.
        self._look_now(it, only_state=True, is_patient=True)
        before = it.now if it.now_at >= began else None

        def has_loaded(has: bool) -> None:
            if not has and not is_known:
                self._known.pop(lora.lora_int_id, None)
                return
            with it.lock:
                it.begin_turn()
                it.loaded, it.digest, it.is_lost, it.is_sure = None, "", True, has
            if has and before is not None:
                self._look(it, before=before)

        return has_loaded

    def _adapter(self, lora: Any) -> _Adapter:
        it = self._known.get(lora.lora_int_id)
        if it is None:
            while len(self._known) >= _KEPT:
                self._known.popitem(last=False)
            it = self._known[lora.lora_int_id] = _Adapter(lora.lora_name, lora.lora_path)
        self._known.move_to_end(lora.lora_int_id)
        if _in_place(lora) and (it.name, it.path) != (lora.lora_name, lora.lora_path):
            with it.lock:
                it.begin_turn()
                it.name, it.path = lora.lora_name, lora.lora_path
        return it

    def _look_now(
        self, it: _Adapter, *, follows: bool = False, only_state: bool = False, is_patient: bool = False
    ) -> None:
        """Waits for a look that begins now, if the one before it ends soon."""
        self._wait(it, is_patient=is_patient)
        self._look(it, follows=follows, only_state=only_state)
        self._wait(it, is_patient=is_patient)

    def _wait(self, it: _Adapter, *, is_patient: bool = False) -> None:
        """Waits for a look that is under way. One that takes longer is waited for once."""
        if it.look is not None and it.is_looking:
            most = max(0.0, it.looked_at + _WAIT_S - time.monotonic())
            if is_patient:
                it.look.ended.wait(most)
            else:
                self._patience.wait(it.look.ended, most)

    def _look(
        self, it: _Adapter, *, follows: bool = False, only_state: bool = False, before: _State | None = None
    ) -> None:
        """Has a thread look at an adapter's files, unless one does, or too many look at others.

        `follows`: the engine reads them in each step. `only_state`: it has not read them yet. `before`: it has read
        them, and this was their state before.
        """
        self._looks = [look for look in self._looks if not look.ended.is_set()]
        if it.is_looking or len(self._looks) >= _LOOKING_MAX:
            return
        reads = not only_state and (follows or before is not None or (it.loaded is None and not it.is_lost))
        what = _Purpose.READ if reads else _Purpose.BEFORE_LOAD if only_state else _Purpose.COMPARE
        look = _Look(it, it.turn, it.name, it.path, self._cached, what, before, time.monotonic(), threading.Event())
        try:
            threading.Thread(target=look.run, name="kvferry-adapter", daemon=True).start()
        except RuntimeError:
            # No more threads.
            return
        it.look = look
        self._looks.append(look)


class Unchanged:
    """Whether the files of adapters are those of before. A thread looks at them: a file system that hangs stops no
    engine.
    """

    def __init__(self) -> None:
        self._looks: list[tuple[str, threading.Event]] = []
        self._patience = _Patience()

    def are(self, files: Files) -> bool:
        """False also where nothing is known of them now."""
        self._looks = [it for it in self._looks if not it[1].is_set()]
        if not files or len(self._looks) >= _LOOKING_MAX or any(path == files[0] for path, _ in self._looks):
            return False
        path, ended = str(files[0]), threading.Event()
        found: list[Files] = []

        def look() -> None:
            with suppress(Exception):
                found.append(_state_of(path, folder_of(path)))
            ended.set()

        try:
            threading.Thread(target=look, name="kvferry-adapter", daemon=True).start()
        except RuntimeError:
            # No more threads.
            return False
        self._looks.append((path, ended))
        self._patience.wait(ended, _WAIT_S)
        return found == [files]


def _in_place(lora: Any) -> bool:
    return bool(getattr(lora, "load_inplace", False))


class _Patience:
    """How long a scheduler may still wait."""

    def __init__(self) -> None:
        self._left, self._at = _WAIT_BURST_S, time.monotonic()

    def wait(self, ended: threading.Event, most: float) -> None:
        began = time.monotonic()
        self._left = min(_WAIT_BURST_S, self._left + (began - self._at) * _WAIT_SHARE)
        ended.wait(max(0.0, min(most, self._left)))
        self._at = time.monotonic()
        self._left -= self._at - began


class _Cached:
    """Which weights an engine's cached blocks may be of, by what vLLM names an adapter's blocks: its name and path."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # None: of several.
        self._digests: OrderedDict[tuple[str, str], str | None] = OrderedDict()
        self.are_mixed = False

    def add(self, of: tuple[str, str], digest: str) -> None:
        with self._lock:
            known = self._digests.setdefault(of, digest)
            if known != digest:
                self._digests[of], self.are_mixed = None, True
            self._digests.move_to_end(of)
            if len(self._digests) > _KEPT:
                self._digests.popitem(last=False)

    def is_mixed(self, of: tuple[str, str]) -> bool:
        with self._lock:
            return of in self._digests and self._digests[of] is None

    def clear(self) -> None:
        with self._lock:
            self._digests.clear()
            self.are_mixed = False


class _Purpose(Enum):
    # The engine has read what the look finds, or will.
    READ = "read"
    # The engine has read the files before: others may have been read since.
    COMPARE = "compare"
    # The engine is about to read them.
    BEFORE_LOAD = "before a load"


@dataclass
class _Look:
    """A look at an adapter's files, on a thread of its own."""

    adapter: _Adapter
    # Those of the adapter when this look began. It may get others while the look hangs.
    turn: int
    name: str
    path: str
    cached: _Cached
    purpose: _Purpose
    # What was found before the engine read the files, if that is known.
    before: _State | None
    began_at: float
    ended: threading.Event

    def run(self) -> None:
        it = self.adapter
        now: _State | None = None
        digest: str | None = None
        with suppress(Exception):
            folder = folder_of(self.path)
            now = _state_of(self.path, folder)
            if self.purpose is _Purpose.READ and self.before in (None, now) and now != it.loaded:
                sample = sample_of(folder)
                found = sample.digest if sample is not None and sample.has_weights else "unknown " + self.path
                # Else the files change just now.
                if now == _state_of(self.path, folder):
                    digest = found
        with it.lock:
            if self.turn == it.turn:
                it.now, it.now_at = now, self.began_at
                if digest is not None:
                    self.cached.add((self.name, self.path), digest)
                    it.digest, it.loaded, it.is_lost = digest, now, False
                elif self.purpose is _Purpose.COMPARE and None not in (now, it.loaded) and now != it.loaded:
                    # The engine may have these weights now, and blocks of them in its cache, and keep them when the
                    # files become those of before again.
                    self.cached.add((self.name, self.path), secrets.token_hex(16))
                    it.digest, it.loaded, it.is_lost, it.is_sure = "", None, True, False
                    _log.warning(
                        "the files of adapter %r at %s are not those that were loaded: KV of it is neither stored nor "
                        "handed over until it is loaded anew, under another number or in place",
                        self.name,
                        self.path,
                    )
        self.ended.set()


def _state_of(path: str, folder: Path | None) -> _State:
    if folder is None:
        return (path,)
    files = sorted(folder.iterdir()) if folder.is_dir() else [folder]
    states = ((file.name, file.stat()) for file in files if file.is_file())
    return (path, *((name, it.st_mtime_ns, it.st_size, it.st_ino) for name, it in states))
