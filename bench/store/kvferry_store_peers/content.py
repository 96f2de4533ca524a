"""The bytes of blocks: each page of each block has bytes of its own."""

from __future__ import annotations

from typing import Any

PAGE = 4096


class WrongBytesError(Exception):
    """A block came back with other bytes."""


class Content:
    def __init__(self, block_bytes: int) -> None:
        # Only the peers' environments have numpy.
        import numpy as np

        self._numpy = np
        base = np.random.default_rng(1).integers(0, 256, block_bytes, dtype=np.uint8)
        self._base = base.view(np.uint64).reshape(-1, PAGE // 8)
        self._pages = np.arange(block_bytes // PAGE, dtype=np.uint64)

    def fill(self, memory: Any, number: int) -> None:
        words = self._words(memory)
        words[:] = self._base
        words[:, 0], words[:, 1] = number, self._pages

    def check(self, memory: Any, number: int) -> None:
        words = self._words(memory)
        is_right = (
            bool((words[:, 0] == number).all())
            and self._numpy.array_equal(words[:, 1], self._pages)
            and self._numpy.array_equal(words[:, 2:], self._base[:, 2:])
        )
        if not is_right:
            raise WrongBytesError(f"block {number} came back with other bytes")

    def clear(self, memory: Any) -> None:
        """Makes each page wrong, so that a block that is not read is noticed."""
        self._words(memory)[:, 0] = 2**64 - 1

    def _words(self, memory: Any) -> Any:
        return self._numpy.frombuffer(memory, dtype=self._numpy.uint64).reshape(-1, PAGE // 8)
