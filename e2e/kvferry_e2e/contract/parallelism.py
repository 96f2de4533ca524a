"""`KVFerryOffloadingSpec` with pipeline parallelism and with decode context parallelism."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from kvferry_e2e.contract import offload
from kvferry_e2e.contract.engine import BLOCK_TOKENS, Kind
from kvferry_e2e.contract.model import WINDOW
from kvferry_e2e.contract.offload import folder, loaded, node
from kvferry_e2e.report import Note, ensure

Stages = tuple[tuple[int, ...], ...]

# The numbers of the layers of each stage.
ONE: Stages = ((0, 1, 2, 3),)
HALVES: Stages = ((0, 1), (2, 3))
UNEVEN: Stages = ((0,), (1, 2, 3))
# Of two groups of layers, each stage has one.
GROUPS: Stages = ((0, 2), (1, 3))
LENGTHS = (BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, WINDOW, 133, 400)


def same(suite: Any, engine: dict[str, Any], block_tokens: int, note: Note) -> None:
    """A second engine of the same parallelism loads what each rank of the first one stored."""
    prompts = [suite.prompts.fresh(length) for length in LENGTHS]
    with folder() as directory:
        with node(suite.model, directory, **engine) as first:
            # One batch per stage is under way.
            batches = first.engine.core.batch_queue_size
            ensure(batches >= len(engine.get("stages", ONE)), f"{batches} batches at once")
            for prompt in prompts:
                ensure(loaded(first.answer(prompt)) == 0, "a prompt that was never stored was loaded")
            first.settled()
        with node(suite.model, directory, **engine) as second:
            found = [loaded(second.answer(prompt)) for prompt in prompts]
            second.forget()
            # Beside each other, so that several batches are under way.
            again = [(prompt, second.ask(prompt)) for prompt in prompts]
            offload.run(second.engine)
            for prompt, outcome in again:
                offload.right(prompt, outcome)
            second.settled()
    least = [(length - 1) // block_tokens * block_tokens for length in LENGTHS]
    if engine.get("kind") != "aligned":
        ensure(all(got >= want for got, want in zip(found, least, strict=True)), f"loaded {found} of {least}")
    ensure(found[-1] > 0, f"loaded {found}")
    note.text = f"tokens loaded: {found}"


def other(suite: Any, before: dict[str, Any], after: dict[str, Any], note: Note) -> None:
    """An engine that lays its KV out in another way finds nothing of the first one's, and then finds its own."""
    prompts = [suite.prompts.fresh(length) for length in (64, 133, 333)]
    with folder() as directory:
        with node(suite.model, directory, **before) as first:
            for prompt in prompts:
                first.answer(prompt)
            first.settled()
        with node(suite.model, directory, **after) as second:
            ensure([loaded(second.answer(prompt)) for prompt in prompts] == [0] * 3, "found the other engine's blocks")
            second.forget()
            found = [loaded(second.answer(prompt)) for prompt in prompts]
            ensure(min(found) >= 48, f"found {found} of its own")
            second.settled()
        with node(suite.model, directory, **before) as third:
            found = [loaded(third.answer(prompt)) for prompt in prompts]
            ensure(min(found) >= 48, f"the first engine's blocks: found {found}")
            third.settled()


def refused(suite: Any, note: Note) -> None:
    """vLLM itself refuses sliding windows with DCP, as docs/storage.md says: nothing of kvferry's is reached."""
    with folder() as directory:
        try:
            with node(suite.model, directory, kind="window", **_dcp(2, 1)):
                pass
        except AssertionError as error:
            ensure("DCP not support sliding window" in str(error), f"{error}")
        else:
            ensure(False, "vLLM takes sliding windows with DCP: add them to the checks")


