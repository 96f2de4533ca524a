"""Requests with ``n`` > 1, for each answer of which vLLM runs a request of its own."""

from __future__ import annotations

import re
from typing import Any

# Requests that are remembered. vLLM does not say how many answers a request has, or that the last one has ended.
KEPT = 1024

# vLLM's id of a request for one answer: its number, then the id of the client's request.
_ANSWER = re.compile(r"\d+_(.+)", re.DOTALL)


class Siblings:
    """They have one prompt, so prefill hands over the KV of one of them, the owner.

    Else the offers of the others would hold their blocks until they expire: the client's response has the parameters of
    one, and it is the one that ends last. So the others end with the owner's parameters.
    """

    def __init__(self) -> None:
        self._owners: dict[str, str] = {}
        self._params: dict[str, dict[str, Any]] = {}

    def owns(self, request_id: str) -> bool:
        """Whether this request is handed over: it has no siblings, or is the first of them."""
        client = _client_request(request_id)
        if client is None:
            return True
        owner = self._owners.setdefault(client, request_id)
        if len(self._owners) > KEPT:
            oldest = next(iter(self._owners))
            del self._owners[oldest]
            self._params.pop(oldest, None)
        return owner == request_id

    def ended(self, request_id: str, params: dict[str, Any] | None) -> dict[str, Any] | None:
        """The parameters for the response, from those of this request."""
        client = _client_request(request_id)
        if client is None or client not in self._owners:
            return params
        if params is not None:
            self._params[client] = params
        return self._params.get(client)


def _client_request(request_id: str) -> str | None:
    found = _ANSWER.fullmatch(request_id)
    return found and found.group(1)
