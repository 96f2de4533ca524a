"""`make demo STORE=1 VLLM=1`: real vLLM with KVFerryOffloadingSpec, started twice on one directory. Both starts answer
the same questions about one long text; the second one finds the text's KV on the disk.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from kvferry_e2e.client import NEW_TOKENS, Tokens, complete
from kvferry_e2e.demo import CHECKOUT, ENGINE, interrupt
from kvferry_e2e.environment import VLLM, large_model, vllm_environment
from kvferry_e2e.instance import Instance
from kvferry_e2e.overlay import kvferry_overlay, newest_wheel
from kvferry_e2e.pair import METRICS_SETTLE_S, eventually
from kvferry_e2e.progress import Progress
from kvferry_e2e.prompts import BLOCK_TOKENS, Prompts
from kvferry_e2e.server import Setup
from kvferry_e2e.stream import Streamed, connect, stream
from kvferry_e2e.table import aligned

# Whole blocks.
TEXT_TOKENS = 15 * BLOCK_TOKENS
QUESTIONS = (40, 60, 80)
# The first request of a server takes memory from the system.
WARM_UP_TOKENS = 300


@dataclass(frozen=True)
class Start:
    """What a start did with all prompts. `cached_tokens` are from vLLM's own cache."""

    name: str
    ready_s: float
    prompts: int
    computed_tokens: int
    cached_tokens: int
    loaded_tokens: int
    first_token_ms: float
    all_ms: float
    right: bool


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make demo STORE=1 VLLM=1", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--wheel", type=Path, help="the kvferry wheel (default: the newest in target/wheels)")
    return parser.parse_args()


def _ask(server: Instance, prompt: Tokens) -> Streamed:
    connection = connect(server.port)
    try:
        return stream(connection, prompt, NEW_TOKENS)
    finally:
        connection.close()


def _measure(
    server: Instance, name: str, ready_s: float, prompts: list[Tokens], warm_up: Tokens
) -> tuple[Start, list[Tokens]]:
    complete(server.port, warm_up)
    expected = sum(map(len, prompts))
    eventually(lambda: server.counters().computed >= len(warm_up), METRICS_SETTLE_S)
    before = server.counters()
    began = time.monotonic()
    seen = [_ask(server, prompt) for prompt in prompts]
    took = time.monotonic() - began
    eventually(lambda: sum(server.counters().since(before)) >= expected, METRICS_SETTLE_S)
    computed, cached, loaded = server.counters().since(before)
    start = Start(
        name=name,
        ready_s=ready_s,
        prompts=len(prompts),
        computed_tokens=computed,
        cached_tokens=cached,
        loaded_tokens=loaded,
        first_token_ms=1e3 * (seen[0].first - seen[0].sent),
        all_ms=1e3 * took,
        right=True,
    )
    return start, [each.tokens for each in seen]


def _table(starts: list[Start]) -> str:
    header = ["", "prompts", "computed", "own cache", "store", "first token", "all prompts", "tokens"]
    return aligned(
        header,
        [
            [
                start.name,
                str(start.prompts),
                str(start.computed_tokens),
                str(start.cached_tokens),
                str(start.loaded_tokens),
                f"{start.first_token_ms:.0f} ms",
                f"{start.all_ms:.0f} ms",
                "right" if start.right else "WRONG",
            ]
            for start in starts
        ],
    )


def _run(wheel: Path, progress: Progress) -> list[Start]:
    source = Prompts(seed=2031)
    text = source.fresh(TEXT_TOKENS)
    prompts = [text + source.fresh(length) for length in QUESTIONS]
    starts: list[Start] = []
    expected: list[Tokens] = []
    with ExitStack() as stack:
        venv = stack.enter_context(vllm_environment(progress.say))
        model = str(large_model(venv, progress.say))
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-demo-", ignore_cleanup_errors=True))
        )
        site = kvferry_overlay(venv, wheel, folder / "site", progress.say)
        setup = Setup(venv, site, folder, folder, ENGINE)
        for name in ("first start", "second start"):
            progress.say(f"{name} of vLLM {VLLM}: importing it takes a minute")
            server = Instance(
                name=name.replace(" ", "-"),
                role="decode",
                setup=setup,
                connector=None,
                model=model,
                prefix_caching=True,
                unbound=True,
                cache_mib=256,
                store={"disk": str(folder / "kv"), "disk_gib": 1},
            )
            stack.callback(server.release)
            began = time.monotonic()
            progress.ready(server.start())
            start, tokens = _measure(server, name, time.monotonic() - began, prompts, source.fresh(WARM_UP_TOKENS))
            expected = expected or tokens
            starts.append(Start(**(asdict(start) | {"right": tokens == expected})))
            progress.say(f"{name}: first token after {start.first_token_ms:.0f} ms")
            server.stop()
    return starts


def main() -> int:
    options = _arguments()
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, interrupt)
    wheel = options.wheel or newest_wheel(CHECKOUT)
    if wheel is None:
        sys.exit("no wheel in target/wheels: run `make wheel` first")
    first, second = starts = _run(wheel, Progress())
    times = first.first_token_ms / second.first_token_ms
    # What the first start loaded would come from elsewhere: its directory was empty.
    ok = second.right and second.loaded_tokens >= TEXT_TOKENS and first.loaded_tokens == 0
    if options.json:
        report = {"schema": "kvferry.demo-store-vllm/1", "vllm": VLLM, "ok": ok, "sooner": times}
        print(json.dumps(report | {"starts": [asdict(start) for start in starts]}, indent=2))
        return 0 if ok else 1
    print(f"\n{_table(starts)}\n\nprompt tokens: computed, from vLLM's own cache, from the store\n")
    found = second.loaded_tokens // BLOCK_TOKENS
    print(
        f"the second start read {found} blocks of {BLOCK_TOKENS} tokens instead of computing them, "
        f"and had the first token {times:.1f} times sooner"
        if found
        else "THE SECOND START FOUND NOTHING IN THE STORE"
    )
    number = second.prompts * NEW_TOKENS
    print(
        f"all {number} tokens are those of the first start" if second.right else "THE SECOND START'S TOKENS ARE WRONG"
    )
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
