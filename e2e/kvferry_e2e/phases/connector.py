"""KVFerryConnector behind routers: decode loads the prompt and answers as a single instance does."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from kvferry_e2e.client import (
    NEW_TOKENS,
    Answer,
    Prompt,
    Route,
    Tokens,
    abandonable,
    complete,
    get,
    in_parallel,
    new_transfer_id,
)
from kvferry_e2e.instance import MAX_MODEL_TOKENS, Instance
from kvferry_e2e.pair import METRICS_SETTLE_S, eventually, mismatch
from kvferry_e2e.prompts import BLOCK_TOKENS, LENGTHS, Prompts
from kvferry_e2e.report import CheckError, Report, ensure
from kvferry_e2e.router import Router

LONGEST = MAX_MODEL_TOKENS - NEW_TOKENS
MANY = 100
# A step of the engine and a message to the other side, on busy cores.
BLOCKS_BACK_S = 10.0
# How long prefill holds the blocks of a request that no decode asks for (`Limits::offer_ttl`).
UNCLAIMED_S = 30.0
# The connector reports a dead peer within 1 s of the reset; the engine takes a step more, on busy cores.
FAILED_WITHIN_S = 10.0
LOGPROB_TOLERANCE = 1e-3


@dataclass
class Cluster:
    """The instances behind a router; the first prefill is also the single instance for reference."""

    prefills: Sequence[Instance]
    decodes: Sequence[Instance]

    def alone(self, prompt: Prompt, **more: Any) -> Answer:
        answer = complete(self.prefills[0].port, prompt, **more)
        ensure(answer.status == 200, f"the single instance: {answer}")
        return answer

    def sources(self) -> tuple[float, float, float]:
        seen = [decode.counters() for decode in self.decodes]
        return sum(c.computed for c in seen), sum(c.cached for c in seen), sum(c.transferred for c in seen)

    def expect_loaded(self, before: tuple[float, float, float], prompts: int, tokens: int, cached: int = 0) -> None:
        """Since `before`, the decodes computed no more than the last token of each prompt, and loaded the rest."""

        def holds() -> bool:
            computed, hits, loaded = seen()
            return computed <= prompts and hits == cached and computed + hits + loaded == tokens

        def seen() -> tuple[int, int, int]:
            now = self.sources()
            return int(now[0] - before[0]), int(now[1] - before[1]), int(now[2] - before[2])

        eventually(holds, METRICS_SETTLE_S)
        expected = f"of {tokens}, {cached} cached and at most {prompts} computed"
        ensure(holds(), f"prompt tokens (computed, cached, transferred): {seen()}, expected {expected}")

    def expect_blocks_back(self, within_s: float = BLOCKS_BACK_S) -> str:
        start = time.monotonic()
        instances = [i for i in (*self.prefills, *self.decodes) if i.alive()]

        def usage() -> dict[str, float]:
            return {i.name: used for i in instances if (used := i.counters().usage)}

        ensure(eventually(lambda: not usage(), within_s), f"KV cache usage after {within_s:.0f} s: {usage()}")
        return f"blocks free after {time.monotonic() - start:.1f} s"


def _fresh(router: Router, prompts: Prompts, length: int) -> Prompt:
    # smg takes texts only.
    return prompts.text(length) if router.kind == "smg" else prompts.fresh(length)


def _ask(router: Router, prompt: Prompt, **more: Any) -> Answer:
    return complete(router.port, prompt, **more)


def expect_right(cluster: Cluster, prompt: Prompt, answer: Answer, **more: Any) -> None:
    ensure(answer.status == 200, str(answer))
    reference = cluster.alone(prompt, **more)
    for seen, expected in zip(answer.choices, reference.choices, strict=True):
        ensure(seen == expected, mismatch(prompt, seen, expected))


def _tokens(answers: Sequence[Answer]) -> int:
    return sum(int(answer.body["usage"]["prompt_tokens"]) for answer in answers)


def _first_failure(checks: Sequence[Callable[[], None]]) -> None:
    """Makes all checks, and reports how many failed with the first reason."""
    failed = []
    for check in checks:
        try:
            check()
        except CheckError as failure:
            failed.append(str(failure))
    ensure(not failed, f"{len(failed)} of {len(checks)} failed, the first: {failed[:1]}")


def lengths(report: Report, cluster: Cluster, router: Router, prompts: Prompts, some: Sequence[int]) -> None:
    """One prompt at a time, so that the counters belong to one prompt."""

    def one(length: int) -> None:
        prompt, before = _fresh(router, prompts, length), cluster.sources()
        answer = _ask(router, prompt)
        expect_right(cluster, prompt, answer)
        cluster.expect_loaded(before, 1, _tokens([answer]))

    with report.check(f"{router.name}: a single instance's tokens, prompt loaded") as note:
        _first_failure([lambda length=length: one(length) for length in some])  # type: ignore[misc]
        note.text = f"{len(some)} prompts of {min(some)} to {max(some)} tokens; {cluster.expect_blocks_back()}"


def concurrent(report: Report, cluster: Cluster, router: Router, prompts: Prompts, count: int) -> None:
    many = [_fresh(router, prompts, LENGTHS[i % len(LENGTHS)]) for i in range(count)]
    with report.check(f"{router.name}: {count} requests at once") as note:
        before, start = cluster.sources(), time.monotonic()
        answers = in_parallel(lambda prompt: _ask(router, prompt, timeout_s=300), many, count)
        took = time.monotonic() - start
        failed = [str(answer) for answer in answers if answer.status != 200]
        ensure(not failed, f"{len(failed)} of {count} failed, the first: {failed[:1]}")
        cluster.expect_loaded(before, count, _tokens(answers))
        references = in_parallel(cluster.alone, many, 16)
        for prompt, answer, reference in zip(many, answers, references, strict=True):
            ensure(answer.tokens == reference.tokens, mismatch(prompt, answer.tokens, reference.tokens))
        note.text = f"in {took:.0f} s; {cluster.expect_blocks_back()}"


def several_answers(report: Report, cluster: Cluster, router: Router, prompts: Prompts, *, seeded: bool = True) -> None:
    """`n` = 2: two samples of one prompt. Decode loads it once, and shares it where prefix caching is on. smg sends
    such requests to decode only.
    """
    with report.check(f"{router.name}: n = 2") as note:
        prompt, before = _fresh(router, prompts, 700), cluster.sources()
        # With a seed, vLLM on the CPU dies of a prefill in chunks. Without one, only the likeliest token is certain.
        sampling = {"n": 2, "temperature": 1.0, **({"seed": 11} if seeded else {"top_k": 1})}
        answer = _ask(router, prompt, **sampling)
        expect_right(cluster, prompt, answer, **sampling)
        ensure((answer.choices[0] != answer.choices[1]) == seeded, "samples are equal with a seed, or differ without")
        if router.kind != "smg":
            caching = all(decode.prefix_caching for decode in cluster.decodes)
            most = BLOCK_TOKENS if caching else 701
            computed, _, loaded = (int(now - then) for now, then in zip(cluster.sources(), before, strict=True))
            ensure(computed <= most and loaded >= 699, f"decode computed {computed} prompt tokens, loaded {loaded}")
        note.text = cluster.expect_blocks_back()


def batch(report: Report, cluster: Cluster, router: Router, prompts: Prompts, loaded: int) -> None:
    """Three prompts in one request. `loaded`: how many of them decode loads; the others it computes."""
    some = [prompts.fresh(length) for length in (400, 129, 800)]
    with report.check(f"{router.name}: 3 prompts in one request, {loaded} loaded") as note:
        before = cluster.sources()
        answer = _ask(router, some)
        ensure(answer.status == 200, str(answer))
        for prompt, seen in zip(some, answer.choices, strict=True):
            reference = cluster.alone(prompt).tokens
            ensure(seen == reference, mismatch(prompt, seen, reference))
        least = sum(len(prompt) - 1 for prompt in some[:loaded])
        eventually(lambda: cluster.sources()[2] - before[2] >= least, METRICS_SETTLE_S)
        transferred = int(cluster.sources()[2] - before[2])
        ensure(transferred >= least, f"{transferred} tokens loaded, expected at least {least}")
        note.text = f"{transferred} tokens loaded"


def ends_at_once(report: Report, cluster: Cluster, router: Router, prompts: Prompts) -> None:
    """The prompt's first new token ends the answer, as EOS does: the prompt is handed over all the same."""
    with report.check(f"{router.name}: the first token ends the answer") as note:
        prompt = _fresh(router, prompts, 300)
        first = cluster.alone(prompt).tokens[0]
        before = cluster.sources()
        ends = {"stop_token_ids": [first]}
        answer = _ask(router, prompt, **ends)
        expect_right(cluster, prompt, answer, **ends)
        choice = answer.body["choices"][0]
        ensure(choice["finish_reason"] == "stop", f"finish_reason {choice['finish_reason']}")
        cluster.expect_loaded(before, 1, _tokens([answer]))
        note.text = f"{len(answer.tokens)} token; {cluster.expect_blocks_back()}"


