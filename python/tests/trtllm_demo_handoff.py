"""The demo of the handoff: an engine that prefills and one that decodes, as processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trtllm_reference import Request

_PATIENCE_S = 60.0
_DEMO = Path(__file__).with_name("trtllm_demo.py")


def serve(made: Callable[[], Any], requests: Callable[[int, int], list[Request]]) -> None:
    """In this process: takes commands from stdin, a line of JSON each, and answers each with a line."""
    worker, scheduler, engine = made()
    handoff = worker._local.handoff
    print(json.dumps(handoff.address), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        answer: Any = {"followers": handoff.followers, "heard": handoff.gauges()["heard"]}
        if command["do"] == "run":
            served = requests(command["prompts"], command["seed"])
            for it in served:
                it.max_new_tokens = command["tokens"] or it.max_new_tokens
            engine.run(served)
            answer = scheduler.stats() | {
                "computed": sum(it.computed_tokens for it in served),
                "generated": [it.generated for it in served],
            }
        print(json.dumps(answer), flush=True)
    worker.shutdown()


class Process:
    def __init__(self, directory: Path, load: str, **settings: str) -> None:
        own = {
            "DISK": str(directory),
            "DISK_GIB": "0.25",
            "LOAD": load,
            "LOAD_WAIT": "60",
            "HANDOFF_GIB": "0.0625",
            **settings,
        }
        environment = os.environ | {"TLLM_KVFERRY_" + name: value for name, value in own.items()}
        self._process = subprocess.Popen(
            [sys.executable, str(_DEMO), "--serve-handoff"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.address = str(self._answer())

    def do(self, **command: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"an engine of the demo has ended with status {self._process.wait()}")
        return json.loads(line)

    def wait_until(self, name: str, count: int, complaint: str) -> None:
        until = time.monotonic() + _PATIENCE_S
        while self.do(do="count")[name] != count:
            if time.monotonic() > until:
                raise SystemExit(complaint)
            time.sleep(0.05)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        self._process.communicate(timeout=_PATIENCE_S)


class Report:
    """The runs, each with the blocks that moved and the tokens that were computed."""

    def __init__(self) -> None:
        self.runs: list[dict[str, Any]] = []
        self._counted: Counter[str] = Counter()

    def add(self, name: str, found: dict[str, Any], counter: str, blocks: int, computed: int, generated: Any) -> None:
        moved = found.get(counter, 0) - self._counted[counter]
        self._counted[counter] += moved
        is_equal = found["generated"] == generated
        is_right = is_equal and (moved, found["computed"]) == (blocks, computed)
        complaint = f"{blocks} blocks must move, {computed} tokens be computed, and the same tokens generated"
        self.runs.append(
            {
                "name": name,
                "moved_blocks": moved,
                "computed_tokens": found["computed"],
                "generated_equal": is_equal,
                "complaint": "" if is_right else complaint,
            }
        )


def compare(
    directory: Path, prompts: int, load: str, tokens_per_block: int, alone: Callable[[int], list[Request]]
) -> list[dict[str, Any]]:
    """`alone`: what an engine without a connector makes of the prompts of a seed."""
    report = Report()
    prefill = Process(directory / "prefill", load, HANDOFF="prefill", LISTEN="127.0.0.1:0")
    decode = None
    try:
        decode = Process(directory / "decode", load, HANDOFF="decode", PREFILL=prefill.address)
        prefill.wait_until("followers", 1, "the engine that decodes does not reach the one that prefills")
        for seed, is_killed in ((1, False), (2, True)):
            expected = alone(seed)
            tokens = sum(it.prompt_len for it in expected)
            blocks = sum((it.prompt_len - 1) // tokens_per_block for it in expected)
            found = prefill.do(do="run", prompts=prompts, seed=seed, tokens=1)
            first = [it.generated[:1] for it in expected]
            report.add("prefill", found, "offered_blocks", blocks, tokens, first)
            # Only prompts with a full block are offered.
            offers = sum(it.prompt_len > tokens_per_block for it in expected)
            decode.wait_until("heard", offers, "the engine that decodes does not hear of all prompts")
            if is_killed:
                prefill.kill()
                blocks = 0
            found = decode.do(do="run", prompts=prompts, seed=seed, tokens=0)
            name = "decode, prefill was killed" if is_killed else "decode"
            left = tokens - blocks * tokens_per_block
            report.add(name, found, "received_blocks", blocks, left, [it.generated for it in expected])
        decode.end()
    finally:
        prefill.kill()
        if decode is not None:
            decode.kill()
    return report.runs
