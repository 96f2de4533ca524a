"""Python objects as memory, and memory as Python objects."""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Sequence
from typing import Any


def span(buffer: Any) -> tuple[int, int, object, int | None]:
    """
    The address and length in bytes of an object's memory, and an object that keeps it there. The last item is None for
    memory of the host; for memory of a GPU its number in this process, or -1 if the object does not say it.
    """
    if hasattr(buffer, "data_ptr") and hasattr(buffer, "element_size"):
        return _tensor(buffer)
    interface = getattr(buffer, "__cuda_array_interface__", None)
    if interface is not None:
        return _cuda_array(buffer, interface)
    if _dlpack_device(buffer) == _DLPACK_CUDA:
        return _dlpack(buffer)
    try:
        view = memoryview(buffer)
    except TypeError:
        kind = type(buffer).__name__
        raise TypeError(f"expected an object with a buffer, or a pair (address, nbytes), not {kind}") from None
    if view.readonly:
        raise TypeError("expected writable memory, not a read-only buffer")
    if not view.c_contiguous:
        raise ValueError("expected a contiguous buffer in C order")
    if view.nbytes == 0:
        raise ValueError("expected a buffer that is not empty")
    # The array holds an export of the buffer, which can neither be freed nor resized meanwhile.
    held = (ctypes.c_char * view.nbytes).from_buffer(view)
    return ctypes.addressof(held), view.nbytes, held, None


def _tensor(tensor: Any) -> tuple[int, int, object, int | None]:
    device = str(getattr(tensor, "device", "cpu"))
    kind, _, number = device.partition(":")
    if kind not in ("cpu", "cuda"):
        raise TypeError(f"expected a tensor in host memory or on CUDA, not on {device}")
    gpu = None if kind == "cpu" else int(number or -1)
    if not tensor.is_contiguous():
        raise ValueError("expected a contiguous tensor")
    nbytes = int(tensor.numel()) * int(tensor.element_size())
    if nbytes == 0:
        raise ValueError("expected a tensor that is not empty")
    return int(tensor.data_ptr()), nbytes, tensor, gpu


def _cuda_array(buffer: object, interface: Any) -> tuple[int, int, object, int | None]:
    """Memory by the CUDA array interface, version 2 or 3."""
    shape, (address, readonly) = tuple(interface["shape"]), interface["data"]
    item = int(interface["typestr"][2:])
    if readonly:
        raise TypeError("expected writable memory, not a read-only array; pass torch.from_dlpack(array)")
    if interface.get("mask") is not None:
        raise TypeError("expected an array without a mask")
    _check_contiguous(shape, interface.get("strides"), item)
    return int(address), math.prod(shape) * item, buffer, -1


def _check_contiguous(shape: tuple[int, ...], strides: Sequence[int] | None, item: int) -> None:
    if any(length < 1 for length in shape):
        raise ValueError("expected an array that is not empty")
    if strides is None:
        return
    if len(strides) != len(shape):
        raise ValueError("expected an array with a stride for each of its dimensions")
    step = item
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length > 1 and stride != step:
            raise ValueError("expected a contiguous array in C order")
        step *= length


# DLPack: the kind of a CUDA device, and a DLTensor: data, kind and number of the device, dimensions, type (code, bits,
# lanes), shape, strides, offset of the first byte.
_DLPACK_CUDA = 2
_DLTENSOR = struct.Struct("=QiiiBBHQQQ")


def _dlpack_device(buffer: Any) -> int | None:
    asked = getattr(buffer, "__dlpack_device__", None)
    return None if asked is None else int(asked()[0])


def _dlpack(buffer: Any) -> tuple[int, int, object, int | None]:
    """Memory of an object that exports it by DLPack. The order with its stream is the transfers' matter."""
    capsule = buffer.__dlpack__(stream=-1)
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    found = _DLTENSOR.unpack(ctypes.string_at(pointer(capsule, b"dltensor"), _DLTENSOR.size))
    data, _, device, dimensions, _, bits, lanes, shape_at, strides_at, offset = found
    integers = ctypes.c_int64 * dimensions
    shape, item = tuple(integers.from_address(shape_at)), bits * lanes // 8
    strides = [step * item for step in integers.from_address(strides_at)] if strides_at else None
    _check_contiguous(shape, strides, item)
    # The capsule frees what it has when it is dropped.
    return int(data) + int(offset), math.prod(shape) * item, (buffer, capsule), device


def view(addr: int, nbytes: int, owner: object) -> memoryview:
    """A writable view of memory that `owner` keeps alive, and that keeps `owner` alive."""
    # Only a subclass of the array type has room for the reference to the owner.
    cls: Any = type("Memory", (ctypes.c_char * nbytes,), {})
    array = cls.from_address(addr)
    array.owner = owner
    return memoryview(array).cast("B")
