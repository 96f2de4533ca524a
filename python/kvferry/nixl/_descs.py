"""Descriptor lists from what callers have: tuples, arrays, tensors."""

from __future__ import annotations

import sys
from typing import Any, Final

import numpy as np

from kvferry._engine.log import logger_of
from kvferry.nixl._bindings import nixl_mem_t, nixlRegDList, nixlRemoteDList, nixlXferDList, rows_of
from kvferry.nixl._errors import nixlInvalidParamError
from kvferry.nixl._memory import Array

_log = logger_of("nixl")

MEMS: Final = {
    "DRAM": nixl_mem_t.DRAM_SEG,
    "VRAM": nixl_mem_t.VRAM_SEG,
    "FILE": nixl_mem_t.FILE_SEG,
    "BLOCK": nixl_mem_t.BLK_SEG,
    "OBJ": nixl_mem_t.OBJ_SEG,
    "cpu": nixl_mem_t.DRAM_SEG,
    "cuda": nixl_mem_t.VRAM_SEG,
}
# After all strides are written out.
STRIDED_MAX: Final = 1 << 28


def _is_tensor(value: object) -> bool:
    # A tensor exists only if its module was imported, which takes a second.
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _tensors(tensors: list[Any]) -> tuple[nixl_mem_t, Array] | None:
    """The kind and the ranges of tensors on one device; None for others, or if one is not contiguous."""
    device = tensors[0].device
    for tensor in tensors:
        if not _is_tensor(tensor) or tensor.device != device:
            _log.error("expected tensors on one device")
            return None
        if not tensor.is_contiguous():
            _log.error("expected contiguous tensors")
            return None
    number = max(tensors[0].get_device(), 0)
    rows = [(tensor.data_ptr(), tensor.numel() * tensor.element_size(), number) for tensor in tensors]
    kind = nixl_mem_t.DRAM_SEG if tensors[0].get_device() == -1 else nixl_mem_t.VRAM_SEG
    return kind, np.array(rows, dtype=np.uint64).reshape(len(rows), 3)


def _of(descs: Any, mem_type: str | None, kind: Any, width: int) -> Any:
    """A list of the class `kind`, or None, as NIXL answers what it can't use. An unknown memory type is a KeyError."""
    if _is_tensor(descs):
        descs = [descs]
    if isinstance(descs, np.ndarray):
        is_rows, tuples = descs.ndim == 2 and descs.shape[1] == 3, False
    else:
        try:
            first: Any = descs[0] if len(descs) else ()
        except TypeError:
            first = None
        if _is_tensor(first):
            found = _tensors(list(descs))
            return found and kind(*found)
        tuples = isinstance(first, tuple)
        is_rows = isinstance(first, tuple) and (len(descs) == 0 or len(first) == width)
    if mem_type is None and (tuples or isinstance(descs, np.ndarray)):
        _log.error("a list of tuples or an array needs a memory type")
        return None
    if not is_rows or mem_type is None:
        _log.error("expected %d-tuples, an N x 3 array, or tensors", width)
        return None
    return kind(MEMS[mem_type], descs)


def xfer_descs(descs: Any, mem_type: str | None) -> nixlXferDList | None:
    if isinstance(descs, nixlXferDList):
        return descs
    if isinstance(descs, nixlRegDList):
        _log.error("expected a list for transfers, not one for registration")
        return None
    found: nixlXferDList | None = _of(descs, mem_type, nixlXferDList, 3)
    return found


def reg_descs(descs: Any, mem_type: str | None) -> nixlRegDList | None:
    if isinstance(descs, nixlRegDList):
        return descs
    if isinstance(descs, nixlXferDList):
        _log.error("expected a list for registration, not one for transfers")
        return None
    found: nixlRegDList | None = _of(descs, mem_type, nixlRegDList, 4)
    return found


def remote_descs(descs: Any, mem_type: str | None) -> nixlRemoteDList | None:
    if isinstance(descs, nixlRemoteDList):
        return descs
    usable = isinstance(descs, list) and all(isinstance(desc, tuple) and len(desc) == 4 for desc in descs)
    if not usable or mem_type is None:
        _log.error("expected a memory type and tuples (address, length, device, agent)")
        return None
    return nixlRemoteDList(MEMS[mem_type], descs)


def is_strided(descs: Any) -> bool:
    return isinstance(descs, np.ndarray) and descs.ndim == 2 and descs.shape[1] == 5


def written_out(descs: Array) -> Array:
    """The descriptors that rows `(address, length, device, stride, count)` stand for."""
    addrs, lengths, devices, strides, counts = rows_of(descs, 5).T
    total = int(counts.sum()) if len(counts) < STRIDED_MAX else STRIDED_MAX
    if total >= STRIDED_MAX or (len(counts) and int(counts.max()) >= STRIDED_MAX):
        raise nixlInvalidParamError(f"strided descriptors stand for {STRIDED_MAX} ranges or more")
    repeat = counts.astype(np.int64)
    # The number of each range within its row.
    within = np.arange(total, dtype=np.uint64) - np.repeat((np.cumsum(counts) - counts), repeat)
    starts = np.repeat(addrs, repeat) + within * np.repeat(strides, repeat)
    return np.column_stack((starts, np.repeat(lengths, repeat), np.repeat(devices, repeat)))
