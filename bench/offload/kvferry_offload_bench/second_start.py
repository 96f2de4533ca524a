"""The first token of a prompt of 1 900 tokens whose KV an earlier start has stored, beside computing one.

Two servers one after another on one directory. The first one computes and stores prompts. What the page cache has of
the store is dropped. The second one answers pairs: a stored prompt, and one of equal length that was never seen, in
random order.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from kvferry_e2e.client import complete
from kvferry_e2e.instance import Instance
from kvferry_e2e.pair import METRICS_SETTLE_S, eventually
from kvferry_e2e.phases.offload import BLOCK_TOKENS, from_disk
from kvferry_e2e.prompts import Prompts
from kvferry_e2e.stream import Streamed, connect, stream
from kvferry_store_peers.turns import forget
from kvferry_vllm_bench.rows import Row, at_least, none_of, shown

from kvferry_offload_bench.bench import HEADS, MIB, Bench, token_bytes

LENGTH = 1900
NEW_TOKENS = 8
TIMES_SOONER = 10
COMPUTED_S = 3.0
# Whole blocks of a prompt. The rest is computed, and with it at least the last token.
LOADED = (LENGTH - 1) // BLOCK_TOKENS * BLOCK_TOKENS
BATCHED_TOKENS = "2048"


def from_one_rank(bench: Bench) -> Iterator[Row]:
    yield from _measure(bench, "second start, 1 900 tokens", 1)


def from_two_ranks(bench: Bench) -> Iterator[Row]:
    yield from _measure(bench, "TP 2's store serves TP 1, 1 900 tokens", 2)


def _measure(bench: Bench, part: str, ranks: int) -> Iterator[Row]:
    directory = bench.folder("second-start") / "kv"
    prompts, chance = Prompts(seed=ranks), random.Random(ranks)
    kept = [prompts.fresh(LENGTH) for _ in range(bench.rounds)]
    first = _start(bench, directory, "first", ranks)
    expected = [_ask(first, prompt).tokens for prompt in kept]
    _all_stored(bench, first, prompts, HEADS * len(kept) * LOADED // BLOCK_TOKENS)
    first.stop()
    forget(directory)
    second = _start(bench, directory, "second", 1)
    computed: list[float] = []
    loaded: list[float] = []
    wrong = 0
    # The first request of a server also takes memory from the system.
    _ask(second, prompts.fresh(LENGTH))
    before = from_disk(second)
    for number, (prompt, tokens) in enumerate(zip(kept, expected, strict=True)):
        for is_kept in chance.sample((True, False), 2):
            seen = _ask(second, prompt if is_kept else prompts.fresh(LENGTH))
            (loaded if is_kept else computed).append(seen.first - seen.sent)
            wrong += is_kept and seen.tokens != tokens
        bench.say(
            f"pair {number + 1} of {len(kept)}: {computed[-1]:.2f} s computed, {1e3 * loaded[-1]:.0f} ms from the store"
        )
    eventually(lambda: from_disk(second) - before >= LOADED * len(kept), METRICS_SETTLE_S)
    found = (from_disk(second) - before) / len(kept)
    ratios = [of / other for of, other in zip(computed, loaded, strict=True)]
    yield at_least(part, "sooner than by computing it", "times", ratios, TIMES_SOONER)
    yield none_of(part, f"of {len(kept)} answers, with other tokens than the first start's", wrong)
    yield at_least(part, "from the store, of a prompt", "tokens", [found], LOADED)
    yield at_least(part, "first token, computed", "s", computed, COMPUTED_S)
    yield shown(part, "first token, from the store", "ms", [1e3 * took for took in loaded])
    yield shown(part, "KV of the prompt", "MiB", [LENGTH * token_bytes(Path(bench.large)) / MIB])


def _start(bench: Bench, directory: Path, name: str, ranks: int) -> Instance:
    bench.say(f"starting vLLM: the {name} start, TP {ranks}")
    server = bench.start(
        name,
        store={"disk": str(directory), "disk_gib": 2},
        model=bench.large,
        prefix_caching=True,
        tensor_parallel=ranks,
        cache_mib=256,
        options=("--max-num-batched-tokens", BATCHED_TOKENS),
    )
    bench.ready(server)
    return server


def _ask(server: Instance, prompt: list[int]) -> Streamed:
    connection = connect(server.port)
    try:
        return stream(connection, prompt, NEW_TOKENS)
    finally:
        connection.close()


def _all_stored(bench: Bench, server: Instance, prompts: Prompts, blocks: int) -> None:
    """Waits until all are stored. Raises `RuntimeError` if some are not."""
    # What is left to store is stored with the next request.
    complete(server.port, prompts.fresh(5))
    held = "vllm:kv_offload_kvferry_blocks"
    eventually(lambda: server.metric(held) >= blocks, METRICS_SETTLE_S)
    if server.metric(held) < blocks:
        raise RuntimeError(f"{server.name} has stored {server.metric(held):.0f} of {blocks} blocks")
    bench.say(f"{server.metric(held):.0f} blocks are stored")
