"""Python objects as memory, and memory as Python objects."""

from __future__ import annotations

import ctypes
from typing import Any


def span(buffer: Any) -> tuple[int, int, object]:
    """The address and length in bytes of an object's memory, and an object that keeps it there."""
    if hasattr(buffer, "data_ptr") and hasattr(buffer, "element_size"):
        return _tensor(buffer)
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
    return ctypes.addressof(held), view.nbytes, held


def _tensor(tensor: Any) -> tuple[int, int, object]:
    device = str(getattr(tensor, "device", "cpu"))
    if device != "cpu":
        raise TypeError(f"expected a tensor in host memory, not on {device}")
    if not tensor.is_contiguous():
        raise ValueError("expected a contiguous tensor")
    nbytes = int(tensor.numel()) * int(tensor.element_size())
    if nbytes == 0:
        raise ValueError("expected a tensor that is not empty")
    return int(tensor.data_ptr()), nbytes, tensor


def view(addr: int, nbytes: int, owner: object) -> memoryview:
    """A writable view of memory that `owner` keeps alive, and that keeps `owner` alive."""
    # Only a subclass of the array type has room for the reference to the owner.
    cls: Any = type("Memory", (ctypes.c_char * nbytes,), {})
    array = cls.from_address(addr)
    array.owner = owner
    return memoryview(array).cast("B")
