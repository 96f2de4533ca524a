"""TensorRT-LLM's side of the connector, restated from its documentation, and an engine that notices a wrong byte.

The tests and `trtllm_demo.py` drive the connector with it where TensorRT-LLM can't run.
"""

from __future__ import annotations

from trtllm_reference.cache import Cache, HostTensor, Shape
from trtllm_reference.engine import Engine
from trtllm_reference.manager import Batch, ContractError, Manager
from trtllm_reference.ranks import Ranks, here
from trtllm_reference.request import Request, State

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
