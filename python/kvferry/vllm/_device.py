"""The streams of a GPU on which vLLM computes. torch is imported only where vLLM has caches on a GPU."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def compute_stream(device: int) -> Callable[[], Any]:
    """Returns a function that gives the stream on which the calling thread launches work on this GPU. vLLM may change
    the stream between calls.
    """
    torch = importlib.import_module("torch")

    def current() -> Any:
        return torch.cuda.current_stream(device)

    return current
