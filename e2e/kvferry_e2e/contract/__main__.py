"""The cases of vLLM's own connector tests, stated anew for KVFerryConnector between two engine cores in one process.

`python -m kvferry_e2e.contract MODEL REPORT [PART]`: run by `e2e/run` in vLLM's environment; writes the checks to
REPORT. With VLLM_USE_V2_MODEL_RUNNER=1 scheduler and connector are driven as by vLLM's second model runner, else as by
the first. PART: only the checks that have it in their names, as `offload`: those of `KVFerryOffloadingSpec`.
"""

from __future__ import annotations

import os
import random
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import vllm.config.vllm

from kvferry_e2e.contract import identity, objects, offload, parallelism
from kvferry_e2e.contract.engine import BLOCK_TOKENS, Engine, ForwardError, Kind, Outcome, run
from kvferry_e2e.contract.model import VOCABULARY, WINDOW, Sequence
from kvferry_e2e.report import Note, Report, ensure

LENGTHS = (1, 2, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, WINDOW, 133, 400)
KINDS: tuple[Kind, ...] = ("full", "window", "state", "latent")


class Prompts:
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def fresh(self, tokens: int) -> list[int]:
        return [self._random.randrange(3, VOCABULARY) for _ in range(tokens)]


class Pair:
    """A prefill and a decode engine, and the router between them."""

    def __init__(self, prefill: Engine, decode: Engine) -> None:
        self.prefill, self.decode = prefill, decode
        self._free = prefill.free_blocks, decode.free_blocks
        self._number = 0

    def name(self) -> str:
        self._number += 1
        return f"r{self._number}"

    def offered(self, prompt: list[int], stop: list[int] | None = None) -> Outcome:
        """Has prefill compute a prompt, as a router does that waits for it."""
        outcome = self.prefill.submit(self.name(), prompt, 1, {"do_remote_decode": True}, stop)
        run(self.prefill, self.decode, until=lambda: outcome.reason)
        ensure(outcome.params, f"prefill offers nothing: {outcome}")
        return outcome

    def asked(self, prompt: list[int], offer: Outcome, tokens: int = 6) -> Outcome:
        return self.decode.submit(self.name(), prompt, tokens, dict(offer.params or {}))

    def both(self, prompt: list[int], tokens: int = 6) -> Outcome:
        """Sends a request to both engines at once, as a router of Mooncake's flow does."""
        name = self.name()
        self.prefill.submit(name + "-p", prompt, 1, {"do_remote_decode": True, "transfer_id": name})
        address = self.address()
        params = {
            "do_remote_prefill": True,
            "transfer_id": name,
            "remote_address": address,
            "remote_engine_id": self.engine_id(),
        }
        return self.decode.submit(name, prompt, tokens, params)

    def address(self) -> str:
        return str(self.prefill.executor.ranks[0].connector.get_handshake_metadata().address)

    def engine_id(self) -> str:
        return str(self.prefill.scheduler.get_kv_connector()._scheduler.half.engine_id)

    def finish(self) -> None:
        run(self.prefill, self.decode)

    def right(self, prompt: list[int], outcome: Outcome, *, computed: int | None = None) -> None:
        """`computed`: the most prompt tokens that decode may have computed."""
        expected = Sequence(prompt).answer(len(outcome.tokens))
        ensure(outcome.reason == "length", f"{outcome}")
        ensure(outcome.tokens == expected, f"tokens {outcome.tokens} instead of {expected}")
        if computed is not None:
            found = outcome.prefill.num_computed_tokens
            ensure(found <= computed, f"decode computed {found} of {len(prompt)} prompt tokens itself")

    def settled(self, *, idle: bool = True) -> None:
        """All KV that was read was right, and nothing is left."""
        self.finish()
        for name, engine, free in (("prefill", self.prefill, self._free[0]), ("decode", self.decode, self._free[1])):
            ensure(not engine.wrong(), f"{name}: {engine.wrong()[:3]}")
            ensure(not engine.scheduler.requests, f"{name} still has {list(engine.scheduler.requests)}")
            ensure(engine.free_blocks == free, f"{name}: {engine.free_blocks} of {free} blocks are free")
            for block in engine.scheduler.kv_cache_manager.block_pool.blocks[1:]:
                ensure(block.ref_cnt == 0, f"{name}: block {block.block_id} has {block.ref_cnt} users")


