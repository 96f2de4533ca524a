"""From prefill's last token to decode's first, with KVFerryConnector and with a peer, in the same rounds.

There is no router: the client sends what a router would, and takes the times. The servers of the two connectors have
the same options; those that are not in turn are stopped. Each round has new prompts, the same for both.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from http.client import HTTPConnection
from typing import Any, Literal

from kvferry_e2e.client import MODEL, Route, Tokens, new_transfer_id
from kvferry_e2e.instance import Instance
from kvferry_e2e.prompts import Prompts
from kvferry_e2e.steps import Say
from kvferry_e2e.stream import Streamed, connect, stream

from kvferry_vllm_bench.rows import Row, below_zero, interval, shown

Flow = Literal["concurrent", "sequential"]
LENGTHS = (500, 1500, 1900)
# The first is timed; the others are for the comparison.
NEW_TOKENS = 4
# After a pause, the first request also wakes threads and fills caches.
WARM_UP_TOKENS = 300
SETTLE_S = 0.05
PART = "prefill's last token to decode's first"
NIXL_PARAMS: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@dataclass(frozen=True)
class Took:
    """Milliseconds to decode's first token: from prefill's response, and from the request."""

    handoff: float
    whole: float


@dataclass
class Pair:
    """The prefill and the decode of one connector."""

    name: str
    prefill: Instance
    decode: Instance
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))

    @cached_property
    def route(self) -> Route:
        return Route.between(self.prefill.port, self.decode.port, self.prefill.bootstrap)

    def pause(self) -> None:
        for server in (self.prefill, self.decode):
            server.pause()

    def resume(self) -> None:
        for server in (self.prefill, self.decode):
            server.resume()

    def hand_over(self, flow: Flow, prompt: Tokens) -> tuple[Took, Tokens]:
        """Also returns decode's tokens."""
        prefill, decode = connect(self.prefill.port), connect(self.decode.port)
        began = time.monotonic()
        try:
            if flow == "sequential":
                ended, answer = _prefill(prefill, prompt, NIXL_PARAMS)
                params = answer["kv_transfer_params"]
                if not params:
                    raise RuntimeError(f"{self.prefill.name} answered without kv_transfer_params")
                seen = stream(decode, prompt, NEW_TOKENS, params)
            else:
                seen, ended = self._at_once(prefill, decode, prompt)
        finally:
            prefill.close()
            decode.close()
        return Took(1e3 * (seen.first - ended), 1e3 * (seen.first - began)), seen.tokens

    def _at_once(self, prefill: HTTPConnection, decode: HTTPConnection, prompt: Tokens) -> tuple[Streamed, float]:
        transfer, route = new_transfer_id(), self.route
        first = self._pool.submit(_prefill, prefill, prompt, route.prefill_params(transfer))
        seen = stream(decode, prompt, NEW_TOKENS, route.decode_params(transfer))
        ended, _ = first.result()
        return seen, ended


def _prefill(connection: HTTPConnection, prompt: Tokens, params: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """When the response had arrived, and the response."""
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": 1,
        "temperature": 0,
        "ignore_eos": True,
        "kv_transfer_params": params,
    }
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    data = response.read()
    ended = time.monotonic()
    if response.status != 200:
        raise RuntimeError(f"prefill: HTTP {response.status} {data[:300].decode(errors='replace')}")
    return ended, json.loads(data)


def measure(flow: Flow, ours: Pair, peer: Pair, rounds: int, prompts: Prompts, say: Say) -> list[Row]:
    """Both pairs are running at the beginning and are paused at the end.

    Raises `RuntimeError` if an answer fails, or if the two answer a prompt with different tokens.
    """
    chance = random.Random(len(flow))
    times: dict[str, dict[int, list[Took]]] = {pair.name: {n: [] for n in LENGTHS} for pair in (ours, peer)}
    for pair in (ours, peer):
        # The first handoff also connects the two engines.
        for length in LENGTHS:
            pair.hand_over(flow, prompts.fresh(length))
        pair.pause()
    for done in range(rounds):
        warm, some = prompts.fresh(WARM_UP_TOKENS), [prompts.fresh(length) for length in LENGTHS]
        answers: dict[str, list[Tokens]] = {}
        for pair in chance.sample((ours, peer), 2):
            pair.resume()
            time.sleep(SETTLE_S)
            pair.hand_over(flow, warm)
            seen = [pair.hand_over(flow, prompt) for prompt in some]
            pair.pause()
            answers[pair.name] = [tokens for _, tokens in seen]
            for length, (took, _) in zip(LENGTHS, seen, strict=True):
                times[pair.name][length].append(took)
        if answers[ours.name] != answers[peer.name]:
            raise RuntimeError(f"different tokens of the same prompts: {answers}")
        last = ", ".join(
            f"{length} tokens {times[ours.name][length][-1].handoff:.1f} and {times[peer.name][length][-1].handoff:.1f}"
            for length in LENGTHS
        )
        say(f"{flow} flow, round {done + 1} of {rounds}: ms with {ours.name} and {peer.name}: {last}")
    return [row for length in LENGTHS for row in _rows(flow, length, ours, peer, times)]


def _rows(flow: Flow, length: int, ours: Pair, peer: Pair, times: dict[str, dict[int, list[Took]]]) -> Sequence[Row]:
    of, others = times[ours.name][length], times[peer.name][length]
    where = f"{flow} flow, {length} tokens"
    less = f"{ours.name} less {peer.name}"
    handoffs = [own.handoff - other.handoff for own, other in zip(of, others, strict=True)]
    wholes = [own.whole - other.whole for own, other in zip(of, others, strict=True)]
    return (
        below_zero(PART, f"{where}, {less}", "ms", handoffs),
        shown(PART, f"{where}, {ours.name}", "ms", [it.handoff for it in of]),
        shown(PART, f"{where}, {peer.name}", "ms", [it.handoff for it in others]),
        Row(
            "request to decode's first", f"{where}, {less}", "ms", "", statistics.median(wholes), interval(wholes), None
        ),
    )