def logprobs(report: Report, cluster: Cluster, router: Router, prompts: Prompts) -> None:
    with report.check(f"{router.name}: logprobs") as note:
        prompt = _fresh(router, prompts, 500)
        seen, expected = (
            answer.body["choices"][0]["logprobs"]["token_logprobs"]
            for answer in (_ask(router, prompt, logprobs=3), cluster.alone(prompt, logprobs=3))
        )
        difference = max(abs(a - b) for a, b in zip(seen, expected, strict=True))
        ensure(difference <= LOGPROB_TOLERANCE, f"they differ by up to {difference}")
        note.text = f"{len(seen)} values, they differ by at most {difference:.1e}"


def streams(report: Report, cluster: Cluster, router: Router, prompts: Prompts) -> None:
    """Also shows that a client that leaves ends its request in both engines."""
    with report.check(f"{router.name}: a streaming client leaves") as note:
        client = abandonable(router.port, prompts.fresh(600), 1200)
        ensure(client.recv(1 << 16).startswith(b"HTTP/1.1 200"), "no first token")
        client.close()
        note.text = cluster.expect_blocks_back()


def prefix_hits(report: Report, cluster: Cluster, router: Router, prompts: Prompts) -> None:
    """With prefix caching, decode loads only what it does not have."""
    with report.check(f"{router.name}: prefix caching, partial and full hits") as note:
        hits = 0
        for length in (128, 512, 1000):
            prefix = prompts.fresh(length)
            whole = length // BLOCK_TOKENS * BLOCK_TOKENS
            cases = [(0, prefix)] + [(whole, prefix + prompts.fresh(tail)) for tail in (1, 100, 300)]
            for cached, prompt in cases:
                before = cluster.sources()
                answer = _ask(router, prompt)
                expect_right(cluster, prompt, answer)
                cluster.expect_loaded(before, 1, len(prompt), cached)
                hits += cached
        for length in (5, 384, 700):
            prompt = prompts.fresh(length)
            for _ in range(2):
                expect_right(cluster, prompt, _ask(router, prompt))
        note.text = f"{hits} tokens were hits; {cluster.expect_blocks_back()}"


