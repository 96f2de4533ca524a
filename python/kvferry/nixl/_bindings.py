"""What callers import of ``nixl._bindings``: constants, exceptions, descriptor lists, telemetry.

A list of descriptors is columns of numbers, so that a list of any length is read, checked and cut without a Python
object per descriptor.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kvferry.nixl._errors import (
    nixlBackendError,
    nixlCancelledError,
    nixlInvalidParamError,
    nixlMismatchError,
    nixlNotAllowedError,
    nixlNoTelemetryError,
    nixlNotFoundError,
    nixlNotPostedError,
    nixlNotSupportedError,
    nixlRemoteDisconnectError,
    nixlRepostActiveError,
    nixlUnknownError,
)

DEFAULT_COMM_PORT: Final = 8888
NIXL_INIT_AGENT: Final = ""
HAVE_UCX_GPU_DEVICE_API: Final = False


class nixl_mem_t(enum.IntEnum):  # noqa: N801 - NIXL's names
    """Kinds of memory."""

    DRAM_SEG = 0
    VRAM_SEG = 1
    BLK_SEG = 2
    OBJ_SEG = 3
    FILE_SEG = 4


class nixl_xfer_op_t(enum.IntEnum):  # noqa: N801
    """Directions of a transfer."""

    NIXL_READ = 0
    NIXL_WRITE = 1


class nixl_status_t(enum.IntEnum):  # noqa: N801
    """Results of NIXL's calls."""

    NIXL_IN_PROG = 1
    NIXL_SUCCESS = 0
    NIXL_ERR_NOT_POSTED = -1
    NIXL_ERR_INVALID_PARAM = -2
    NIXL_ERR_BACKEND = -3
    NIXL_ERR_NOT_FOUND = -4
    NIXL_ERR_MISMATCH = -5
    NIXL_ERR_NOT_ALLOWED = -6
    NIXL_ERR_REPOST_ACTIVE = -7
    NIXL_ERR_UNKNOWN = -8
    NIXL_ERR_NOT_SUPPORTED = -9


class nixl_thread_sync_t(enum.Enum):  # noqa: N801
    """Modes of locking. They have no effect: every call may come from any thread."""

    NIXL_THREAD_SYNC_NONE = 0
    NIXL_THREAD_SYNC_STRICT = 1
    NIXL_THREAD_SYNC_RW = 2
    NIXL_THREAD_SYNC_DEFAULT = 3


DRAM_SEG, VRAM_SEG, BLK_SEG, OBJ_SEG, FILE_SEG = nixl_mem_t
NIXL_READ, NIXL_WRITE = nixl_xfer_op_t
(
    NIXL_IN_PROG,
    NIXL_SUCCESS,
    NIXL_ERR_NOT_POSTED,
    NIXL_ERR_INVALID_PARAM,
    NIXL_ERR_BACKEND,
    NIXL_ERR_NOT_FOUND,
    NIXL_ERR_MISMATCH,
    NIXL_ERR_NOT_ALLOWED,
    NIXL_ERR_REPOST_ACTIVE,
    NIXL_ERR_UNKNOWN,
    NIXL_ERR_NOT_SUPPORTED,
) = nixl_status_t
(
    NIXL_THREAD_SYNC_NONE,
    NIXL_THREAD_SYNC_STRICT,
    NIXL_THREAD_SYNC_RW,
    NIXL_THREAD_SYNC_DEFAULT,
) = nixl_thread_sync_t


def mem_type(kind: nixl_mem_t | int) -> nixl_mem_t:
    """A kind of memory, or a TypeError as a typed binding raises it."""
    try:
        return nixl_mem_t(kind)
    except ValueError:
        raise TypeError(f"expected a nixl_mem_t, not {kind!r}") from None


def rows_of(descs: Any, width: int) -> np.ndarray[Any, Any]:
    """An N x `width` array of integers without a sign. TypeError or ValueError for anything else."""
    if isinstance(descs, np.ndarray):
        if descs.dtype.kind not in "iu" or descs.ndim != 2 or descs.shape[1] != width:
            raise TypeError(f"expected an N x {width} array of integers, not {descs.dtype} {descs.shape}")
        if descs.dtype.kind == "i" and descs.size and int(descs.min()) < 0:
            raise ValueError("a descriptor can't have negative numbers")
        return np.array(descs, dtype=np.uint64)
    flat = [operator.index(number) for row in descs for number in row]
    if len(flat) != width * len(descs):
        raise TypeError(f"expected tuples of {width} integers")
    try:
        return np.array(flat, dtype=np.uint64).reshape(len(descs), width)
    except OverflowError:
        raise ValueError("a descriptor's numbers must fit 64 bits without a sign") from None


