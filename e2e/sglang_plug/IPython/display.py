"""What `sglang.utils` imports of IPython. See the package."""

from __future__ import annotations

from typing import Any


def HTML(data: str) -> str:  # noqa: N802 - IPython's name
    return data


def display(*_objects: Any) -> None:
    pass
