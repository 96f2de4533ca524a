"""TensorRT-LLM's side of the connector, restated from its documentation, and an engine that notices a wrong byte.

The tests and `python -m kvferry.trtllm.demo` drive the connector with it where TensorRT-LLM can't run.
"""

from __future__ import annotations

from kvferry.trtllm.reference.cache import Cache, HostTensor, Shape
from kvferry.trtllm.reference.engine import Engine
from kvferry.trtllm.reference.manager import Batch, ContractError, Manager
from kvferry.trtllm.reference.ranks import Ranks, here
from kvferry.trtllm.reference.request import Request, State

__all__ = [
    "Batch",
    "Cache",
    "ContractError",
    "Engine",
    "HostTensor",
    "Manager",
    "Ranks",
    "Request",
    "Shape",
    "State",
    "here",
]
