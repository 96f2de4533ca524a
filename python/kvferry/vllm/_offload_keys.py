"""The order of a request's blocks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class Keys:
    """The keys of a request's blocks, per group of layers in the order of the prompt.

    vLLM gives a manager one key after another, and keeps the positions of all of them in the request's context.
    """

    def __init__(self) -> None:
        self._groups: dict[int, list[bytes]] = {}
        # The same lists, by the end of the keys.
        self._by_end: dict[bytes, list[bytes]] = {}
        # Of each key in its group.
        self._places: dict[bytes, int] = {}

    def update(self, req_context: Any) -> None:
        """Takes the keys that vLLM has added since the last call. Costs nothing for those from before."""
        positions: dict[bytes, int] = getattr(req_context, "_offload_key_positions", {})
        if len(positions) == len(self._places):
            return
        new: Iterable[bytes] = positions
        if self._places:
            added = []
            for key in reversed(positions):
                if key in self._places:
                    break
                added.append(key)
            new = reversed(added)
        for key in new:
            keys = self._by_end.get(key[-4:])
            if keys is None:
                keys = self._by_end[key[-4:]] = self._groups[int.from_bytes(key[-4:], "big")] = []
            self._places[key] = len(keys)
            keys.append(key)

    def of(self, group: int, key: bytes, *, before: int | None = None) -> list[bytes]:
        """A key and all behind it or, with `before`, so many at most in front of it and the key."""
        at = self._places.get(key)
        if at is None:
            return [key]
        keys = self._groups[group]
        return keys[at:] if before is None else keys[max(0, at - before) : at + 1]

    def place(self, key: bytes) -> int:
        """-1 if the key is not known."""
        return self._places.get(key, -1)

    def parent(self, group: int, key: bytes) -> bytes | None:
        """The key of the block before."""
        at = self._places.get(key, 0)
        return self._groups[group][at - 1] if at else None