class _List:
    """A typed list of `(address, length, device)`."""

    _width = 3

    def __init__(self, type: nixl_mem_t, descs: Any = 0) -> None:  # noqa: A002 - NIXL's name
        self._type = mem_type(type)
        if isinstance(descs, int):
            descs = [(0,) * self._width] * descs if descs else []
        self._set(descs)

    def _set(self, descs: Any) -> None:
        self.rows = rows_of(descs, 3)

    def getType(self) -> nixl_mem_t:  # noqa: N802
        return self._type

    def descCount(self) -> int:  # noqa: N802
        return len(self.rows)

    def isEmpty(self) -> bool:  # noqa: N802
        return len(self.rows) == 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: int) -> tuple[Any, ...]:
        return tuple(self.rows[at].tolist())

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return (self[at] for at in range(len(self)))

    def _edit(self, change: Any) -> None:
        descs = list(self)
        change(descs)
        self._set(descs)

    def __setitem__(self, at: int, desc: tuple[Any, ...]) -> None:
        self._edit(lambda descs: operator.setitem(descs, at, desc))

    def addDesc(self, desc: tuple[Any, ...]) -> None:  # noqa: N802
        self._edit(lambda descs: descs.append(desc))

    append = addDesc

    def remDesc(self, at: int) -> None:  # noqa: N802
        self._edit(lambda descs: descs.pop(at))

    def clear(self) -> None:
        self._set([])

    def index(self, desc: tuple[Any, ...]) -> int:
        """The position of a descriptor; nixlNotFoundError if the list does not have it."""
        try:
            return list(self).index(tuple(desc))
        except ValueError:
            raise nixlNotFoundError(f"the list has no descriptor {desc}") from None

    def print(self) -> None:
        print(self)

    def __eq__(self, other: object) -> bool:
        return (
            type(self) is type(other)
            and isinstance(other, _List)
            and (self._type == other._type and list(self) == list(other))
        )

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._type, list(self))

    def __repr__(self) -> str:
        shown = ", ".join(map(str, list(self)[:4])) + (", …" if len(self) > 4 else "")
        return f"<{type(self).__name__} {self._type.name} [{shown}]>"


class nixlXferDList(_List):  # noqa: N801
    """Descriptors of a transfer: `(address, length, device)`."""


class nixlRegDList(_List):  # noqa: N801
    """Descriptors of a registration: `(address, length, device, meta)`. Arrays have no `meta`."""

    _width = 4

    def __init__(self, type: nixl_mem_t, descs: Any = 0) -> None:  # noqa: A002
        if isinstance(descs, int) and descs:
            descs = [(0, 0, 0, "")] * descs
        super().__init__(type, descs)

    def _set(self, descs: Any) -> None:
        if isinstance(descs, np.ndarray):
            self.metas: list[str] = [""] * len(descs)
            super()._set(descs)
            return
        descs = list(descs)
        if any(len(desc) != 4 for desc in descs):
            raise TypeError("expected tuples (address, length, device, meta)")
        super()._set([desc[:3] for desc in descs])
        self.metas = [_meta(desc[3]) for desc in descs]

    def __getitem__(self, at: int) -> tuple[Any, ...]:
        return (*super().__getitem__(at), self.metas[at])

    def trim(self) -> nixlXferDList:
        """The same descriptors without `meta`."""
        return nixlXferDList(self._type, self.rows)


class nixlRemoteDList:  # noqa: N801
    """Descriptors `(address, length, device, agent)`, which only NIXL's memory views take."""

    def __init__(self, type: nixl_mem_t, descs: Sequence[tuple[int, int, int, str]] = ()) -> None:  # noqa: A002
        self._type = mem_type(type)
        self._descs = list(descs)

    def descCount(self) -> int:  # noqa: N802
        return len(self._descs)


def _meta(value: str | bytes) -> str:
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, str):
        return value
    raise TypeError(f"expected str or bytes as meta, not {type(value).__name__}")


@dataclass(frozen=True)
class nixlXferTelemetry:  # noqa: N801
    """Times of a transfer in microseconds. `startTime` is since 1970; `xferDuration` ends when its end is seen."""

    startTime: int  # noqa: N815
    postDuration: int  # noqa: N815
    xferDuration: int  # noqa: N815
    totalBytes: int  # noqa: N815
    descCount: int  # noqa: N815


__all__ = [
    "BLK_SEG",
    "DEFAULT_COMM_PORT",
    "DRAM_SEG",
    "FILE_SEG",
    "HAVE_UCX_GPU_DEVICE_API",
    "NIXL_ERR_BACKEND",
    "NIXL_ERR_INVALID_PARAM",
    "NIXL_ERR_MISMATCH",
    "NIXL_ERR_NOT_ALLOWED",
    "NIXL_ERR_NOT_FOUND",
    "NIXL_ERR_NOT_POSTED",
    "NIXL_ERR_NOT_SUPPORTED",
    "NIXL_ERR_REPOST_ACTIVE",
    "NIXL_ERR_UNKNOWN",
    "NIXL_INIT_AGENT",
    "NIXL_IN_PROG",
    "NIXL_READ",
    "NIXL_SUCCESS",
    "NIXL_THREAD_SYNC_DEFAULT",
    "NIXL_THREAD_SYNC_NONE",
    "NIXL_THREAD_SYNC_RW",
    "NIXL_THREAD_SYNC_STRICT",
    "NIXL_WRITE",
    "OBJ_SEG",
    "VRAM_SEG",
    "nixlBackendError",
    "nixlCancelledError",
    "nixlInvalidParamError",
    "nixlMismatchError",
    "nixlNoTelemetryError",
    "nixlNotAllowedError",
    "nixlNotFoundError",
    "nixlNotPostedError",
    "nixlNotSupportedError",
    "nixlRegDList",
    "nixlRemoteDList",
    "nixlRemoteDisconnectError",
    "nixlRepostActiveError",
    "nixlUnknownError",
    "nixlXferDList",
    "nixlXferTelemetry",
    "nixl_mem_t",
    "nixl_status_t",
    "nixl_thread_sync_t",
    "nixl_xfer_op_t",
]
