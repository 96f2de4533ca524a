"""A small paged engine in NumPy on `kvferry.BlockManager`: paged_engine.py [--pages N] [--turns N] [--seed N]

Conversations with shared prefixes are served in turns, with fewer pages than they need: what does not fit is offloaded
to host memory, to a block store and to files, and brought back when a conversation goes on. Each token is compared with
what the model computes without a cache.
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import kvferry
import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
# Takes the keys and values that a layer has computed, and returns those of all tokens so far.
Cache = Callable[[int, Ints, Ints], tuple[Ints, Ints]]

BLOCK = 8  # tokens
PRIME = 65_521
VOCABULARY, WIDTH, LAYERS = 1000, 16, 2
# Where blocks are offloaded to: host memory, a block store, files.
MODES: tuple[Literal["dram", "gds", "posix_debug_fallback"], ...] = ("dram", "gds", "posix_debug_fallback")


class Model:
    """A transformer of integers modulo a prime: sums are the same in any order, so tokens are exact. A wrong byte of KV
    changes all tokens after it.
    """

    def __init__(self, seed: int) -> None:
        draw = np.random.default_rng(seed).integers
        self.embedding: Ints = draw(PRIME, size=(VOCABULARY, WIDTH))
        self.position: Ints = draw(PRIME, size=WIDTH)
        # Query, key, value, output.
        self.weights: Ints = draw(PRIME, size=(LAYERS, 4, WIDTH, WIDTH))

    def forward(self, tokens: list[int], first: int, cache: Cache) -> Ints:
        """The token that follows on each of these, of which the first one is the `first` of its sequence."""
        places = np.arange(first, first + len(tokens))
        x: Ints = (self.embedding[tokens] + np.outer(places, self.position)) % PRIME
        is_visible = np.arange(first + len(tokens)) <= places[:, None]
        for layer, (query, key, value, output) in enumerate(self.weights):
            keys, values = cache(layer, x @ key % PRIME, x @ value % PRIME)
            scores = np.where(is_visible, (x @ query % PRIME) @ keys.T % PRIME, 0)
            x = (x + (scores @ values % PRIME) @ output) % PRIME
        following: Ints = (x @ self.embedding.T % PRIME).argmax(axis=1)
        return following

    def without_cache(self, tokens: list[int]) -> Ints:
        return self.forward(tokens, 0, lambda _, keys, values: (keys, values))


def keys_of(tokens: list[int]) -> list[bytes]:
    """The chained hashes of full blocks. The name of the model is in all of them."""
    keys, key = [], b"a model of integers, version 1"
    for end in range(BLOCK, len(tokens) + 1, BLOCK):
        block = np.asarray(tokens[end - BLOCK : end], np.uint32).tobytes()
        key = hashlib.blake2b(key + block, digest_size=16).digest()
        keys.append(key)
    return keys


@dataclass
class Request:
    """`tokens` begin with the prompt; the engine adds others until there are `wanted`."""

    tokens: list[int]
    wanted: int
    retention: kvferry.RetentionConfig
    sequence: int = -1
    computed: int = 0
    # Tokens for which the block manager has given pages.
    room: int = 0


class Engine:
    """Runs a few requests at once. Each layer is a group of the block manager, with pages of its own."""

    def __init__(self, agent: kvferry.Agent, model: Model, pages: int, secondary_blocks: int, most: int = 4) -> None:
        self.model, self.most = model, most
        self.kv = [np.zeros((pages, 2, BLOCK, WIDTH), np.int64) for _ in range(LAYERS)]
        groups = [([agent.register(layer, "none")], pages, secondary_blocks) for layer in self.kv]
        self.manager = kvferry.BlockManager(groups, tokens_per_block=BLOCK)
        self.counts: Counter[str] = Counter()
        self.reused: Counter[str] = Counter()

    def serve(self, requests: list[Request]) -> None:
        waiting, running = deque(requests), list[Request]()
        while waiting or running:
            while waiting and len(running) < self.most and self.begin(waiting[0]):
                running.append(waiting.popleft())
            ready = [request for request in running if self.manager.is_ready(request.sequence)]
            if not ready and not self.manager.wait() and not running:
                raise SystemExit("the pages are too few for one request: give more with --pages")
            for request in ready:
                try:
                    has_ended = self.step(request)
                except kvferry.BusyError:
                    # It makes room for the others, and goes on from what is left of it in the cache.
                    self.counts["preempted"] += 1
                    waiting.appendleft(request)
                    has_ended = True
                if has_ended:
                    running.remove(request)
                    computed = request.tokens[: request.computed]
                    self.manager.free(request.sequence, keys_of(computed), tokens=computed)

    def begin(self, request: Request) -> bool:
        tokens, retention = request.tokens, request.retention
        try:
            allocation = self.manager.allocate(len(tokens), keys_of(tokens), tokens=tokens, retention=retention)
        except kvferry.BusyError:
            return False
        request.sequence, request.computed, request.room = allocation.sequence, 0, len(tokens)
        return True

    def step(self, request: Request) -> bool:
        """Computes what is not computed, and adds a token. True if it was the last one."""
        tokens, sequence = request.tokens, request.sequence
        # A copy that failed has taken pages away.
        request.room = min(request.room, len(self.manager.blocks(sequence)) * BLOCK)
        if request.room < len(tokens):
            self.manager.append(sequence, len(tokens) - request.room)
            request.room = len(tokens)
            if not self.manager.is_ready(sequence):
                return False
        if request.computed == 0:
            request.computed = self.manager.reused_tokens(sequence)
            where = request.retention.transfer_mode
            self.counts[where] += len(tokens)
            self.reused[where] += request.computed
        following = self.model.forward(tokens[request.computed :], request.computed, self.cache_of(request))
        request.computed = len(tokens)
        self.manager.store(sequence, keys_of(tokens), tokens=tokens)
        tokens.append(int(following[-1]))
        return len(tokens) == request.wanted

    def cache_of(self, request: Request) -> Cache:
        """Writes to the sequence's pages and reads them."""
        places = np.arange(request.computed, len(request.tokens))

        def cache(layer: int, keys: Ints, values: Ints) -> tuple[Ints, Ints]:
            pages = np.asarray(self.manager.blocks(request.sequence, layer))
            for part, given in enumerate((keys, values)):
                self.kv[layer][pages[places // BLOCK], part, places % BLOCK] = given
            both = self.kv[layer][pages].swapaxes(0, 1).reshape(2, -1, WIDTH)[:, : len(request.tokens)]
            return both[0], both[1]

        return cache


def verify(model: Model, request: Request, prompt: list[int]) -> int:
    """Compares the tokens of a request with those of the model without a cache. Returns how many they are."""
    assert request.tokens[: len(prompt)] == prompt
    expected = model.without_cache(request.tokens[:-1])[len(prompt) - 1 :].tolist()
    assert request.tokens[len(prompt) :] == expected, "a token is not the one that the model computes without a cache"
    return len(expected)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--pages", type=int, default=32, help="pages of each layer (32)")
    arguments.add_argument("--turns", type=int, default=4, help="turns of each conversation (4)")
    arguments.add_argument("--seed", type=int, default=0, help="of the weights and the prompts (0)")
    given = arguments.parse_args()
    draw = np.random.default_rng(given.seed).integers
    model, verified, served = Model(given.seed), 0, 0
    with tempfile.TemporaryDirectory() as folder, kvferry.Agent("paged-engine", listen="127.0.0.1:0") as agent:
        engine = Engine(agent, model, given.pages, secondary_blocks=512)
        conversations: list[tuple[list[int], kvferry.RetentionConfig]] = []
        for mode in MODES:
            system_prompt = draw(VOCABULARY, size=5 * BLOCK + 3).tolist()
            directory = None if mode == "dram" else Path(folder) / mode
            # What all have in common stays longer than what one has said.
            ranges = [(0, len(system_prompt), 90), (len(system_prompt), None, 50)]
            retention = kvferry.RetentionConfig(ranges, transfer_mode=mode, directory=directory)
            conversations += [(list(system_prompt), retention) for _ in range(3)]
        with engine.manager:
            for _ in range(given.turns):
                requests, prompts = [], []
                for tokens, retention in conversations:
                    tokens += draw(VOCABULARY, size=draw(5, 25)).tolist()
                    prompts.append(list(tokens))
                    requests.append(Request(tokens, len(tokens) + 12, retention))
                engine.serve(requests)
                verified += sum(map(verify, [model] * len(requests), requests, prompts))
                served += len(requests)
            stats = engine.manager.stats()
    print(f"{served} requests, {engine.counts.pop('preempted', 0)} preempted; {verified} tokens as without a cache")
    for where, prompt_tokens in engine.counts.items():
        print(f"{where:22}{prompt_tokens:7} prompt tokens {engine.reused[where]:7} reused")
    print(", ".join(f"{stats[name]} blocks {name}" for name in ("offloaded", "onboarded", "copied", "failed")))


if __name__ == "__main__":
    main()
