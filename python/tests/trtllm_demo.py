"""``python python/tests/trtllm_demo.py``: the KV of prompts outlives the engine.

Processes that follow each other serve the same prompts on one directory, with TensorRT-LLM's side of the connector
restated and a made-up model. The first loads no block, the second all full blocks of the prompts; before the third, a
byte of the store is flipped. All generate what an engine without a connector generates. Exit status 1 if not.

With --handoff, a process prefills and another one decodes, each with a store of its own; then the first is killed
before the second decodes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import trtllm_demo_handoff
from kvferry.trtllm import KVFerryConnectorScheduler, KVFerryConnectorWorker
from trtllm_reference import Cache, Engine, Manager, Request, Shape

_TOKENS_PER_BLOCK = 16
# Of a block.
_PATTERN_BYTES = 32
_SHAPE = Shape(blocks=512, tokens_per_block=_TOKENS_PER_BLOCK, token_bytes=32, groups=((tuple(range(4)), 0),))


def requests(count: int, seed: int = 13) -> list[Request]:
    chance = random.Random(seed)
    lengths = [chance.randrange(_TOKENS_PER_BLOCK, 20 * _TOKENS_PER_BLOCK) for _ in range(count)]
    return [
        Request(1000 * seed + at, [chance.randrange(32_000) for _ in range(length)], max_new_tokens=16)
        for at, length in enumerate(lengths)
    ]


def full_blocks(served: list[Request]) -> int:
    """Of the prompts, but for a block that ends with the prompt: one token is computed."""
    return sum((it.prompt_len - 1) // _TOKENS_PER_BLOCK for it in served)


def made() -> tuple[Any, Any, Engine]:
    """The halves of the connector, and an engine with them."""
    cache = SimpleNamespace(tokens_per_block=_TOKENS_PER_BLOCK, dtype="auto")
    arguments = SimpleNamespace(model="made-up", load_format="dummy", revision="1", kv_cache_config=cache)
    worker = KVFerryConnectorWorker(arguments)
    scheduler = KVFerryConnectorScheduler(arguments)
    pages = Cache(_SHAPE)
    worker.register_kv_caches(pages.tensors[0])
    return worker, scheduler, Engine(pages, Manager(worker, scheduler))


def serve(prompts: int, load: str) -> dict[str, Any]:
    """In this process."""
    os.environ["TLLM_KVFERRY_LOAD"] = load
    worker, _, engine = made()
    pages = engine.cache
    # The beginning of a block, to find it in the store.
    patterns: list[str] = []

    def look(part: str) -> None:
        if part == "wait_for_save" and not patterns:
            first = engine._running[0]
            patterns.append(bytes(pages.page(0, first.pages[0][0])[:_PATTERN_BYTES]).hex())

    engine.trace = look
    served = engine.run(requests(prompts))
    worker.shutdown()
    counts = worker.stats()
    return {
        "loaded": counts.get("loaded_blocks", 0),
        "stored": counts.get("stored_blocks", 0),
        "computed": sum(it.computed_tokens for it in served),
        "generated": [it.generated for it in served],
        "pattern": patterns[0],
    }


def _serve_elsewhere(directory: Path, prompts: int, load: str) -> dict[str, Any]:
    """In a process of its own, which ends."""
    own = {"DISK": str(directory), "DISK_GIB": "0.25", "LOAD_WAIT": "60"}
    environment = os.environ | {"TLLM_KVFERRY_" + name: value for name, value in own.items()}
    command = [sys.executable, __file__, "--serve", "--prompts", str(prompts), "--load", load]
    ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True, timeout=300)
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def flip(directory: Path, pattern: bytes) -> Path:
    """Flips the first byte of a block in the store."""
    for path in sorted(directory.rglob("*")):
        if not path.is_file():
            continue
        at = path.read_bytes().find(pattern)
        if at >= 0:
            with path.open("r+b") as file:
                file.seek(at)
                file.write(bytes([pattern[0] ^ 1]))
            return path
    raise SystemExit(f"the first block of the first prompt is not in {directory}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="trtllm_demo.py", description=(__doc__ or "").partition("\n")[2])
    parser.add_argument(
        "--directory", type=Path, help="an empty or new directory for the store; default: a temporary one"
    )
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--load", choices=("sync", "async"), default="sync")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--handoff", action="store_true", help="from a process that prefills to one that decodes")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--serve-handoff", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve_handoff:
        trtllm_demo_handoff.serve(made, requests)
        return 0
    if options.serve:
        print(json.dumps(serve(options.prompts, options.load)))
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.directory or Path(temporary) / "kv"
        compare = _hand_over if options.handoff else _compare
        report = compare(directory, options.prompts, options.load)
    print(json.dumps(report, indent=2) if options.json else _text(report))
    return 1 if any(run["complaint"] for run in report["runs"]) else 0


def _compare(directory: Path, prompts: int, load: str) -> dict[str, Any]:
    alone = Engine(Cache(_SHAPE), None).run(requests(prompts))
    expected = [it.generated for it in alone]
    blocks = full_blocks(alone)
    # What the damaged block and those behind it are.
    lost = (alone[0].prompt_len - 1) // _TOKENS_PER_BLOCK
    runs = []
    pattern = b""
    for name, must in (("first run", 0), ("second run", blocks), ("third run, one byte flipped", blocks - lost)):
        if name.startswith("third"):
            flip(directory, pattern)
        found = _serve_elsewhere(directory, prompts, load)
        # The first run computes what is there; in a later one it may be on its way.
        pattern = pattern or bytes.fromhex(found["pattern"])
        is_equal = found["generated"] == expected
        is_right = is_equal and found["loaded"] == must
        runs.append(
            {
                "name": name,
                "loaded_blocks": found["loaded"],
                "computed_tokens": found["computed"],
                "generated_equal": is_equal,
                "complaint": "" if is_right else f"{must} blocks must be loaded, and the same tokens generated",
            }
        )
    return {
        "schema": "kvferry.trtllm-demo/1",
        "prompts": prompts,
        "prompt_tokens": sum(it.prompt_len for it in alone),
        "full_blocks": blocks,
        "load": load,
        "runs": runs,
    }


def _hand_over(directory: Path, prompts: int, load: str) -> dict[str, Any]:
    def alone(seed: int) -> list[Request]:
        return Engine(Cache(_SHAPE), None).run(requests(prompts, seed))

    runs = trtllm_demo_handoff.compare(directory, prompts, load, _TOKENS_PER_BLOCK, alone)
    return {"schema": "kvferry.trtllm-handoff-demo/1", "prompts": prompts, "load": load, "runs": runs}


def _text(report: dict[str, Any]) -> str:
    is_handoff = "full_blocks" not in report
    of = "" if is_handoff else f", {report['prompt_tokens']} tokens, {report['full_blocks']} full blocks"
    moved = "blocks moved" if is_handoff else "blocks loaded"
    lines = [
        f"{report['prompts']} prompts{of}; loads: {report['load']}",
        f"{'':34}{moved:>14}{'tokens computed':>17}{'tokens generated':>18}",
    ]
    for run in report["runs"]:
        equal = "equal" if run["generated_equal"] else "DIFFERENT"
        note = f"  WRONG: {run['complaint']}" if run["complaint"] else ""
        blocks = run["moved_blocks" if is_handoff else "loaded_blocks"]
        lines.append(f"{run['name']:34}{blocks:>14}{run['computed_tokens']:>17}{equal:>18}{note}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
