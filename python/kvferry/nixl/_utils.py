"""What NIXL's examples import of ``nixl._utils``: memory by its address."""

from __future__ import annotations

import ctypes
import threading

__all__ = ["ba_buf", "free_passthru", "malloc_passthru", "verify_transfer"]

_lock = threading.Lock()
_buffers: dict[int, ctypes.Array[ctypes.c_char]] = {}


def malloc_passthru(size: int) -> int:
    """Allocates memory and returns its address."""
    buffer = ctypes.create_string_buffer(max(size, 1))
    address = ctypes.addressof(buffer)
    with _lock:
        _buffers[address] = buffer
    return address


def free_passthru(address: int) -> None:
    """Frees such memory. ValueError if it was not allocated, or freed before."""
    with _lock:
        if _buffers.pop(address, None) is None:
            raise ValueError(f"nothing was allocated at {address:#x}")


def ba_buf(address: int, size: int) -> None:
    """Fills memory with a pattern."""
    ctypes.memmove(address, bytes(at & 0xFF for at in range(size)), size)


def verify_transfer(first: int, second: int, size: int) -> None:
    """Compares two ranges of memory. AssertionError if they differ."""
    if ctypes.string_at(first, size) != ctypes.string_at(second, size):
        raise AssertionError(f"the {size} bytes at {first:#x} and {second:#x} differ")
