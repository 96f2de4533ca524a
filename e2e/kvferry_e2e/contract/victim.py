"""An engine that offloads until it is killed: `python -m kvferry_e2e.contract.victim MODEL DIRECTORY [DISK_GIB]`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import vllm.config.vllm

from kvferry_e2e.contract.offload import VICTIM_SEED, Node
from kvferry_e2e.prompts import Prompts


def main(model: str, directory: Path, disk_gib: float = 0.03125) -> None:
    vllm.config.vllm.HAS_TRITON = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
    only = Node(model, directory, settings={"disk_gib": disk_gib, "offload_prompt_only": False})
    first = Prompts(VICTIM_SEED).fresh(200)
    only.answer(first)
    print("ready", flush=True)
    prompts = Prompts(VICTIM_SEED + 1)
    while True:
        only.answer(prompts.fresh(300), 20)
        only.forget()
        only.answer(first)
        print("answered", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *map(float, sys.argv[3:]))