class Suite:
    title = "core"

    def __init__(self, model: str) -> None:
        self.model = model
        self.prompts = Prompts(11)

    def has(self, name: str) -> bool:
        """Whether a check is one of this suite."""
        return True

    def more(self) -> Iterator[tuple[str, Callable[[Note], None]]]:
        """Checks of this suite only."""
        yield from ()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """What is looked at beside each check."""
        yield

    @contextmanager
    def pair(
        self, *, prefill: dict[str, Any] | None = None, decode: dict[str, Any] | None = None, **both: Any
    ) -> Iterator[Pair]:
        engines = [Engine(self.model, **{**both, **(own or {})}) for own in (prefill, decode)]
        try:
            yield Pair(*engines)
        finally:
            for engine in engines:
                engine.close()


def lengths(suite: Suite, kind: Kind, asynchronous: bool, note: Note) -> None:
    """test_remote_prefill_lifecycle, test_remote_decode_lifecycle: basic, short and full-block prompts, both flows."""
    with suite.pair(kind=kind, asynchronous=asynchronous) as pair:
        ensure((pair.decode.core.batch_queue is not None) == asynchronous, "not the scheduling that was asked for")
        allowed = 0 if kind == "full" else 1
        for length in LENGTHS:
            prompt = suite.prompts.fresh(length)
            outcome = pair.asked(prompt, pair.offered(prompt))
            pair.finish()
            pair.right(prompt, outcome, computed=max(allowed, 1 if length == 1 else 0))
            prompt = suite.prompts.fresh(length)
            outcome = pair.both(prompt)
            pair.finish()
            pair.right(prompt, outcome, computed=max(allowed, 1 if length == 1 else 0))
        pair.settled()
        note.text = f"{2 * len(LENGTHS)} handoffs"


def interleaved(suite: Suite, asynchronous: bool, note: Note) -> None:
    """test_interleaved_lifecycle: requests that are loaded beside requests that are computed."""
    with suite.pair(asynchronous=asynchronous, seqs=8, batched_tokens=64) as pair:
        asked = []
        for at in range(12):
            prompt = suite.prompts.fresh(20 + 9 * at)
            if at % 3 == 0:
                asked.append((prompt, pair.decode.submit(pair.name(), prompt, 9)))
            else:
                asked.append((prompt, pair.both(prompt, 9)))
            pair.prefill.step()
            pair.decode.step()
        pair.finish()
        for prompt, outcome in asked:
            pair.right(prompt, outcome)
        pair.settled()


def not_cached_while_loading(suite: Suite, note: Note) -> None:
    """test_no_spurious_prefix_caching: blocks that wait for their KV are no prefix hit."""
    with suite.pair(caching=True) as pair:
        prompt = suite.prompts.fresh(100)
        name = pair.name()
        params = {"do_remote_prefill": True, "transfer_id": name, "remote_address": pair.address()}
        waiting = pair.decode.submit(name, prompt, 4, {**params, "remote_engine_id": pair.engine_id()})
        for _ in range(5):
            pair.decode.step()
        ensure(not waiting.tokens, "decode did not wait for its KV")
        local = pair.decode.submit(pair.name(), prompt, 4)
        run(pair.decode, until=lambda: local.reason)
        pair.right(prompt, local)
        ensure(local.prefill.num_cached_tokens == 0, "the local request used blocks whose KV was not there")
        pair.prefill.submit(name + "-p", prompt, 1, {"do_remote_decode": True, "transfer_id": name})
        pair.finish()
        pair.right(prompt, waiting)
        pair.settled()


