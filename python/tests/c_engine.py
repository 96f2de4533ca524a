"""Mooncake's C API of the installed wheel, called by ctypes."""

from __future__ import annotations

import ctypes as c
import time
from functools import cache

from kvferry.__main__ import libdir

READ, WRITE = 0, 1
WAITING, PENDING, COMPLETED, FAILED = 0, 1, 4, 6
INVALID_BATCH = 2**64 - 1


class Request(c.Structure):
    _fields_ = [
        ("opcode", c.c_int),
        ("source", c.c_void_p),
        ("target_id", c.c_int32),
        ("target_offset", c.c_uint64),
        ("length", c.c_uint64),
    ]


class Status(c.Structure):
    _fields_ = [("status", c.c_int), ("transferred_bytes", c.c_uint64)]


class Notify(c.Structure):
    _fields_ = [("name", c.c_char_p), ("msg", c.c_char_p)]


@cache
def library() -> c.CDLL | None:
    """libtransfer_engine.so, through which those of libkvferry.so.0 are found, too; None without it."""
    folder = libdir()
    if folder is None:
        return None
    lib = c.CDLL(str(folder / "libtransfer_engine.so"))
    pointer, text, u64 = c.c_void_p, c.c_char_p, c.c_uint64
    kinds = {
        "createTransferEngine": (pointer, [text, text, text, u64, c.c_int]),
        "destroyTransferEngine": (None, [pointer]),
        "getLocalIpAndPort": (c.c_int, [pointer, text, c.c_size_t]),
        "openSegment": (c.c_int32, [pointer, text]),
        "registerLocalMemory": (c.c_int, [pointer, pointer, c.c_size_t, text, c.c_int]),
        "unregisterLocalMemory": (c.c_int, [pointer, pointer]),
        "allocateBatchID": (u64, [pointer, c.c_size_t]),
        "freeBatchID": (c.c_int, [pointer, u64]),
        "submitTransfer": (c.c_int, [pointer, u64, pointer, c.c_size_t]),
        "submitTransferWithNotify": (c.c_int, [pointer, u64, pointer, c.c_size_t, Notify]),
        "getTransferStatus": (c.c_int, [pointer, u64, c.c_size_t, c.POINTER(Status)]),
        "genNotifyInEngine": (c.c_int, [pointer, u64, Notify]),
        "getNotifsFromEngine": (c.POINTER(Notify), [pointer, c.POINTER(c.c_int)]),
        "freeNotifsMsgBuf": (c.c_int, [c.POINTER(Notify), c.c_int]),
        "kvferry_last_error": (text, []),
    }
    for name, (result, arguments) in kinds.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


class Engine:
    """An engine of the C API, used as TensorRT-LLM uses it."""

    def __init__(self) -> None:
        found = library()
        assert found is not None
        self.lib = found
        self.handle = self.lib.createTransferEngine(b"P2PHANDSHAKE", b"127.0.0.1", b"", 0, 1)
        assert self.handle, self.lib.kvferry_last_error()

    @property
    def session(self) -> str:
        address = c.create_string_buffer(64)
        assert self.lib.getLocalIpAndPort(self.handle, address, 64) == 0
        return address.value.decode()

    def register(self, address: int, nbytes: int) -> None:
        assert self.lib.registerLocalMemory(self.handle, address, nbytes, b"*", 1) == 0

    def segment(self, session: str) -> int:
        number: int = self.lib.openSegment(self.handle, session.encode())
        assert number >= 0, self.lib.kvferry_last_error()
        return number

    def submit(self, tasks: list[tuple[int, int, int, int, int]], notify: tuple[bytes, bytes] | None = None) -> int:
        """Starts tasks (opcode, source, segment, address there, length) in a batch of 1 024."""
        batch: int = self.lib.allocateBatchID(self.handle, 1024)
        assert batch != INVALID_BATCH
        requests = (Request * len(tasks))(*tasks)
        if notify is None:
            code = self.lib.submitTransfer(self.handle, batch, requests, len(tasks))
        else:
            code = self.lib.submitTransferWithNotify(self.handle, batch, requests, len(tasks), Notify(*notify))
        assert code == 0, self.lib.kvferry_last_error()
        return batch

    def statuses(self, batch: int, count: int) -> list[int]:
        """The status of each task, once."""
        status, found = Status(), []
        for task in range(count):
            assert self.lib.getTransferStatus(self.handle, batch, task, c.byref(status)) == 0
            assert status.status in (WAITING, PENDING, COMPLETED, FAILED)
            found.append(status.status)
        return found

    def wait(self, batch: int, count: int, patience: float = 90.0) -> list[int]:
        """Polls all tasks every millisecond until they have ended."""
        until = time.monotonic() + patience
        while True:
            found = self.statuses(batch, count)
            if all(status in (COMPLETED, FAILED) for status in found):
                return found
            assert time.monotonic() < until, "the tasks did not end"
            time.sleep(0.001)

    def notify(self, segment: int, name: bytes, message: bytes) -> int:
        code: int = self.lib.genNotifyInEngine(self.handle, segment, Notify(name, message))
        return code

    def notifications(self) -> list[tuple[bytes, bytes]]:
        size = c.c_int(-1)
        messages = self.lib.getNotifsFromEngine(self.handle, c.byref(size))
        assert size.value >= 0
        found = [(messages[i].name, messages[i].msg) for i in range(size.value)]
        assert self.lib.freeNotifsMsgBuf(messages, size.value) == 0
        return found

    def destroy(self) -> None:
        self.lib.destroyTransferEngine(self.handle)
