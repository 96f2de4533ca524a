"""Memory to move, and what it must hold afterwards."""

from __future__ import annotations

import ctypes
import mmap
import os
import random

PIECE = 4096
# A prime a little below the base's length, so that each of the first million pieces is another window of the base.
WINDOWS = 1_048_573
COMPARED = 1 << 20

# Offset at the source, offset at the destination, length.
Pair = tuple[int, int, int]


def image(seed: int, nbytes: int) -> bytearray:
    """Bytes that only the seed tells, each piece different from the others."""
    base = random.Random(seed).randbytes(WINDOWS + PIECE)
    made = bytearray(nbytes)
    for piece, start in enumerate(range(0, nbytes, PIECE)):
        window = piece * 4099 % WINDOWS
        made[start : start + PIECE] = base[window : window + min(PIECE, nbytes - start)]
    return made


class Memory:
    """Private anonymous pages, as an engine's pool has, all of them there."""

    def __init__(self, nbytes: int, *, huge: bool = False) -> None:
        self.nbytes = nbytes
        self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if huge:
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._poison = 0
        self.poison(nbytes)

    def fill(self, seed: int, nbytes: int) -> None:
        """The source."""
        self._map[:nbytes] = bytes(image(seed, nbytes))

    def poison(self, nbytes: int) -> None:
        """The destination: bytes that the other process cannot know."""
        self._poison = int.from_bytes(os.urandom(8), "little")
        self.fill(self._poison, nbytes)

    def check(self, seed: int, nbytes: int, pairs: list[Pair]) -> str | None:
        """What is wrong of a destination that was poisoned and then moved to, if anything; what no pair names must
        still be poison.
        """
        source, expected = image(seed, nbytes), image(self._poison, nbytes)
        for source_at, destination_at, length in pairs:
            expected[destination_at : destination_at + length] = source[source_at : source_at + length]
        for start in range(0, nbytes, COMPARED):
            held, right = self._map[start : start + COMPARED], expected[start : start + COMPARED]
            if held[: len(right)] != right:
                differs = next(at for at, (a, b) in enumerate(zip(held, right, strict=False)) if a != b)
                return f"byte {start + differs} of the destination differs"
        return None