def prefix_hits(suite: Suite, asynchronous: bool, note: Note) -> None:
    """Decode loads only what it has not cached; all cached: prefill's blocks are freed without a read."""
    with suite.pair(caching=True, asynchronous=asynchronous) as pair:
        prompt = suite.prompts.fresh(150)
        loaded = []
        for of in (prompt, prompt, prompt[:96] + suite.prompts.fresh(70), prompt[:90]):
            outcome = pair.asked(of, pair.offered(of))
            pair.finish()
            pair.right(of, outcome, computed=1)
            loaded.append(outcome.prefill.num_external_cached_tokens)
        ensure(loaded[0] == 150 and loaded[1] <= 150 - 144 and loaded[2] == 70 and loaded[3] <= 10, f"loaded {loaded}")
        pair.settled()
        note.text = f"tokens loaded: {loaded}"


def shared_step(suite: Suite, asynchronous: bool, note: Note) -> None:
    """Prefill computes two prompts in one step, and the second shares blocks that the first computes there."""
    with suite.pair(caching=True, asynchronous=asynchronous) as pair:
        stem = suite.prompts.fresh(80)
        prompts = [stem + suite.prompts.fresh(tokens) for tokens in (5, 30)]
        asked = [(prompt, pair.both(prompt)) for prompt in prompts]
        pair.finish()
        for prompt, outcome in asked:
            pair.right(prompt, outcome, computed=1)
        cached = [it.prefill.num_cached_tokens for it in pair.prefill.outcomes.values()]
        ensure(cached == [0, 80], f"prefill had {cached} tokens in its cache")
        pair.settled()


def few_blocks(suite: Suite, asynchronous: bool, note: Note) -> None:
    """test_cannot_recv, test_cannot_schedule_after_recv: decode has no blocks for all, and preempts requests."""
    with suite.pair(asynchronous=asynchronous, decode={"blocks": 40}) as pair:
        asked = []
        for _ in range(6):
            prompt = suite.prompts.fresh(190)
            asked.append((prompt, pair.both(prompt, 120)))
        pair.finish()
        for prompt, outcome in asked:
            pair.right(prompt, outcome)
        pair.settled()


def preempted_prefill(suite: Suite, asynchronous: bool, note: Note) -> None:
    """A prefill that computes in chunks and loses its blocks to others hands over what it computed again."""
    with suite.pair(asynchronous=asynchronous, prefill={"blocks": 40, "batched_tokens": 48}) as pair:
        asked, preempted = [], 0
        for at in range(8):
            prompt = suite.prompts.fresh(180 + at)
            asked.append((prompt, pair.both(prompt)))
            # Requests that grow on prefill take the blocks of those that are computed.
            own = suite.prompts.fresh(60)
            asked.append((own, pair.prefill.submit(pair.name(), own, 150)))
        pair.finish()
        for prompt, outcome in asked:
            pair.right(prompt, outcome)
        pair.settled()
        note.text = f"{preempted} preemptions" if preempted else ""


def aborted(suite: Suite, asynchronous: bool, note: Note) -> None:
    """test_abort_*: the client leaves after each number of steps, at decode, at prefill or at both."""
    with suite.pair(asynchronous=asynchronous, batched_tokens=64) as pair:
        count = 0
        for who in ("decode", "prefill", "both"):
            for steps in range(9):
                prompt = suite.prompts.fresh(170)
                outcome = pair.both(prompt)
                name = f"r{pair._number}"
                for _ in range(steps):
                    pair.prefill.step()
                    pair.decode.step()
                if who != "prefill":
                    pair.decode.abort(name)
                if who != "decode":
                    pair.prefill.abort(name + "-p")
                if who == "prefill":
                    run(pair.prefill, pair.decode, until=lambda of=outcome: of.reason, within=60)
                pair.finish()
                pair.settled()
                count += 1
        prompt = suite.prompts.fresh(100)
        outcome = pair.both(prompt)
        pair.finish()
        pair.right(prompt, outcome, computed=0)
        note.text = f"{count} aborts"


