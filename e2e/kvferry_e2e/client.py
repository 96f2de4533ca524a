"""Requests to the instances: completions, metrics, and the two concurrent requests of a handoff.

In production a P/D proxy sends these, concurrently, as vLLM's MooncakeConnector expects.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

MODEL = "tiny"
NEW_TOKENS = 24
HOST = "127.0.0.1"
P = TypeVar("P")
Tokens = list[int]
# Token ids, a text, or several of either in one request.
Prompt = Tokens | str | list[Tokens] | list[str]


@dataclass(frozen=True)
class Answer:
    status: int
    body: dict[str, Any]

    @property
    def tokens(self) -> Tokens:
        return list(self.body["choices"][0]["token_ids"])

    @property
    def choices(self) -> list[Tokens]:
        """The tokens of each choice, in order."""
        ordered = sorted(self.body["choices"], key=lambda choice: choice["index"])
        return [list(choice["token_ids"]) for choice in ordered]

    def __str__(self) -> str:
        return f"HTTP {self.status} {json.dumps(self.body)[:200]}"


def get(port: int, path: str, timeout_s: float = 30) -> str:
    connection = http.client.HTTPConnection(HOST, port, timeout=timeout_s)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        body = response.read().decode()
    finally:
        connection.close()
    if response.status != 200:
        raise RuntimeError(f"GET {path} on port {port}: HTTP {response.status}")
    return body


def _body(prompt: Prompt, new_tokens: int, params: dict[str, Any] | None, **more: Any) -> bytes:
    body: dict[str, Any] = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": new_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": False,
        **more,
    }
    if params is not None:
        body["kv_transfer_params"] = params
    return json.dumps(body).encode()


def complete(
    port: int,
    prompt: Prompt,
    new_tokens: int = NEW_TOKENS,
    params: dict[str, Any] | None = None,
    timeout_s: float = 120,
    **more: Any,
) -> Answer:
    """`more`: other fields of the request."""
    connection = http.client.HTTPConnection(HOST, port, timeout=timeout_s)
    try:
        connection.request(
            "POST",
            "/v1/completions",
            _body(prompt, new_tokens, params, **more),
            {"Content-Type": "application/json"},
        )
        response = connection.getresponse()
        text = response.read()
        # vllm-router reports its own errors as text.
        is_json = response.getheader("Content-Type", "").startswith("application/json")
        return Answer(response.status, json.loads(text) if is_json else {"error": text.decode(errors="replace")})
    finally:
        connection.close()


def abandonable(port: int, prompt: Tokens, new_tokens: int, params: dict[str, Any] | None = None) -> socket.socket:
    """A streaming request that the client can abandon by closing the socket."""
    body = _body(prompt, new_tokens, params, stream=True)
    lines = [
        "POST /v1/completions HTTP/1.1",
        f"Host: {HOST}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    ]
    head = "\r\n".join(lines) + "\r\n\r\n"
    connection = socket.create_connection((HOST, port), timeout=60)
    connection.sendall(head.encode() + body)
    return connection


@dataclass(frozen=True)
class Route:
    """The ports of the two instances and the id of the prefill engine."""

    prefill: int
    decode: int
    bootstrap: int
    engine_id: str

    @staticmethod
    def between(prefill: int, decode: int, bootstrap: int) -> Route:
        """Asks the prefill's bootstrap server for the engine's id, as a proxy does."""
        return Route(prefill, decode, bootstrap, json.loads(get(bootstrap, "/query"))["0"]["engine_id"])

    def prefill_params(self, transfer_id: str) -> dict[str, Any]:
        return {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer_id}

    def decode_params(self, transfer_id: str) -> dict[str, Any]:
        return {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_engine_id": self.engine_id,
            "remote_bootstrap_addr": f"http://{HOST}:{self.bootstrap}",
            "transfer_id": transfer_id,
        }


def new_transfer_id() -> str:
    return f"xfer-{uuid.uuid4()}"


def handoff(route: Route, prompt: Tokens, timeout_s: float = 120) -> Answer:
    """One request through both: prefill computes the prompt, decode loads it and generates. Returns
    the decode's answer.

    Ignores errors of the prefill: the faults phase checks the decode's answer when the prefill dies.
    """
    transfer_id = new_transfer_id()

    def prefill() -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            complete(route.prefill, prompt, 1, route.prefill_params(transfer_id), timeout_s)

    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(prefill)
        answer = complete(route.decode, prompt, NEW_TOKENS, route.decode_params(transfer_id), timeout_s)
        waiting.result()
    return answer


def in_parallel(call: Callable[[P], Answer], prompts: Sequence[P], width: int) -> list[Answer]:
    with ThreadPoolExecutor(width) as pool:
        return list(pool.map(call, prompts))


@dataclass(frozen=True)
class Counters:
    """The metrics for the source of a decode's prompt tokens and for the blocks in use."""

    computed: float
    cached: float
    transferred: float
    external_hits: float
    usage: float

    @staticmethod
    def of(port: int) -> Counters:
        values: dict[str, float] = {}
        for line in get(port, "/metrics").splitlines():
            if line.startswith("vllm:"):
                name, _, value = line.rpartition(" ")
                values[name] = float(value)

        def total(name: str, label: str = "") -> float:
            found = [v for k, v in values.items() if k.split("{")[0] == name and label in k]
            if not found:
                raise RuntimeError(f"no metric {name} {label} on port {port}")
            return sum(found)

        source = "vllm:prompt_tokens_by_source_total"
        return Counters(
            computed=total(source, 'source="local_compute"'),
            cached=total(source, 'source="local_cache_hit"'),
            transferred=total(source, 'source="external_kv_transfer"'),
            external_hits=total("vllm:external_prefix_cache_hits_total"),
            usage=total("vllm:kv_cache_usage_perc"),
        )

    def since(self, before: Counters) -> tuple[int, int, int]:
        """Prompt tokens (computed, from the local prefix cache, transferred) since an earlier
        reading.
        """
        return (
            int(self.computed - before.computed),
            int(self.cached - before.cached),
            int(self.transferred - before.transferred),
        )
