"""The rows that `bench/offload/run` knows. A new one is a function in a file of its own, and a line here."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvferry_vllm_bench.rows import Row

from kvferry_offload_bench import no_hits, second_start, soak, trace
from kvferry_offload_bench.bench import Bench

Measure = Callable[[Bench], Iterator[Row]]
ROWS: dict[str, Measure] = {
    "second-start": second_start.from_one_rank,
    "tensor-parallel": second_start.from_two_ranks,
    "no-hits": no_hits.measure,
    "trace": trace.measure,
    "soak": soak.measure,
}
# Takes longer than the others together, so it runs where it is named.
LONG = ("soak",)
DEFAULT = tuple(name for name in ROWS if name not in LONG)