def _lost(pair: Pair, prompt: list[int]) -> Outcome:
    """A request whose KV prefill does not have any more."""
    offer = pair.offered(prompt)
    ensure(pair.prefill.core.reset_prefix_cache(reset_connector=True) is not None, "not reset")
    _say_that_the_weights_are_the_same(pair.prefill)
    run(pair.prefill)
    return pair.asked(prompt, offer)


def failed(suite: Suite, asynchronous: bool, note: Note) -> None:
    """test_error_propagation: with the policy `fail` the request ends with an error, and no other one does."""
    with suite.pair(asynchronous=asynchronous, policy="fail") as pair:
        good, bad = suite.prompts.fresh(90), suite.prompts.fresh(90)
        lost = _lost(pair, bad)
        fine = pair.both(good)
        pair.finish()
        ensure(lost.reason == "error", f"{lost}")
        pair.right(good, fine, computed=0)
        pair.settled()


def recomputed(suite: Suite, asynchronous: bool, note: Note) -> None:
    """test_kv_load_failure_recovery, test_invalid_blocks_correctness, test_cache_pollution_prevention: decode computes
    what it could not load, beside a request that shares the cached blocks, and caches nothing wrong.
    """
    with suite.pair(asynchronous=asynchronous, policy="recompute", caching=True) as pair:
        first = suite.prompts.fresh(64)
        shared = pair.decode.submit(pair.name(), first + suite.prompts.fresh(9), 40)
        for _ in range(3):
            pair.decode.step()
        prompt = first + suite.prompts.fresh(77)
        lost = _lost(pair, prompt)
        pair.finish()
        pair.right(prompt, lost)
        ensure(shared.reason == "length", f"{shared}")
        ensure(lost.prefill.num_computed_tokens >= 77, f"{lost.prefill}")
        again = pair.decode.submit(pair.name(), prompt, 4)
        pair.finish()
        pair.right(prompt, again)
        pair.settled()


def unknown(suite: Suite, note: Note) -> None:
    """Parameters of another engine and of another prompt: computed, never loaded."""
    with suite.pair(policy="recompute") as pair:
        prompt = suite.prompts.fresh(80)
        offer = pair.offered(prompt)
        for change in (
            {"remote_engine_id": "0" * 32},
            {"transfer_id": "x#" + "0" * 32, "remote_request_id": "x#" + "0" * 32},
        ):
            params = {**(offer.params or {}), **change}
            outcome = pair.decode.submit(pair.name(), prompt, 4, params)
            run(pair.decode, until=lambda of=outcome: of.reason, within=60)
            pair.right(prompt, outcome)
            ensure(outcome.prefill.num_external_cached_tokens == 0 or outcome.prefill.num_computed_tokens, f"{outcome}")
        other = suite.prompts.fresh(80)
        outcome = pair.asked(other, offer)
        run(pair.decode, until=lambda: outcome.reason, within=60)
        pair.right(other, outcome)
        right = pair.asked(prompt, offer)
        pair.finish()
        pair.right(prompt, right, computed=0)
        pair.settled()