def prefix_hits_concurrent(report: Report, cluster: Cluster, router: Router, prompts: Prompts) -> None:
    prefixes = [prompts.fresh(n) for n in (256, 640, 1024)]
    many = [prefix + prompts.fresh(tail) for tail in (3, 60, 128, 200, 257, 384, 401, 456) for prefix in prefixes]
    with report.check(f"{router.name}: prefix caching, {len(many)} requests at once") as note:
        answers = in_parallel(lambda prompt: _ask(router, prompt), many, len(many))
        for prompt, answer in zip(many, answers, strict=True):
            expect_right(cluster, prompt, answer)
        note.text = cluster.expect_blocks_back()


def clients_leave(report: Report, cluster: Cluster, prompts: Prompts) -> None:
    """At the steps of a handoff in Mooncake's flow; the requests go to the engines without a router."""
    prefill, decode = cluster.prefills[0], cluster.decodes[0]
    route = Route.between(prefill.port, decode.port, prefill.bootstrap)

    def ask_decode(prompt: Tokens, transfer: str) -> Any:
        return abandonable(route.decode, prompt, 1200, route.decode_params(transfer))

    with report.check("client leaves: decode waits, prefill never asked") as note:
        client = ask_decode(prompts.fresh(600), new_transfer_id())
        time.sleep(1)
        client.close()
        note.text = cluster.expect_blocks_back()
    with report.check("client leaves: both, before prefill is done") as note:
        prompt, transfer = prompts.fresh(1900), new_transfer_id()
        clients = [
            ask_decode(prompt, transfer),
            abandonable(route.prefill, prompt, 1, route.prefill_params(transfer)),
        ]
        time.sleep(0.02)
        for client in clients:
            client.close()
        note.text = cluster.expect_blocks_back()
    with report.check("client leaves: decode generates") as note:
        prompt, transfer = prompts.fresh(300), new_transfer_id()
        client = ask_decode(prompt, transfer)
        complete(route.prefill, prompt, 1, route.prefill_params(transfer))
        ensure(client.recv(1 << 16).startswith(b"HTTP/1.1 200"), "no first token")
        client.close()
        note.text = cluster.expect_blocks_back()


