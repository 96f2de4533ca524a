"""SGLang beside the vLLM environment, which has all that it needs but these packages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvferry_e2e.environment import Environment, package_overlay

SGLANG = "0.5.23"
# torchvision is that of the environment's torch. Without dependencies: the rest that SGLang declares is for GPUs.
PACKAGES = (
    f"sglang=={SGLANG}",
    "sglang-router==0.3.2",
    "torchvision==0.28.0",
    "gguf==0.19.0",
    "orjson==3.13.0",
    "soundfile==0.14.0",
)
# Stand-ins for what SGLang imports and a CPU does not have, and a plug-in. See the files.
PLUG = Path(__file__).parents[2] / "sglang_plug"


def sglang_overlay(environment: Environment, say: Callable[[str], None]) -> Path:
    """A folder for PYTHONPATH, made once per machine."""
    return package_overlay(environment, "sglang", SGLANG, PACKAGES, say)