def made_up(suite: Suite, asynchronous: bool, note: Note) -> None:
    """Clients make parameters up: blocks wait within their bounds, and other requests are served beside them."""
    share, blocks = 0.25, 400
    # A load that nobody answers ends after it, an offer that nobody takes too.
    extra = {"idle_share": share, "timeout": 2}
    silent, closed = socket.create_server(("127.0.0.1", 0)), socket.create_server(("127.0.0.1", 0))
    port = closed.getsockname()[1]
    closed.close()
    with silent, suite.pair(asynchronous=asynchronous, blocks=blocks, extra=extra, policy="recompute") as pair:
        others = ("127.0.0.1", port), ("127.0.0.1", silent.getsockname()[1]), ("no-such-host.invalid", 1)
        params: list[dict[str, Any]] = [
            {"do_remote_prefill": True, "remote_address": f"{host}:{port}"} for host, port in others
        ]
        params.append({"do_remote_prefill": True, "remote_address": pair.address()})
        real = []
        held = waiting = 0
        decode = pair.decode.scheduler.get_kv_connector()._scheduler.half
        prefill = pair.prefill.scheduler.get_kv_connector()._scheduler.half
        made = []
        for at in range(400):
            prompt = suite.prompts.fresh(40)
            name = pair.name()
            if at % 5 == 0:
                offer = {"do_remote_decode": True, "transfer_id": name}
                made.append(pair.prefill.submit(name, prompt, 1, offer))
            else:
                made.append(pair.decode.submit(name, prompt, 1, {**params[at % 4], "transfer_id": name}))
            if at % 40 == 0:
                prompt = suite.prompts.fresh(60)
                real.append((prompt, pair.asked(prompt, pair.offered(prompt))))
            pair.prefill.step()
            pair.decode.step()
            held = max(held, prefill.gauges()["held_blocks"])
            waiting = max(waiting, decode.gauges()["waiting_loads"])
        pair.finish()
        for prompt, outcome in real:
            pair.right(prompt, outcome)
        ensure(all(outcome.reason for outcome in made), "a made-up request has not ended")
        # Besides those that the workers are giving up.
        ensure(held <= 2 * share * blocks, f"prefill held {held} blocks")
        ensure(3 * waiting <= share * blocks + 3, f"{waiting} loads waited at once")
        pair.settled()
        note.text = f"{held} blocks held, {waiting} loads waiting at most"


def reset_while_running(suite: Suite, asynchronous: bool, note: Note) -> None:
    """`reset_prefix_cache` on both sides in the middle of handoffs."""
    with suite.pair(asynchronous=asynchronous, policy="recompute", caching=True, batched_tokens=64) as pair:
        for steps in (1, 3, 6):
            prompts = [suite.prompts.fresh(120) for _ in range(3)]
            asked = [pair.both(prompt, 20) for prompt in prompts]
            for _ in range(steps):
                pair.prefill.step()
                pair.decode.step()
            _reset(pair.prefill, running=True)
            _reset(pair.decode, running=True)
            pair.finish()
            for prompt, outcome in zip(prompts, asked, strict=True):
                pair.right(prompt, outcome)
        pair.settled()


def ranks(suite: Suite, prefill: int, decode: int, note: Note, *, kinds: tuple[Kind, ...] = ("full", "window")) -> None:
    """test_output_aggregator: a request is received when all ranks have it, and sent when all ranks gave it."""
    for kind in kinds:
        with suite.pair(kind=kind, prefill={"ranks": prefill}, decode={"ranks": decode}) as pair:
            for length in (1, 100, 333):
                prompt = suite.prompts.fresh(length)
                outcome = pair.both(prompt)
                pair.finish()
                pair.right(prompt, outcome, computed=1)
            pair.settled()


def first_token_stops(suite: Suite, note: Note) -> None:
    """Prefill's token is a stop token: decode gets the KV all the same."""
    with suite.pair() as pair:
        prompt = suite.prompts.fresh(70)
        offer = pair.offered(prompt, stop=Sequence(prompt).answer(1))
        ensure(offer.reason == "stop", f"{offer}")
        outcome = pair.asked(prompt, offer)
        pair.finish()
        pair.right(prompt, outcome, computed=0)
        pair.settled()


def prefill_ends(suite: Suite, asynchronous: bool, note: Note) -> None:
    """The prefill engine ends while decode waits for it."""
    with suite.pair(asynchronous=asynchronous, policy="recompute") as pair:
        prompt = suite.prompts.fresh(150)
        name = pair.name()
        params = {"do_remote_prefill": True, "transfer_id": name, "remote_address": pair.address()}
        outcome = pair.decode.submit(name, prompt, 4, {**params, "remote_engine_id": pair.engine_id()})
        for _ in range(20):
            pair.decode.step()
        pair.prefill.close()
        run(pair.decode, until=lambda: outcome.reason, within=15)
        pair.right(prompt, outcome)
        ensure(not pair.decode.wrong() and not pair.decode.scheduler.requests, "decode has something left")


