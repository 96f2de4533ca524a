"""``nixl.logging``: loggers below "nixl", whose handlers are the caller's."""

from __future__ import annotations

import logging

__all__ = ["get_logger"]


def get_logger(name: str) -> logging.Logger:
    return logging.getLogger(f"nixl.{name.lstrip('_')}")
