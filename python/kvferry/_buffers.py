"""Python objects as memory, and memory as Python objects."""

from __future__ import annotations

import ctypes
from typing import Any


def span(buffer: Any) -> tuple[int, int, object]:
    """The address and length of an object's memory, and what to hold so that it stays there."""
    if hasattr(buffer, "data_ptr") and hasattr(buffer, "element_size"):
        return _tensor(buffer)
    try:
        view = memoryview(buffer)
    except TypeError:
        kind = type(buffer).__name__
        raise TypeError(f"a {kind} has no memory to register; a buffer or a pair (address, nbytes) has") from None
    if view.readonly:
        raise TypeError("read-only memory can't be registered")
    if not view.c_contiguous:
        raise ValueError("memory to be registered must lie in one piece, in C order")
    if view.nbytes == 0:
        raise ValueError("there is no memory in an empty buffer")
    # The array holds the export of the buffer: it can neither be freed nor resized while this lives.
    held = (ctypes.c_char * view.nbytes).from_buffer(view)
    return ctypes.addressof(held), view.nbytes, held


def _tensor(tensor: Any) -> tuple[int, int, object]:
    device = str(getattr(tensor, "device", "cpu"))
    if device != "cpu":
        raise TypeError(f"only tensors in host memory can be registered, not one on {device}")
    if not tensor.is_contiguous():
        raise ValueError("a tensor to be registered must be contiguous")
    nbytes = int(tensor.numel()) * int(tensor.element_size())
    if nbytes == 0:
        raise ValueError("there is no memory in an empty tensor")
    return int(tensor.data_ptr()), nbytes, tensor


def view(addr: int, nbytes: int, owner: object) -> memoryview:
    """A writable view of memory that `owner` keeps alive, and that keeps `owner` alive."""
    # Only a subclass of the array type has room for the reference.
    cls: Any = type("Memory", (ctypes.c_char * nbytes,), {})
    array = cls.from_address(addr)
    array.owner = owner
    return memoryview(array).cast("B")
