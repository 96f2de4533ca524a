"""The order of a request's blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


class Keys:
    """The keys of a request's blocks, per group of layers in the order of the prompt.

    vLLM gives a manager one key after another, and keeps the token at the end of each in the request's context. Some
    end within a block: those of the tail of a prompt, which vLLM adds in any order.

    `tokens`: of a block, per group. Blocks of other groups have no order.
    """

    def __init__(self, tokens: Mapping[int, int]) -> None:
        self._tokens = tokens
        # By the number of the block in the prompt; no key where vLLM has not said it.
        self._groups: dict[int, list[bytes]] = {}
        # The number of the block that each key is of, or ends in.
        self._places: dict[bytes, int] = {}
        self._tails: set[bytes] = set()

    def update(self, req_context: Any) -> None:
        """Takes the keys that vLLM has added since the last call. Costs nothing for those from before."""
        positions: dict[bytes, int] = req_context._offload_key_positions
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
        by_end = {number.to_bytes(4, "big"): (number, tokens) for number, tokens in self._tokens.items()}
        for key in new:
            number, tokens = by_end.get(key[-4:], (0, 0))
            self._places[key] = place = (positions[key] - 1) // tokens if tokens else -1
            if not tokens or positions[key] % tokens:
                self._tails.add(key)
                continue
            keys = self._groups.setdefault(number, [])
            if place >= len(keys):
                keys += [b""] * (place - len(keys) + 1)
            keys[place] = key

    def of(self, group: int, key: bytes, *, before: int | None = None) -> list[bytes]:
        """A key and all behind it or, with `before`, so many at most in front of it and the key."""
        at = self._places.get(key)
        if at is None or key in self._tails:
            return [key]
        keys = self._groups[group]
        if before is None:
            found = keys[at:]
            return found[: found.index(b"")] if b"" in found else found
        return [it for it in keys[max(0, at - before) : at + 1] if it]

    def place(self, key: bytes) -> int:
        """-1 if the key is not known."""
        return self._places.get(key, -1)

    def parent(self, group: int, key: bytes) -> bytes | None:
        """The key of the block before."""
        at = self._places.get(key, 0)
        keys = self._groups.get(group, [])
        return keys[at - 1] or None if 0 < at <= len(keys) else None