def checks(suite: Any) -> Iterator[tuple[str, Callable[[Note], None]]]:
    kinds: tuple[Kind, ...] = ("full", "window", "latent", "aligned")
    for kind in kinds:
        for asynchronous in (False, True):
            how = f"{kind}{', async' if asynchronous else ''}"
            engine = {"kind": kind, "asynchronous": asynchronous, "stages": HALVES}
            yield f"PP 2, {how}", partial(same, suite, engine, BLOCK_TOKENS)
    for kind in ("window", "aligned"):
        yield (
            f"PP 2, a stage without layers of a group, {kind}",
            partial(same, suite, {"kind": kind, "stages": GROUPS}, BLOCK_TOKENS),
        )
    for kind in ("full", "window"):
        engine = {"kind": kind, "ranks": 2, "stages": HALVES}
        yield f"PP 2 and TP 2, {kind}", partial(same, suite, engine, BLOCK_TOKENS)
        yield (
            f"PP 2 to PP 1, {kind}",
            partial(other, suite, {"kind": kind, "stages": HALVES}, {"kind": kind, "stages": ONE}),
        )
        yield (
            f"PP 1 to PP 2, {kind}",
            partial(other, suite, {"kind": kind, "stages": ONE}, {"kind": kind, "stages": HALVES}),
        )
        yield (
            f"PP 2 to PP 2 and TP 2, {kind}",
            partial(other, suite, {"kind": kind, "stages": HALVES}, {"kind": kind, "stages": HALVES, "ranks": 2}),
        )
        yield f"PP 2, a block that one stage can't read, {kind}", partial(offload.one_rank, suite, kind, stages=HALVES)
        for asynchronous in (False, True):
            how = f"{kind}{', async' if asynchronous else ''}"
            yield f"PP 2, preemption, {how}", partial(offload.preempted, suite, kind, asynchronous, stages=HALVES)
            yield (
                f"PP 2, blocks that can't be read, {how}",
                partial(offload.damaged, suite, kind, asynchronous, 1, stages=HALVES),
            )
            yield f"PP 2, soak, {how}", partial(offload.soak, suite, kind, asynchronous, stages=HALVES)
    for asynchronous in (False, True):
        how = ", async" if asynchronous else ""
        yield f"PP 2, clients leave{how}", partial(offload.aborted, suite, asynchronous, stages=HALVES)
        yield f"PP 2, caches are reset{how}", partial(offload.reset, suite, asynchronous, stages=HALVES)
    # vLLM concludes from the model's number of heads which ranks have the same ones, and some layers have more.
    uneven = {"kind": "uneven"}
    yield "TP 4, uneven", partial(same, suite, uneven | {"ranks": 4}, BLOCK_TOKENS)
    for before, after in ((2, 4), (4, 2), (4, 1)):
        yield (
            f"TP {before} to TP {after}, uneven",
            partial(other, suite, uneven | {"ranks": before}, uneven | {"ranks": after}),
        )
    for kind in ("window", "latent"):
        yield (
            f"PP 2 with other layers per stage, {kind}",
            partial(other, suite, {"kind": kind, "stages": HALVES}, {"kind": kind, "stages": UNEVEN}),
        )
    for kind in ("full", "latent"):
        for asynchronous in (False, True):
            how = f"{kind}{', async' if asynchronous else ''}"
            engine = {**_dcp(2, 1), "kind": kind, "asynchronous": asynchronous}
            yield f"DCP 2, {how}", partial(same, suite, engine, 2 * BLOCK_TOKENS)
        of_kind = {"kind": kind}
        yield f"DCP 2 to DCP 1, {kind}", partial(other, suite, _dcp(2, 1) | of_kind, _dcp(1, 1) | of_kind)
        yield f"DCP 1 to DCP 2, {kind}", partial(other, suite, _dcp(1, 1) | of_kind, _dcp(2, 1) | of_kind)
        yield (
            f"DCP 2 with another interleaving, {kind}",
            partial(other, suite, _dcp(2, 1) | of_kind, _dcp(2, 4) | of_kind),
        )
        dcp = _dcp(2, 1)
        ranks = dcp.pop("ranks")
        yield f"DCP 2, blocks that can't be read, {kind}", partial(offload.damaged, suite, kind, False, ranks, **dcp)
    yield "DCP 2, aligned", partial(same, suite, {**_dcp(2, 1), "kind": "aligned"}, 2 * BLOCK_TOKENS)
    yield "DCP 2, window", partial(refused, suite)
    yield "DCP 2, soak", partial(offload.soak, suite, "full", False, **_dcp(2, 4))
    engine = {**_dcp(2, 4), "stages": HALVES}
    yield "DCP 2 and PP 2", partial(same, suite, engine, 2 * BLOCK_TOKENS)
    yield "DCP 2 and PP 2 with another interleaving", partial(other, suite, engine, engine | _dcp(2, 1))


def _dcp(size: int, interleave: int) -> dict[str, Any]:
    """The tiny Llama has two KV heads, so that two of four ranks have the same."""
    return {"ranks": 4, "decode_context_parallel_size": size, "cp_kv_cache_interleave_size": interleave}
