"""Prepared lists, the batches made of them, and transfers."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np

import kvferry
from kvferry._engine.log import logger_of
from kvferry._engine.quiet import is_quiet
from kvferry.nixl._bindings import nixl_mem_t, nixlXferTelemetry
from kvferry.nixl._errors import (
    GONE,
    as_nixl,
    nixlInvalidParamError,
    nixlNotFoundError,
    nixlNotPostedError,
    nixlNotSupportedError,
    nixlRepostActiveError,
    translated,
)
from kvferry.nixl._memory import Area, Array, Remote

if TYPE_CHECKING:
    from kvferry.nixl._api import nixl_agent

_log = logger_of("nixl")

# The name that notifications have at kvferry's level; NIXL's have none.
NOTIFICATION: Final = "nixl"
# A caller that asks for the state again within this time is in a loop: its thread then waits for the outcome as long,
# so that it does not take the core that moves the bytes.
POLL_S: Final = 0.0002
# For a cancelled transfer to end. It takes milliseconds, unless a peer or a device does not answer.
CANCEL_S: Final = 1.0


@dataclass(eq=False)
class Ranges:
    """Ranges of one side of a transfer. `which`: for each range, the position of its area in `areas`."""

    remote: Remote | None
    kind: nixl_mem_t
    addrs: Array
    lengths: Array
    which: Array
    areas: list[Area]

    def __len__(self) -> int:
        return len(self.addrs)


class nixl_prepped_dlist_handle:  # noqa: N801 - NIXL's name
    """A list of descriptors that was checked. `is_local`: the initiator's side of transfers."""

    __slots__ = ("_agent", "_is_local", "_ranges", "_released")

    def __init__(self, agent: nixl_agent, ranges: Ranges, is_local: bool) -> None:
        self._agent = agent
        self._ranges = ranges
        self._is_local = is_local
        self._released = False

    def release(self) -> None:
        """Gives the list up. Transfers made of it stay."""
        self._released = True

    def __repr__(self) -> str:
        return f"<nixl_prepped_dlist_handle of {len(self._ranges)} descriptors, released={self._released}>"


def indices(given: Any, of: Ranges) -> Array:
    """Positions in a list, from a list or an array of integers."""
    at = np.asarray(given)
    if at.size == 0:
        at = at.astype(np.int64)
    if at.ndim != 1 or at.dtype.kind not in "iu":
        raise nixlInvalidParamError("indices must be a list or a one-dimensional array of integers")
    # Read without a sign, a negative number is beyond the list, too.
    if at.size and int(at.view(f"u{at.itemsize}").max()) >= len(of):
        raise nixlInvalidParamError(f"an index is not within the list of {len(of)} descriptors")
    return at


def _used(ranges: Ranges, which: Array) -> list[Area]:
    """The areas that some ranges lie in."""
    if len(ranges.areas) == 1:
        return ranges.areas
    return [ranges.areas[at] for at in np.unique(which)]


