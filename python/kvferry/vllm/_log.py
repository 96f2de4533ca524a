"""kvferry's logger in vLLM, with what vLLM adds to it, such as `warning_once`. Its settings are vLLM's own."""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger

from kvferry._engine.log import name_of

logger: Any = init_logger(name_of("vllm"))
