"""The checks of handoffs in `kvferry_e2e.contract`, with KV in memory of GPUs on the fake driver: prefill's on GPU 0,
decode's on GPU 1. The driver's checker of races may find nothing, and has to find a race without kvferry's edges.

`FAKECUDA_LIBRARY=FILE python -m kvferry_e2e.contract.gpu MODEL REPORT [PART]`: as `kvferry_e2e.contract`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from kvferry_e2e.contract import __main__ as cases
from kvferry_e2e.contract.device import AnotherDriverError, current_stream, driver
from kvferry_e2e.contract.engine import Engine
from kvferry_e2e.report import Note, Report, ensure

# KV of these is in memory of the host.
_HOSTS = ("offload ", "identity ")
# Here prefill takes blocks from requests that may be read. Neither of vLLM's runners waits for the copies.
_TAKES = ("prefill is preempted", "caches are reset", "soak")


class Suite(cases.Suite):
    title = "core on GPUs"

    # Of the check that runs.
    _name = ""

    def has(self, name: str) -> bool:
        self._name = name
        return not name.startswith(_HOSTS)

    def more(self) -> Iterator[tuple[str, Callable[[Note], None]]]:
        for asynchronous in (False, True):
            how = ", async" if asynchronous else ""
            yield f"KV is in memory of GPUs{how}", partial(on_gpus, self, asynchronous)
            for side in ("prefill", "decode"):
                yield f"a race without the edges of {side}{how}", partial(without_edges, self, side, asynchronous)

    @contextmanager
    def watched(self) -> Iterator[None]:
        driver().take_findings()
        yield
        found = driver().take_findings()
        if self._name.startswith(_TAKES):
            found = [it for it in found if not _reads_what_was_taken(it)]
        ensure(not found, f"{len(found)} findings of the driver, the first one: {found[:1]}")

    @contextmanager
    def pair(
        self, *, prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None, **both: Any
    ) -> Iterator[cases.Pair]:
        with super().pair(prefill={"gpu": 0, **(prefill or {})}, decode={"gpu": 1, **(decode or {})}, **both) as pair:
            yield pair


def _reads_what_was_taken(finding: str) -> bool:
    """Whether kvferry reads what an engine writes later: blocks that another request has by then. Nothing that was read
    is used, or the check finds wrong KV. Without prefill's edge the engine writes first; without decode's, kvferry does
    not read.
    """
    both = re.findall(r"of stream 0x([0-9a-f]+) (reads|writes)", finding)
    if [verb for _, verb in both] != ["reads", "writes"]:
        return False
    reader, writer = (int(stream, 16) in driver().streams for stream, _ in both)
    return writer and not reader


def on_gpus(suite: Suite, asynchronous: bool, note: Note) -> None:
    """Both engines have registered memory of GPUs, and decode reads there what prefill computed there."""
    with suite.pair(asynchronous=asynchronous) as pair:
        for gpu, engine in enumerate((pair.prefill, pair.decode)):
            rank = engine.executor.ranks[0]
            ensure(rank.connector._worker._stream is not None, "the connector takes the KV for memory of the host")
            for tensor in rank.caches.tensors.values():
                ensure((tensor.device.type, tensor.device.index) == ("cuda", gpu), f"a layer is on {tensor.device}")
        prompt = suite.prompts.fresh(400)
        outcome = pair.asked(prompt, pair.offered(prompt))
        pair.finish()
        pair.right(prompt, outcome, computed=0)
        pair.settled()
        read = [engine.executor.ranks[0].caches.compared for engine in (pair.prefill, pair.decode)]
        # Prefill reads no token of a step before; decode reads each one of the prompt in each layer and head.
        ensure(read[0] == 0 and read[1] >= 2 * 4 * len(prompt), f"rows that were read and compared: {read}")
        note.text = f"{read[1]} rows of KV were compared"


def without_edges(suite: Suite, side: str, asynchronous: bool, note: Note) -> None:
    """A connector takes the engine's GPU for idle, and it is not: the driver's checker finds the race
    on the KV of that engine. Decode has few blocks: the second prompt is loaded into some of those of the first one.
    """
    with suite.pair(asynchronous=asynchronous, decode={"blocks": 34}) as pair:
        bare: Engine = getattr(pair, side)
        for rank in bare.executor.ranks:
            rank.connector._worker._stream = lambda: "host"
        for _ in range(2):
            prompt = suite.prompts.fresh(300)
            pair.asked(prompt, pair.offered(prompt))
            pair.finish()
        caches = bare.executor.ranks[0].caches
        found = driver().take_findings()
        places = [int(at, 16) for at in re.findall(r"race on 0x([0-9a-f]+)\.\.", "\n".join(found))]
        theirs = [at for at in places if caches.address <= at < caches.address + caches.nbytes]
        ensure(theirs, f"no race on the KV of {side} was found: {found[:2]}")
        note.text = f"{len(theirs)} races"


def main(model: str, lines: Path, only: str = "") -> int:
    try:
        driver()
    except AnotherDriverError:
        report = Report()
        report.skip(Suite.title, "the process has the driver of a real GPU")
        report.write(lines)
        return report.finish()
    with mock.patch.object(torch.cuda, "current_stream", current_stream):
        return cases.main(model, lines, only, of_suite=Suite)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:]))