class Plan:
    """The descriptors of one transfer as kvferry's batch, neighbours merged."""

    def __init__(self, local: Ranges, mine: Array | slice, other: Ranges, theirs: Array | slice, merge: bool) -> None:
        if local.kind is nixl_mem_t.FILE_SEG:
            raise nixlNotSupportedError("the initiator's side of a transfer must be memory")
        here, there = local.addrs[mine], other.addrs[theirs]
        lengths, which, whose = local.lengths[mine], local.which[mine], other.which[theirs]
        if len(here) != len(there):
            raise nixlInvalidParamError(f"{len(here)} local descriptors, but {len(there)} remote ones")
        if len(here) == 0:
            raise nixlInvalidParamError("the transfer has no descriptors")
        if not np.array_equal(lengths, other.lengths[theirs]):
            raise nixlInvalidParamError("local and remote descriptors differ in length")
        if merge and len(here) > 1:
            follows = (here[1:] == here[:-1] + lengths[:-1]) & (there[1:] == there[:-1] + lengths[:-1])
            follows &= (which[1:] == which[:-1]) & (whose[1:] == whose[:-1])
            if follows.any():
                first = np.concatenate(([0], np.flatnonzero(~follows) + 1))
                here, there, which, whose = here[first], there[first], which[first], whose[first]
                lengths = np.add.reduceat(lengths, first)
        if not lengths.all():
            some = lengths != 0
            here, there, lengths, which, whose = here[some], there[some], lengths[some], which[some], whose[some]
        self.remote = other.remote
        self.is_file = other.kind is nixl_mem_t.FILE_SEG
        self.areas, self.others = _used(local, which), _used(other, whose)
        self.is_gpu = any(area.is_gpu for area in [*self.areas, *self.others])
        self.descriptors = len(here)
        self.batch = kvferry.Batch()
        with as_nixl():
            if self.is_file or self.is_gpu:
                self._by_region(local, other, here, there, lengths, which, whose)
            elif len(here):
                self._to_memory(local.areas[which[0]], other.areas[whose[0]], here, there, lengths)
        self.nbytes = self.batch.nbytes

    def uses(self, areas: list[Area]) -> bool:
        """Whether it moves from or to one of these areas of this agent."""
        mine = self.areas if self.remote is not None else [*self.areas, *self.others]
        return any(area in mine for area in areas)

    def _to_memory(self, mine: Area, theirs: Area, here: Array, there: Array, lengths: Array) -> None:
        """The first descriptor names the remote region and so its agent's incarnation; the others need none."""
        assert mine.region is not None
        at = int(here[0]) - mine.addr, int(there[0]) - theirs.addr
        self.batch.push(mine.region, at[0], theirs.remote, at[1], int(lengths[0]))
        if len(here) > 1:
            columns = (np.ascontiguousarray(column[1:]) for column in (here, there, lengths))
            self.batch.extend(*columns)

    def _by_region(
        self, local: Ranges, other: Ranges, here: Array, there: Array, lengths: Array, which: Array, whose: Array
    ) -> None:
        pair = which.astype(np.int64) * len(other.areas) + whose
        # A model has a pair of regions for each layer: one sort finds the rows of each pair.
        order = np.argsort(pair, kind="stable")
        pair, here, there, lengths = pair[order], here[order], there[order], lengths[order]
        begins = [0, *(np.flatnonzero(pair[1:] != pair[:-1]) + 1).tolist(), len(pair)]
        for begin, end in pairwise(begins):
            if begin == end:
                continue
            number = int(pair[begin])
            mine, theirs = local.areas[number // len(other.areas)], other.areas[number % len(other.areas)]
            assert mine.region is not None
            offsets = here[begin:end] - np.uint64(mine.addr), there[begin:end] - np.uint64(theirs.addr)
            self.batch.extend_regions(mine.region, offsets[0], theirs.remote, offsets[1], lengths[begin:end])


class nixl_xfer_handle:  # noqa: N801 - NIXL's name
    """A transfer, which may be posted again after its end. `error`: why it failed, or None."""

    __slots__ = (
        "__weakref__", "_agent", "_ended", "_job", "_lock", "_notify", "_plan", "_posted", "_released", "_seen",
        "_started", "_took", "_write", "error",
    )  # fmt: skip

    def __init__(self, agent: nixl_agent, write: bool, plan: Plan, notify: bytes) -> None:
        self._agent = agent
        self._write = write
        self._plan = plan
        self._notify = notify
        self._lock = threading.Lock()
        self._job: kvferry.Transfer | None = None
        self._ended: str | None = None
        self._released = False
        self._posted = self._started = self._took = self._seen = 0.0
        self.error: Exception | None = None

    def __repr__(self) -> str:
        return f"<nixl_xfer_handle of {self._plan.descriptors} descriptors, {self._ended or 'PROC'}>"

    def _post(self, notify: bytes) -> str:
        self._agent._must_not_be_forked()
        with self._lock:
            self._must_live()
            if self._job is not None and self._state(wait=False) == "PROC":
                raise nixlRepostActiveError("the transfer still runs")
            if self._ended == "ERR" and self._job is not None and not self._job.is_quiet():
                # It would be forgotten, and `release` would not wait for it.
                raise nixlRepostActiveError("the transfer has failed, but a device still copies for it")
            message = notify or self._notify
            began = time.perf_counter()
            # Memory that is deregistered at the same time is either found gone here, or this transfer is found there.
            with self._agent._lock, as_nixl():
                self._agent._must_be_usable(self._plan)
                self._job = self._submit(message)
                self._ended = self.error = None
                self._agent._running.add(self)
            self._posted = time.time()
            state = self._state(wait=False)
            self._started, self._took = began, time.perf_counter() - began
            return state

    def _submit(self, message: bytes) -> kvferry.Transfer:
        plan = self._plan
        if plan.is_file:
            files = self._agent._core().files
            return (files.write_async if self._write else files.read_async)(plan.batch)
        peer = self._agent._peer(plan.remote)
        submit = peer.write_async if self._write else peer.read_async
        return submit(plan.batch, notify=(NOTIFICATION, message) if message else None)

    def _check(self) -> str:
        self._agent._must_not_be_forked()
        with self._lock:
            self._must_live()
            if self._job is None:
                raise nixlNotPostedError("the transfer was not posted")
            now = time.perf_counter()
            state = self._state(wait=now - self._seen < POLL_S)
            if state == "PROC":
                self._seen = time.perf_counter()
            return state

    def _state(self, wait: bool) -> str:
        """The state, after waiting a moment for the end if asked to. The caller holds the lock."""
        if self._ended is not None:
            return self._ended
        assert self._job is not None
        try:
            ended = self._job.wait(POLL_S) if wait else self._job.poll()
        except kvferry.Error as error:
            self._fail(error)
        else:
            if ended is None:
                return "PROC"
            self._ended = "DONE"
        self._seen = time.perf_counter()
        self._agent._ended(self)
        assert self._ended is not None
        return self._ended

    def _fail(self, error: kvferry.Error) -> None:
        self._ended = "ERR"
        self.error = translated(error)
        remote = self._plan.remote
        if remote is not None and isinstance(error, GONE):
            remote.lost = True
        name = remote.name if remote is not None else "this agent"
        _log.info("transfer with %s failed: %s", name, error)

    def _telemetry(self) -> nixlXferTelemetry:
        self._agent._must_not_be_forked()
        with self._lock:
            self._must_live()
            if self._job is None:
                raise nixlNotPostedError("the transfer was not posted")
            end = self._seen if self._ended is not None else time.perf_counter()
            taken = max(end - self._started, self._took)
            return nixlXferTelemetry(
                startTime=int(self._posted * 1e6),
                postDuration=math.ceil(self._took * 1e6),
                xferDuration=math.ceil(taken * 1e6),
                totalBytes=self._plan.nbytes,
                descCount=self._plan.descriptors,
            )

    def _must_live(self) -> None:
        if self._released:
            raise nixlInvalidParamError("the transfer was released")

    def _cancel(self, limit_s: float) -> bool:
        """Cancels a running transfer and waits for its end. False if its memory may still be in use then."""
        job = self._job
        if job is None:
            return True
        until = time.monotonic() + limit_s
        if self._ended is None:
            # The caller gives the transfer up: an error of it is of no use.
            with contextlib.suppress(kvferry.Error):
                job.cancel()
                job.wait(limit_s)
        return is_quiet(job, until - time.monotonic())

    def release(self) -> None:
        """Gives the transfer up. A running one is cancelled: after this, nothing copies from or to its memory.

        nixlRepostActiveError if it does not end: then the handle stays valid, and the memory in use.
        """
        if self._agent._is_forked:
            # Nothing runs here, and a thread of the parent may have held the lock.
            self._released = True
        if self._released:
            return
        with self._lock:
            if not self._cancel(CANCEL_S):
                raise nixlRepostActiveError(f"the transfer still uses its memory {CANCEL_S} s after it was cancelled")
            self._released = True
        self._agent._ended(self)

    def __del__(self) -> None:
        job = getattr(self, "_job", None)
        if job is not None and not self._released and self._ended is None and not self._agent._is_forked:
            # Not waited for. Its memory stays in use until it ends: `deregister_memory` waits for it.
            try:
                job.cancel()
                self._agent._left_behind(self._plan, job)
            except Exception:  # the interpreter may be at its end
                pass


def columns(rows: Array) -> tuple[Array, Array]:
    """Addresses and lengths."""
    return np.ascontiguousarray(rows[:, 0]), np.ascontiguousarray(rows[:, 1])


def file_areas(rows: Array, files: dict[int, list[Area]]) -> tuple[list[Area], Array]:
    """The registered ranges of files, and for each row the position of the one that it lies in."""
    devices, of = np.unique(rows[:, 2], return_inverse=True)
    begins, ends = rows[:, 0], rows[:, 0] + rows[:, 1]
    areas: list[Area] = []
    which = np.zeros(len(rows), dtype=np.int32)
    for number, device in enumerate(devices.tolist()):
        if device not in files:
            raise nixlNotFoundError(f"no file is registered as device {device}")
        left = of.reshape(-1) == number
        for area in files[device]:
            inside = left & (begins >= area.addr) & (ends <= area.end) & (ends >= begins)
            if inside.any():
                which[inside] = len(areas)
                areas.append(area)
                left &= ~inside
            if not left.any():
                break
        else:
            raise nixlNotFoundError(f"a descriptor lies in no registered range of the file with device {device}")
    return areas, which
