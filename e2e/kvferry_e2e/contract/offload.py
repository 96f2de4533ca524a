"""`KVFerryOffloadingSpec` in vLLM's own OffloadingConnector, with engine cores whose KV can be checked everywhere.

The names in the descriptions are those of vLLM's tests of offloading managers, workers and its connector that are
stated anew here.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from kvferry_e2e.contract.engine import BLOCK_TOKENS, Engine, Kind, Outcome, run
from kvferry_e2e.contract.model import WINDOW, Sequence
from kvferry_e2e.report import Note, ensure

SPEC = {"spec_name": "KVFerryOffloadingSpec", "spec_module_path": "kvferry.vllm"}
DISK = {"disk_gib": 0.125, "segment_mib": 1, "blocks_max": 100_000}


class Node:
    """An engine that offloads to the store in a directory."""

    def __init__(
        self, model: str, directory: Path | str, *, settings: dict[str, Any] | None = None, **more: Any
    ) -> None:
        options: dict[str, Any] = {"caching": True, "policy": "recompute", **more}
        extra = {**SPEC, **DISK, "disk": str(directory), **(settings or {})}
        self.engine = Engine(model, connector="OffloadingConnector", extra=extra, **options)
        self.free = self.engine.free_blocks
        self._number = 0

    @property
    def manager(self) -> Any:
        return self.engine.scheduler.get_kv_connector().connector_scheduler.manager

    def workers(self) -> list[Any]:
        return [rank.connector.connector_worker.worker for rank in self.engine.executor.ranks]

    def name(self) -> str:
        self._number += 1
        return f"o{self._number}"

    def ask(self, prompt: list[int], tokens: int = 4, **more: Any) -> Outcome:
        return self.engine.submit(self.name(), prompt, tokens, **more)

    def answer(self, prompt: list[int], tokens: int = 4, **more: Any) -> Outcome:
        """A request, until nothing is under way: what it computed is stored."""
        outcome = self.ask(prompt, tokens, **more)
        run(self.engine)
        right(prompt, outcome)
        return outcome

    def forget(self) -> None:
        """Drops the engine's own cache, not the store's."""
        ensure(self.engine.core.reset_prefix_cache(), "the prefix cache is not reset")

    def settled(self) -> None:
        run(self.engine)
        ensure(not self.engine.wrong(), f"{self.engine.wrong()[:3]}")
        ensure(not self.engine.scheduler.requests, f"still has {list(self.engine.scheduler.requests)}")
        self.forget()
        ensure(self.engine.free_blocks == self.free, f"{self.engine.free_blocks} of {self.free} blocks are free")
        for worker in self.workers():
            ensure(not worker._jobs and not worker._failed, f"jobs are left: {worker._jobs} {worker._failed}")
        manager = self.manager
        ensure(not manager._pins and not manager._storing, f"left: {manager._pins} {manager._storing}")


def right(prompt: list[int], outcome: Outcome) -> None:
    expected = Sequence(prompt).answer(len(outcome.tokens))
    ensure(outcome.reason == "length", f"{outcome}")
    ensure(outcome.tokens == expected, f"tokens {outcome.tokens} instead of {expected}")


def loaded(outcome: Outcome) -> int:
    """Tokens that came from the store."""
    return int(outcome.prefill.num_external_cached_tokens)


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvferry-offload-", ignore_cleanup_errors=True) as name:
        yield Path(name) / "kv"


@contextmanager
def node(model: str, directory: Path | str, **more: Any) -> Iterator[Node]:
    made = Node(model, directory, **more)
    try:
        yield made
    finally:
        made.engine.close()


def second_engine(suite: Any, kind: Kind, asynchronous: bool, host: float, note: Note) -> None:
    """test_offloading_connector: a second engine on the directory loads what the first one stored."""
    lengths = (BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, WINDOW, 133, 400)
    prompts = [suite.prompts.fresh(length) for length in lengths]
    options: dict[str, Any] = {"kind": kind, "asynchronous": asynchronous, "settings": {"host_gib": host}}
    with folder() as directory:
        with node(suite.model, directory, **options) as first:
            for prompt in prompts:
                ensure(loaded(first.answer(prompt)) == 0, "found what nobody stored")
            first.settled()
        found = []
        with node(suite.model, directory, **options) as second:
            for prompt in prompts:
                found.append(loaded(second.answer(prompt)))
            # Beside each other, and from the engine's own cache.
            again = [(prompt, second.ask(prompt)) for prompt in prompts]
            run(second.engine)
            for prompt, outcome in again:
                right(prompt, outcome)
            second.settled()
        least = [(length - 1) // BLOCK_TOKENS * BLOCK_TOKENS for length in lengths]
        if kind != "state":
            ensure(all(got >= want for got, want in zip(found, least, strict=True)), f"loaded {found} of {least}")
        note.text = f"tokens loaded: {found}"


def checks(suite: Any) -> Iterator[tuple[str, Any]]:
    for kind in ("full", "window", "state"):
        for asynchronous in (False, True):
            how = f"{kind}{', async' if asynchronous else ''}"
            yield f"a second engine, {how}", partial(second_engine, suite, kind, asynchronous, 0)
    yield "a second engine, with host memory", partial(second_engine, suite, "full", False, 0.03125)