def complete(suite: Suite, is_second: bool, note: Note) -> None:
    """The second runner overwrites blocks of a preempted request before it tells its connector, so there a handoff is
    complete with the request's end, which keeps its blocks; else with the last token of its prompt.
    """
    with suite.pair() as pair:
        prompt = suite.prompts.fresh(100)
        outcome = pair.both(prompt)
        for _ in range(3):
            pair.decode.step()
        run(pair.prefill, until=lambda: pair.prefill.outcomes[f"r{pair._number}-p"].reason)
        # The workers have not heard of the end yet: that is the next step's.
        until = time.monotonic() + (0.5 if is_second else 20)
        while not outcome.tokens and time.monotonic() < until:
            pair.decode.step()
        ensure(bool(outcome.tokens) != is_second, f"{outcome}")
        pair.finish()
        pair.right(prompt, outcome, computed=0)
        pair.settled()


def raising(suite: Suite, layers: int, is_second: bool, note: Note) -> None:
    """A forward pass of prefill that raises hands nothing over: decode computes the prompt. The second runner does not
    tell its connector that the pass has ended, so there decode waits until the engine has ended.
    """
    with suite.pair(policy="recompute") as pair:
        prompt = suite.prompts.fresh(100)
        outcome = pair.both(prompt)
        for _ in range(3):
            pair.decode.step()
        pair.prefill.executor.ranks[0].raises_after = layers
        raised = False
        try:
            run(pair.prefill, within=10)
        except ForwardError:
            raised = True
        ensure(raised, "the forward pass did not raise")
        if is_second:
            # In this time decode would have loaded what prefill had announced.
            until = time.monotonic() + 0.5
            while time.monotonic() < until:
                pair.decode.step()
            ensure(outcome.reason is None and not outcome.tokens, f"decode did not wait: {outcome}")
            pair.prefill.close()
        run(pair.decode, until=lambda: outcome.reason, within=20)
        pair.right(prompt, outcome)
        ensure(not pair.decode.wrong(), f"{pair.decode.wrong()[:3]}")
        ensure(outcome.prefill.num_computed_tokens == len(prompt), f"{outcome.prefill}")
        ensure(not pair.decode.scheduler.requests, f"decode still has {list(pair.decode.scheduler.requests)}")


def soak(suite: Suite, kind: Kind, asynchronous: bool, note: Note) -> None:
    """Requests of all lengths, few blocks, aborts, local requests, prefix hits, resets of prefill's cache."""
    chance = random.Random(5)
    caching = kind == "full"
    blocks = 60 if kind == "full" else 110
    options = {"kind": kind, "asynchronous": asynchronous, "caching": caching, "blocks": blocks, "policy": "recompute"}
    with suite.pair(batched_tokens=100, **options) as pair:
        stem, live, done, left = suite.prompts.fresh(200), [], 0, 0
        pair.prefill.executor.step_s = 0.001
        while done + left < 60 or live:
            if done + left + len(live) < 60 and len(live) < 12:
                length = chance.choice((1, 5, 16, 40, 90, 180, 260))
                prompt = stem[: min(chance.randrange(0, 200), length)] if caching else []
                prompt = prompt + suite.prompts.fresh(length - len(prompt))
                tokens = chance.choice((1, 3, 20, 60))
                if chance.random() < 0.15:
                    live.append((prompt, pair.decode.submit(pair.name(), prompt, tokens), f"r{pair._number}"))
                else:
                    live.append((prompt, pair.both(prompt, tokens), f"r{pair._number}"))
            for engine in (pair.prefill, pair.decode):
                for _ in range(chance.randrange(0, 3)):
                    engine.step()
            if live and chance.random() < 0.03:
                _, _, name = live.pop(chance.randrange(len(live)))
                pair.decode.abort(name)
                if chance.random() < 0.5:
                    pair.prefill.abort(name + "-p")
                left += 1
            if chance.random() < 0.01:
                _reset(pair.prefill, running=chance.random() < 0.5)
            for one in [it for it in live if it[1].reason]:
                live.remove(one)
                pair.right(one[0], one[1])
                done += 1
        pair.settled()
        note.text = f"{done} requests, {left} aborted"


