"""Prompts that share beginnings as those of a chat service do.

From a trace of requests with `hash_ids`, as the Mooncake project publishes them: conversations at random until there
are enough requests, each cut after `BLOCKS_MAX` blocks. A block of the trace (512 tokens) is one of `BLOCK_TOKENS`
here. The time between the requests of a conversation is stretched: of a sixtieth of the requests of an hour, few come
between two of one conversation, and a store that keeps only what came last would find nearly all.

Without a trace, conversations are made with what was counted in that one.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

from kvferry_e2e.client import Tokens
from kvferry_e2e.prompts import VOCABULARY

# The least that vLLM's CPU backend is made for.
BLOCK_TOKENS = 32
# Of a prompt: with the tokens behind them, and those generated, they fit into 2048.
BLOCKS_MAX = 59
# Behind the last whole block: vLLM computes the last token in any case.
TAIL_TOKENS = 5

# Of the Mooncake project's conversation trace, conversations being requests with two equal first blocks: how many have
# 1, 2, 3, ... requests; blocks of a first request, and blocks that a later one adds, as deciles; of the blocks before,
# a later one keeps 0.9 in the median. The first block is the same in all. Seconds are those of an hour's trace.
REQUESTS_OF = (5114, 1311, 464, 200, 117, 55, 27, 26)
FIRST_BLOCKS = (2, 2, 3, 4, 8, 11, 15, 22, 31, 50, 60)
MORE_BLOCKS = (1, 1, 1, 2, 2, 2, 2, 4, 10, 20, 40)
KEPT = (0.0, 0.34, 0.67, 0.8, 0.88, 0.91, 0.93, 0.95, 0.97, 0.98, 1.0)
LATER_S = (20, 42, 60, 75, 96, 123, 165, 228, 324, 486, 900)
HOUR_S = 3600.0

# Times the time between the requests of a conversation.
STRETCHED = 10

Chain = list[int]


def of_trace(path: Path, count: int, seed: int) -> list[Chain]:
    """Raises `ValueError` or `OSError` if the file is none or has too few requests."""
    conversations: dict[tuple[int, ...], list[tuple[float, Chain]]] = {}
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            request = json.loads(line)
            chain = request["hash_ids"]
            conversations.setdefault(tuple(chain[:2]), []).append((request["timestamp"], chain[:BLOCKS_MAX]))
    every = list(conversations.values())
    random.Random(seed).shuffle(every)
    chosen: list[tuple[float, Chain]] = []
    for some in every:
        if len(chosen) + len(some) <= count:
            begin = some[0][0]
            chosen += [(begin + STRETCHED * (at - begin), chain) for at, chain in some]
    if len(chosen) < count:
        raise ValueError(f"{path} has too few requests for {count} in whole conversations")
    return [chain for _, chain in sorted(chosen)]


def made(count: int, seed: int) -> list[Chain]:
    chance = random.Random(seed)
    fresh = iter(range(1, 1 << 31))
    asked: list[tuple[float, Chain]] = []
    while len(asked) < count:
        at = chance.uniform(0, HOUR_S)
        chain = [0] + [next(fresh) for _ in range(_drawn(chance, FIRST_BLOCKS) - 1)]
        asked.append((at, chain))
        for _ in range(chance.choices(range(len(REQUESTS_OF)), REQUESTS_OF)[0]):
            at += STRETCHED * _of(chance, LATER_S)
            kept = max(1, round(len(chain) * _of(chance, KEPT)))
            chain = chain[:kept] + [next(fresh) for _ in range(_drawn(chance, MORE_BLOCKS))]
            asked.append((at, chain))
    return [chain[:BLOCKS_MAX] for _, chain in sorted(asked[:count])]


def _of(chance: random.Random, deciles: Sequence[float]) -> float:
    at = chance.random() * (len(deciles) - 1)
    low = int(at)
    return deciles[low] + (deciles[low + 1] - deciles[low]) * (at - low)


def _drawn(chance: random.Random, deciles: Sequence[float]) -> int:
    return round(_of(chance, deciles))


def tokens(chain: Chain) -> Tokens:
    """A prompt: equal blocks have equal tokens, and each block has its own."""
    prompt: Tokens = []
    for block in chain:
        chance = random.Random(block)
        prompt += [chance.randrange(2, VOCABULARY) for _ in range(BLOCK_TOKENS)]
    return prompt + [2 + at for at in range(TAIL_TOKENS)]


def different(chains: Sequence[Chain]) -> int:
    return len(set().union(*chains))


def hits_without_bound(chains: Sequence[Chain]) -> int:
    seen: set[int] = set()
    hits = 0
    for chain in chains:
        hits += next((at for at, block in enumerate(chain) if block not in seen), len(chain))
        seen.update(chain)
    return hits
