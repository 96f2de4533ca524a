"""The most bytes that a directory's files have had, sampled while something runs."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Self

from kvferry_vllm_bench.rows import Row

_INTERVAL_S = 0.02


class Sampled:
    """Samples inside a `with` block."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.most_bytes = 0
        self.samples = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._ended.set()
        self._thread.join()

    def row(self, part: str, bound: int) -> Row:
        share = 100 * self.most_bytes / bound
        what = f"most on disk, of {self.samples} samples and {bound / (1 << 20):.1f} MiB"
        return Row(part, what, "%", "≤ 100", share, (share, share), 0 < self.most_bytes <= bound)

    def _run(self) -> None:
        while not self._ended.wait(_INTERVAL_S):
            self.most_bytes = max(self.most_bytes, _bytes(self._directory))
            self.samples += 1


def _bytes(directory: Path) -> int:
    """Of all files: their lengths, or what the file system has given them, whichever is more."""
    length = given = 0
    for path in directory.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            found = path.lstat()
            if path.is_file():
                length, given = length + found.st_size, given + 512 * found.st_blocks
    return max(length, given)