def wrong_prompt(report: Report, cluster: Cluster, prompts: Prompts) -> None:
    """Two requests with one transfer id and different prompts: neither gets the other's blocks."""
    prefill, decode = cluster.prefills[0], cluster.decodes[0]
    with report.check("parameters of another prompt: decode computes, never wrong tokens"):
        params = offer(prefill, prompts.fresh(400))
        other = prompts.fresh(400)
        answer = complete(decode.port, other, params=params)
        expect_right(cluster, other, answer)


def offer(prefill: Instance, prompt: Tokens) -> dict[str, Any]:
    """Asks prefill as routers of NIXL's flow do; returns its parameters for decode."""
    answer = complete(prefill.port, prompt, 1, {"do_remote_decode": True, "do_remote_prefill": False})
    ensure(answer.status == 200, f"the prefill: {answer}")
    params = answer.body["kv_transfer_params"]
    ensure(params and params.get("do_remote_prefill"), f"the prefill's answer has no parameters: {params}")
    return dict(params)


def only_nixls_names(report: Report, cluster: Cluster, prompts: Prompts) -> None:
    """Routers that copy only the names that NixlConnector uses."""
    names = {"do_remote_prefill", "do_remote_decode", "remote_engine_id", "remote_request_id"}
    names |= {"remote_host", "remote_port", "remote_block_ids", "tp_size"}
    with report.check("decode needs only the names that NixlConnector has"):
        prompt, before = prompts.fresh(500), cluster.sources()
        params = {k: v for k, v in offer(cluster.prefills[0], prompt).items() if k in names}
        answer = complete(cluster.decodes[0].port, prompt, params=params)
        expect_right(cluster, prompt, answer)
        cluster.expect_loaded(before, 1, len(prompt))


def rejected(report: Report, cluster: Cluster, prompts: Prompts) -> None:
    """A request that decode's API server rejects, so that its engine never sees the prompt."""
    with report.check("decode rejects a request: prefill frees its blocks") as note:
        params = offer(cluster.prefills[0], prompts.fresh(500))
        answer = complete(cluster.decodes[0].port, prompts.fresh(MAX_MODEL_TOKENS + 1), params=params)
        ensure(answer.status == 400, f"decode accepts a prompt of {MAX_MODEL_TOKENS + 1} tokens: {answer}")
        note.text = cluster.expect_blocks_back()


