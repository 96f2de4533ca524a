"""What the scheduler half tells the worker halves in a step. TensorRT-LLM broadcasts it as a pickle."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """Blocks of a group of layers that lie one after another in the staging memory, and the pages they are for.

    `offsets`: where each rank's first block is. -1 is no page.
    """

    group: int
    offsets: tuple[int, ...]
    pages: tuple[int, ...]


@dataclass(frozen=True)
class Load:
    # Counts up, for synchronous and asynchronous loads on their own.
    number: int
    request: int
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Save:
    """Blocks that this step's forward pass completes. `hashes` begin with the block before, if there is one."""

    request: int
    group: int
    hashes: tuple[bytes, ...]
    pages: tuple[int, ...]
    priority: int


@dataclass(frozen=True)
class Copies:
    """Blocks that this step's forward pass completes, and that are handed over: copied to the staging memory."""

    # Counts up.
    number: int
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Step:
    number: int
    loads: tuple[Load, ...] = ()
    async_loads: tuple[Load, ...] = ()
    saves: tuple[Save, ...] = ()
    copies: Copies | None = None
