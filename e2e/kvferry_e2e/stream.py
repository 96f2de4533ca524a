"""Streamed completions, and when their first token arrived."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvferry_e2e.client import HOST, MODEL, Tokens


@dataclass(frozen=True)
class Streamed:
    """`sent` and `first` are times of `time.monotonic`, in seconds."""

    tokens: Tokens
    sent: float
    first: float


def connect(port: int, timeout_s: float = 120) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection(HOST, port, timeout=timeout_s)
    connection.connect()
    return connection


def stream(
    connection: http.client.HTTPConnection,
    prompt: Sequence[int],
    new_tokens: int,
    params: dict[str, Any] | None = None,
) -> Streamed:
    """One request over an open connection, which can be used again afterwards.

    Raises `RuntimeError` if the server answers with an error, or without a token.
    """
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": new_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
    }
    if params is not None:
        body["kv_transfer_params"] = params
    data = json.dumps(body).encode()
    sent = time.monotonic()
    connection.request("POST", "/v1/completions", data, {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(f"HTTP {response.status} {response.read()[:300].decode(errors='replace')}")
    tokens: Tokens = []
    first = 0.0
    while line := response.readline():
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        arrived = time.monotonic()
        event = json.loads(line[len(b"data: ") :])
        if "error" in event:
            raise RuntimeError(f"the stream ended with {event['error']}")
        for choice in event["choices"]:
            if choice.get("token_ids"):
                first = first or arrived
                tokens += choice["token_ids"]
    if not tokens:
        raise RuntimeError("a stream without tokens")
    return Streamed(tokens, sent, first)