def foreign_engine(report: Report, cluster: Cluster, prompts: Prompts) -> None:
    with report.check("parameters of NixlConnector: decode computes"):
        prompt = prompts.fresh(300)
        params = {"do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1, 2, 3]]}
        params |= {"remote_engine_id": "0f0f0f0f-1111-2222-3333-444444444444", "remote_request_id": "cmpl-1"}
        params |= {"remote_host": "127.0.0.1", "remote_port": 5600, "tp_size": 1}
        expect_right(cluster, prompt, complete(cluster.decodes[0].port, prompt, params=params))


@dataclass
class UnderLoad:
    """Requests through a router that are under way while an instance dies."""

    prompts: list[Tokens]
    answers: list[Answer | None]

    @staticmethod
    def while_(router: Router, prompts: list[Tokens], action: Callable[[], object]) -> UnderLoad:
        def ask(prompt: Tokens) -> Answer | None:
            try:
                return _ask(router, prompt, timeout_s=120)
            except (OSError, http.client.HTTPException, json.JSONDecodeError):
                return None

        with ThreadPoolExecutor(len(prompts)) as pool:
            futures = [pool.submit(ask, prompt) for prompt in prompts]
            time.sleep(0.5)
            action()
            return UnderLoad(prompts, [future.result(150) for future in futures])

    def check(self, cluster: Cluster) -> str:
        """Each answer is right or an error."""
        right = 0
        for prompt, answer in zip(self.prompts, self.answers, strict=True):
            if answer is not None and answer.status == 200:
                expect_right(cluster, prompt, answer)
                right += 1
        return f"{right} of {len(self.prompts)} answered, the others failed"


def decode_dies(report: Report, cluster: Cluster, router: Router, prompts: Prompts) -> None:
    """Kills the decode; the caller starts another. In Mooncake's flow, since in NIXL's the prefill can't know which
    decode would have come, and keeps its offers until they expire.
    """
    (decode,), (prefill,) = cluster.decodes, cluster.prefills
    with report.check("decode SIGKILLed under load: prefill frees the blocks, answers are right or errors") as note:
        load = UnderLoad.while_(router, [prompts.fresh(1000) for _ in range(8)], decode.kill)
        ensure(prefill.alive(), "the prefill died too")
        # A request that decode had not yet told prefill of is an offer that nobody asks for.
        note.text = f"{load.check(cluster)}; {cluster.expect_blocks_back(UNCLAIMED_S + BLOCKS_BACK_S)}"


def prefill_dies(report: Report, cluster: Cluster, router: Router, prompts: Prompts) -> list[tuple[Tokens, Answer]]:
    """Kills the prefill; the caller starts another. Returns answers that are to be compared then."""
    (decode,), (prefill,) = cluster.decodes, cluster.prefills
    lost = prompts.fresh(700)
    kept: list[tuple[Tokens, Answer]] = []
    with report.check("prefill SIGKILLed under load: decode frees the blocks") as note:
        params = offer(prefill, lost)
        load = UnderLoad.while_(router, [prompts.fresh(1000) for _ in range(8)], prefill.kill)
        ensure(decode.alive(), "the decode died too")
        note.text = cluster.expect_blocks_back()
        answered = [
            (p, a) for p, a in zip(load.prompts, load.answers, strict=True) if a is not None and a.status == 200
        ]
        kept += answered
    with report.check("an offer of a dead prefill: decode fails the request or computes it, soon") as note:
        start = time.monotonic()
        answer = complete(decode.port, lost, params=params)
        took = time.monotonic() - start
        ensure(took < FAILED_WITHIN_S, f"it took {took:.1f} s")
        ensure(decode.alive(), "the decode died too")
        if answer.status == 200:
            kept.append((lost, answer))
        note.text = f"HTTP {answer.status} after {took:.1f} s; {cluster.expect_blocks_back()}"
    return kept


def restarted(report: Report, cluster: Cluster, routers: Sequence[Router], prompts: Prompts, what: str) -> None:
    """The routers run on; those of Mooncake's flow still send the old engine's id."""
    for router in routers:
        with report.check(f"{what} restarted: {router.name} goes on") as note:
            took: list[float] = []

            def right(router: Router = router, took: list[float] = took) -> bool:
                start, prompt, before = time.monotonic(), prompts.fresh(600), cluster.sources()
                answer = _ask(router, prompt)
                if answer.status != 200:
                    return False
                expect_right(cluster, prompt, answer)
                cluster.expect_loaded(before, 1, len(prompt))
                took.append(time.monotonic() - start)
                return True

            ensure(eventually(right, 30, 1.0), str(_ask(router, prompts.fresh(600))))
            note.text = f"{took[0]:.1f} s"


def compare(report: Report, cluster: Cluster, kept: Sequence[tuple[Tokens, Answer]]) -> None:
    with report.check("prefill SIGKILLed: what was answered is right") as note:
        for prompt, answer in kept:
            expect_right(cluster, prompt, answer)
        note.text = f"{len(kept)} answers"


def chunked(report: Report, prefill: Instance) -> None:
    with report.check(f"{prefill.name}: prefill in chunks is on"):
        ensure(
            prefill.log_has(r"Chunked prefill is enabled with max_num_batched_tokens=256"), "its log does not say so"
        )


def spread(report: Report, cluster: Cluster, router: Router, prompts: Prompts, what: str) -> None:
    """Several instances of a kind: each of them gets requests."""
    many = [prompts.fresh(length) for length in LENGTHS]
    with report.check(f"{router.name}: {what}") as note:
        first = cluster.sources()
        before = {d.name: d.counters() for d in cluster.decodes}
        answers = in_parallel(lambda prompt: _ask(router, prompt), many, 8)
        for prompt, answer in zip(many, answers, strict=True):
            expect_right(cluster, prompt, answer)
        cluster.expect_loaded(first, len(many), _tokens(answers))
        loaded = {d.name: int(d.counters().transferred - before[d.name].transferred) for d in cluster.decodes}
        ensure(all(loaded.values()), f"a decode loaded nothing: {loaded}")
        note.text = f"tokens loaded: {loaded}; {cluster.expect_blocks_back()}"


def metrics_show_no_prompt(report: Report, cluster: Cluster) -> None:
    with report.check("metrics of the connector are served"):
        for instance in (*cluster.prefills, *cluster.decodes):
            ensure("kvferry" in get(instance.port, "/metrics"), f"{instance.name} has none")
