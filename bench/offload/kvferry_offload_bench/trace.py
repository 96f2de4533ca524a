"""Prompts with the prefixes of a trace, by a store bounded to a third of their blocks.

A server without a cache of its own answers them one after another, so that each hit is the store's. The prediction is
that of the store's bench, `kvferry bench store --trace`, for the same prompts at the same times and as many blocks as
the bound has bytes for. It knows no segments: a store this small gives a seventh of its bytes to their headers, ends
and free ones, and its background frees them a moment later. So hits may differ by `TOLERANCE`.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator, Sequence

from kvferry_e2e.client import Tokens, complete
from kvferry_e2e.instance import Instance
from kvferry_e2e.pair import METRICS_SETTLE_S, eventually
from kvferry_e2e.phases.offload import from_disk
from kvferry_vllm_bench.rows import Row, none_of, shown

from kvferry_offload_bench import prompts_tree as tree
from kvferry_offload_bench.bench import PUT_BLOCKS, Bench, token_bytes
from kvferry_offload_bench.disk import Sampled

SEED = 1
PARTS = 3
TOLERANCE = 0.05
NEW_TOKENS = 4
# Of the answers, so many are compared with those of a server without a store.
COMPARED_ONE_OF = 8
SAY_EVERY = 20
# Of eight blocks.
SEGMENT_MIB = 1


def measure(bench: Bench) -> Iterator[Row]:
    path, count = bench.options.trace, bench.options.prompts
    chains = tree.of_trace(path, count, SEED) if path else tree.made(count, SEED)
    part = f"{count} prompts {'of the trace' if path else 'made like a trace'}, a third in the store"
    size = tree.BLOCK_TOKENS * token_bytes(bench.environment.model)
    bound = tree.different(chains) // PARTS * size
    asked = sum(map(len, chains))
    bench.say(f"{asked} blocks, {tree.different(chains)} different, {bound // size} in the store")
    directory = bench.folder("trace") / "kv"
    # One block of the store per block of the engine, as in the prediction.
    settings = {"disk": str(directory), "disk_gib": bound / 2**30, "segment_mib": SEGMENT_MIB, "share_tp": 1}
    options = ("--block-size", str(tree.BLOCK_TOKENS))
    server = bench.start("trace", store=settings, options=options)
    plain = bench.start("trace-plain", store=None, options=options)
    bench.ready(server, plain)
    with Sampled(directory) as sampled:
        answers: list[Tokens] = []
        times: list[float] = []
        for chain in chains:
            times.append(time.monotonic())
            answers.append(_answer(server, chain))
            if len(answers) % SAY_EVERY == 0:
                bench.say(f"{len(answers)} prompts answered")
    predicted = _predicted(bench, chains, times, bound // size)
    # Metrics are written a moment after the answer they belong to.
    eventually(lambda: _hits(server) >= predicted, METRICS_SETTLE_S)
    hits = _hits(server)
    compared = range(0, count, COMPARED_ONE_OF)
    wrong = sum(_answer(plain, chains[at]) != answers[at] for at in compared)
    ratio = hits / max(predicted, 1)
    within = abs(ratio - 1) <= TOLERANCE
    wanted = f"1 ± {TOLERANCE:g}"
    yield Row(part, "hits / hits that the store's bench predicts", "", wanted, ratio, (ratio, ratio), within)
    unbounded = tree.hits_without_bound(chains)
    for what, number in (("", hits), (", predicted", predicted), (", without a bound", unbounded)):
        yield shown(part, f"hits{what}", "% of the blocks", [100 * number / asked])
    yield shown(part, "blocks that the store refused", "", [server.metric(PUT_BLOCKS, 'outcome="refused"')])
    yield sampled.row(part, bound)
    yield none_of(part, f"of {len(compared)} answers, with other tokens than without a store", wrong)


def _predicted(bench: Bench, chains: Sequence[tree.Chain], times: Sequence[float], blocks: int) -> float:
    """Hits. Raises `RuntimeError` if the command fails."""
    file = bench.scratch / "trace.jsonl"
    lines = [
        json.dumps({"timestamp": round(1e3 * (at - times[0])), "hash_ids": chain})
        for at, chain in zip(times, chains, strict=True)
    ]
    file.write_text("\n".join(lines) + "\n")
    command = [str(bench.options.command), "bench", "store", "--trace", str(file), "--blocks", str(blocks)]
    ran = subprocess.run([*command, "--json", "--quiet"], stdout=subprocess.PIPE, text=True, check=False)
    # It exits with 1 where a figure of its own falls short.
    if ran.returncode not in (0, 1) or not ran.stdout:
        raise RuntimeError(f"{' '.join(command)}: exit code {ran.returncode}")
    (whole,) = (row for row in json.loads(ran.stdout)["rows"] if row["part"] == "hits" and "whole trace" in row["work"])
    return float(whole["figures"][0]["median"]) / 100 * sum(map(len, chains))


def _answer(server: Instance, chain: tree.Chain) -> Tokens:
    answer = complete(server.port, tree.tokens(chain), NEW_TOKENS)
    if answer.status != 200:
        raise RuntimeError(f"{server.name}: {answer}")
    return answer.tokens


def _hits(server: Instance) -> int:
    return int(from_disk(server)) // tree.BLOCK_TOKENS
