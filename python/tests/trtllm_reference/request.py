"""Requests as a connector sees them."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any


class State(enum.Enum):
    """Those of `LlmRequestState` that a connector changes."""

    CONTEXT_INIT = 1
    DISAGG_GENERATION_TRANS_IN_PROGRESS = 2
    DISAGG_CONTEXT_TRANS_IN_PROGRESS = 3
    GENERATION_IN_PROGRESS = 4
    GENERATION_COMPLETE = 5


@dataclass(eq=False)
class Request:
    request_id: int
    tokens: list[int]
    max_new_tokens: int = 4
    cache_salt: str | None = None
    # By block of the prompt; None: none was asked for.
    priorities: list[int] | None = None
    chunk: int = 1 << 30
    state: State = State.CONTEXT_INIT
    context_current_position: int = 0
    is_generation_only_request: bool = False
    is_dummy_request: bool = False
    py_num_connector_matched_tokens: int = 0
    py_draft_tokens: list[int] = field(default_factory=list)
    lora_task_id: int | None = None
    # Pages by group of layers.
    pages: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prompt_len = len(self.tokens)
        # What of the prompt was computed, not loaded.
        self.computed_tokens = 0

    def get_tokens(self, beam: int) -> list[int]:
        return list(self.tokens)

    @property
    def context_remaining_length(self) -> int:
        return self.prompt_len - self.context_current_position

    @property
    def context_chunk_size(self) -> int:
        return min(self.chunk, self.context_remaining_length)

    @property
    def kv_cache_retention_config(self) -> Any:
        return self.priorities

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.prompt_len :]
