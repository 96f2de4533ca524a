"""Memory that the scheduler half reads blocks into, and from which every rank copies its own to its cache.

TensorRT-LLM asks once how much of a prompt can be loaded, and has no way to hear that a load has failed. So the
scheduler half reads, and the store checks, what all ranks need before the answer. Ranks are processes of one host.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path

from kvferry._engine.log import logger_of
from kvferry._engine.memory import ALIGN
from kvferry.trtllm._pages import Memory

logger = logger_of("trtllm")

_FOLDER = Path("/dev/shm")


class Bell:
    """A pipe that wakes rank 0's thread: any rank rings. It has a path where ranks are processes."""

    def __init__(self, reader: int, writer: int) -> None:
        self._reader, self._writer = reader, writer
        os.set_blocking(writer, False)
        weakref.finalize(self, _close, {reader, writer})

    @staticmethod
    def of_process() -> Bell:
        return Bell(*os.pipe())

    @staticmethod
    def make(arena: Path) -> Bell:
        """Raises OSError."""
        os.mkfifo(_bell_of(arena), 0o600)
        return Bell.open(arena)

    @staticmethod
    def open(arena: Path) -> Bell:
        """Raises OSError."""
        # A reader that is a writer, too, waits where no other rank has the pipe open.
        reader, writer = (os.open(_bell_of(arena), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW) for _ in range(2))
        return Bell(reader, writer)

    def ring(self) -> None:
        # A full pipe wakes already.
        with suppress(BlockingIOError):
            os.write(self._writer, b".")

    def wait(self) -> None:
        """Until it rings. What has rung before counts once."""
        os.read(self._reader, ALIGN)


def _bell_of(arena: Path) -> Path:
    return arena.with_name(arena.name + "-bell")


def _unlink(arena: Path) -> None:
    for path in (arena, _bell_of(arena)):
        with suppress(OSError):
            path.unlink()


def _close(descriptors: set[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class Arena(Memory):
    """Shared memory. Its head has four counters for each rank: synchronous and asynchronous loads that it has copied to
    its cache; copies of its cache, to be handed over, that it has made, and the last that it has not.
    """

    def __init__(self, mapped: mmap.mmap, ranks: int, bell: Bell, path: Path | None = None) -> None:
        super().__init__(mapped, ctypes.addressof(ctypes.c_char.from_buffer(mapped)))
        self.nbytes = len(mapped)
        self.head = head_bytes(ranks)
        self.path = path
        self.bell = bell
        self._counters = (ctypes.c_uint64 * (4 * ranks)).from_buffer(mapped)
        self._ranks = ranks

    @staticmethod
    def make(nbytes: int, ranks: int) -> Arena | None:
        """None, with a warning, if there is no memory for it."""
        nbytes = head_bytes(ranks) + -(-nbytes // ALIGN) * ALIGN
        try:
            if ranks == 1:
                return Arena(mmap.mmap(-1, nbytes), ranks, Bell.of_process())
            folder = _FOLDER if _FOLDER.is_dir() else Path(tempfile.gettempdir())
            path = folder / f"kvferry-trtllm-{os.getuid()}-{secrets.token_hex(8)}"
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                # A write to memory that the file system does not have would end the process.
                os.posix_fallocate(descriptor, 0, nbytes)
                return Arena(mmap.mmap(descriptor, nbytes), ranks, Bell.make(path), path)
            except BaseException:
                _unlink(path)
                raise
            finally:
                os.close(descriptor)
        except (OSError, OverflowError) as error:
            logger.warning(
                "kvferry.trtllm: no %d bytes of staging memory, so nothing is loaded: %s; lower staging_gib",
                nbytes,
                error,
            )
            return None

    @staticmethod
    def open(path: str, ranks: int) -> Arena:
        """Raises OSError."""
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            return Arena(mmap.mmap(descriptor, os.fstat(descriptor).st_size), ranks, Bell.open(Path(path)))
        finally:
            os.close(descriptor)

    def unlink(self) -> None:
        """Once every rank has it open: then it goes with the last process."""
        if self.path is not None:
            _unlink(self.path)
            self.path = None

    def copied(self, rank: int, number: int, *, is_async: bool) -> None:
        self._counters[4 * rank + is_async] = number

    def copied_by_all(self, *, is_async: bool) -> int:
        """The number of the last load that all ranks have copied."""
        return min(int(self._counters[4 * rank + is_async]) for rank in range(self._ranks))

    def handed(self, rank: int, number: int, *, is_made: bool) -> None:
        """Copy `number` is made, or can't be. Those between the last one and this were not made."""
        last = int(self._counters[4 * rank + 2])
        lost = number if not is_made else number - 1
        if lost > last:
            self._counters[4 * rank + 3] = lost
        self._counters[4 * rank + 2] = number
        self.bell.ring()

    def lost_by_any(self) -> int:
        """The number of the last copy that a rank has not made. Those before it count as lost, too."""
        return max(int(self._counters[4 * rank + 3]) for rank in range(self._ranks))

    def handed_by_all(self) -> int:
        """The number of the last copy that all ranks have made."""
        return min(int(self._counters[4 * rank + 2]) for rank in range(self._ranks))


def head_bytes(ranks: int) -> int:
    return -(-32 * ranks // ALIGN) * ALIGN