def _reset(engine: Engine, *, running: bool) -> None:
    """vLLM refuses to reset running requests while blocks of others wait for a transfer."""
    with suppress(RuntimeError):
        engine.core.reset_prefix_cache(reset_running_requests=running, reset_connector=True)
    _say_that_the_weights_are_the_same(engine)


def _say_that_the_weights_are_the_same(engine: Engine) -> None:
    """Without it, a reset of the connector ends the handoffs of an engine."""
    engine.core.set_weight_version("default")


def main(model: str, lines: Path, only: str = "", *, of_suite: type[Suite] = Suite) -> int:
    """`only`: of the checks' names."""
    report = Report()
    suite = of_suite(model)
    second = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
    # That runner needs Triton for its kernels, the scheduler for it does not.
    vllm.config.vllm.HAS_TRITON = second

    def check(name: str, of: Callable[[Note], None]) -> None:
        if only not in name or not suite.has(name):
            return
        with report.check(f"{suite.title}{' V2' if second else ''}: {name}") as note, suite.watched():
            of(note)

    for name, of in (*offload.checks(suite), *parallelism.checks(suite), *objects.checks(suite)):
        check(f"offload {name}", of)
    for name, of in identity.checks(suite):
        check(f"identity {name}", of)
    for kind in KINDS:
        for asynchronous in (False, True):
            how = f"{kind}{', async' if asynchronous else ''}"
            check(f"lengths, {how}", partial(lengths, suite, kind, asynchronous))
            check(f"soak, {how}", partial(soak, suite, kind, asynchronous))
    for asynchronous in (False, True):
        how = ", async" if asynchronous else ""
        check(f"beside local requests{how}", partial(interleaved, suite, asynchronous))
        check(f"prefix hits{how}", partial(prefix_hits, suite, asynchronous))
        check(f"prefix of the same step{how}", partial(shared_step, suite, asynchronous))
        check(f"few blocks at decode{how}", partial(few_blocks, suite, asynchronous))
        check(f"prefill is preempted{how}", partial(preempted_prefill, suite, asynchronous))
        check(f"clients leave{how}", partial(aborted, suite, asynchronous))
        check(f"a lost load fails{how}", partial(failed, suite, asynchronous))
        check(f"a lost load is recomputed{how}", partial(recomputed, suite, asynchronous))
        check(f"caches are reset{how}", partial(reset_while_running, suite, asynchronous))
        check(f"made-up parameters{how}", partial(made_up, suite, asynchronous))
        check(f"prefill ends{how}", partial(prefill_ends, suite, asynchronous))
    for name, of in suite.more():
        check(name, of)
    check("not cached while it loads", partial(not_cached_while_loading, suite))
    check("unknown handoffs", partial(unknown, suite))
    check("the first token stops", partial(first_token_stops, suite))
    check("when a handoff is complete", partial(complete, suite, second))
    for layers in (0, 1):
        check(f"a forward pass raises after {layers} layers", partial(raising, suite, layers, second))
    check("TP 2 to TP 1", partial(ranks, suite, 2, 1))
    check("TP 1 to TP 2", partial(ranks, suite, 1, 2))
    for sizes in ((4, 2), (2, 4), (4, 1), (1, 4)):
        check(f"TP {sizes[0]} to TP {sizes[1]}, uneven", partial(ranks, suite, *sizes, kinds=("uneven",)))
    # Else what was asked for has another name now.
    ensure(report.lines, f"no check has {only!r} in its name")
    report.write(lines)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:]))
