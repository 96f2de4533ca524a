"""Prompts as token ids: seeded, so that every run uses the same, and all different in their first
block.
"""

from __future__ import annotations

import random
import string

from kvferry_e2e.client import Tokens

VOCABULARY = 320  # as in make_model.py
BLOCK_TOKENS = 128
# K and V of one block of the tiny model: 4 layers, 2 heads, 128 tokens, 64 + 64 values of 4 bytes.
BLOCK_BYTES = 4 * 131_072

LENGTHS = (
    *(1, 2, 5, 17, 64, 100, 127, 128, 129, 191, 255, 256, 257, 300, 383, 384, 385, 450),
    *(512, 513, 600, 640, 777, 896, 1000, 1024, 1100, 1279, 1280, 1411, 1500),
)


class Prompts:
    """New prompts: a prefix cache could answer an old one."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def fresh(self, length: int) -> Tokens:
        return [self._random.randrange(2, VOCABULARY) for _ in range(length)]

    def text(self, characters: int) -> str:
        """About one token for each character, for routers that take texts only."""
        return "".join(self._random.choices(string.ascii_letters + " ", k=characters))

    def of_all_lengths(self) -> list[Tokens]:
        return [self.fresh(length) for length in LENGTHS]


def blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)
