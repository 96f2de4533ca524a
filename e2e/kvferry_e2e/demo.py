"""`make demo VLLM=1`: two vLLM servers on KVFerryConnector behind vllm-router. The prefill computes each prompt, the
decode loads its KV cache and generates; every token is compared with a single server's.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from kvferry_e2e.client import NEW_TOKENS, complete, get
from kvferry_e2e.environment import VLLM, vllm_environment
from kvferry_e2e.instance import Instance, Role
from kvferry_e2e.overlay import kvferry_overlay, newest_wheel
from kvferry_e2e.pair import METRICS_SETTLE_S, eventually
from kvferry_e2e.progress import Progress
from kvferry_e2e.prompts import BLOCK_BYTES, Prompts
from kvferry_e2e.router import Router, routers_environment
from kvferry_e2e.server import Setup
from kvferry_e2e.stream import connect, stream
from kvferry_e2e.table import aligned

CHECKOUT = Path(__file__).resolve().parents[2]
LENGTHS = (17, 128, 500, 1000, 1500, 2000)
# Requests of each length: the table has their medians.
EACH = 3
# The first handoff also connects the two. It is checked like the others, and not in the table.
FIRST = 200
# Both servers and the driver share few cores: see `ON_BUSY_CORES` of the end-to-end test.
ENGINE = {"KVFERRY_SILENCE_MS": "20000"}


@dataclass(frozen=True)
class Handoff:
    """One request. Bytes and seconds are kvferry's own: from the first read of the KV to the last."""

    prompt_tokens: int
    loaded_tokens: int
    loaded_blocks: int
    loaded_bytes: int
    handoff_ms: float
    ttft_ms: float
    computed_tokens: int
    right: bool

    @property
    def recomputed(self) -> int:
        """Prompt tokens that decode computed. The last one is always computed: its result is the first new token."""
        return max(0, self.computed_tokens - 1)


def _loads(port: int) -> dict[str, float]:
    """Sums over all loads so far: their number, seconds and bytes."""
    sums = dict.fromkeys(("load_seconds_count", "load_seconds_sum", "load_bytes_sum"), 0.0)
    for line in get(port, "/metrics").splitlines():
        name, _, value = line.rpartition(" ")
        metric = name.split("{")[0].removeprefix("vllm:kvferry_")
        if metric in sums:
            sums[metric] += float(value)
    return sums


def _hand_over(router: Router, prefill: Instance, decode: Instance, prompt: list[int]) -> Handoff:
    before, sources = _loads(decode.port), decode.counters()
    seen = stream(connect(router.port), prompt, NEW_TOKENS)
    expected = len(prompt)

    def counted() -> bool:
        loaded = _loads(decode.port)["load_seconds_count"] > before["load_seconds_count"]
        return loaded and sum(decode.counters().since(sources)) == expected

    eventually(counted, METRICS_SETTLE_S)
    now = _loads(decode.port)
    computed, _, loaded = decode.counters().since(sources)
    nbytes = int(now["load_bytes_sum"] - before["load_bytes_sum"])
    alone = complete(prefill.port, prompt)
    return Handoff(
        prompt_tokens=len(prompt),
        loaded_tokens=loaded,
        loaded_blocks=nbytes // BLOCK_BYTES,
        loaded_bytes=nbytes,
        handoff_ms=1e3 * (now["load_seconds_sum"] - before["load_seconds_sum"]),
        ttft_ms=1e3 * (seen.first - seen.sent),
        computed_tokens=computed,
        right=alone.status == 200 and alone.tokens == seen.tokens,
    )


def _table(handoffs: list[Handoff]) -> str:
    header = ["prompt tokens", "requests", "loaded blocks", "MiB", "handoff, ms", "TTFT, ms", "recomputed", "tokens"]
    rows = []
    for length in LENGTHS:
        some = [it for it in handoffs if it.prompt_tokens == length]
        rows.append(
            [
                str(length),
                str(len(some)),
                f"{statistics.median(it.loaded_blocks for it in some):.0f}",
                f"{statistics.median(it.loaded_bytes for it in some) / 2**20:.1f}",
                f"{statistics.median(it.handoff_ms for it in some):.1f}",
                f"{statistics.median(it.ttft_ms for it in some):.0f}",
                str(sum(it.recomputed for it in some) or "none"),
                "right" if all(it.right for it in some) else "WRONG",
            ]
        )
    return aligned(header, rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make demo VLLM=1", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--wheel", type=Path, help="the kvferry wheel (default: the newest in target/wheels)")
    return parser.parse_args()


def interrupt(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


def main() -> int:
    options = _arguments()
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, interrupt)
    progress = Progress()
    wheel = options.wheel or newest_wheel(CHECKOUT)
    if wheel is None:
        sys.exit("no wheel in target/wheels: run `make wheel` first")
    with ExitStack() as stack:
        venv = stack.enter_context(vllm_environment(progress.say))
        commands = routers_environment(progress.say)
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-demo-", ignore_cleanup_errors=True))
        )
        site = kvferry_overlay(venv, wheel, folder / "site", progress.say)
        setup = Setup(venv, site, folder, folder, ENGINE)

        def start(name: str, role: Role) -> Instance:
            instance = Instance(name=name, role=role, setup=setup, connector="KVFerryConnector")
            stack.callback(instance.release)
            return instance.start()

        progress.say(f"starting vLLM {VLLM} twice, with KVFerryConnector: importing it takes a minute")
        prefill, decode = start("prefill", "prefill"), start("decode", "decode")
        progress.ready(prefill, decode)
        router = Router(
            name="vllm-router",
            kind="vllm-router",
            setup=setup,
            commands=commands,
            prefills=[prefill],
            decodes=[decode],
        )
        stack.callback(router.release)
        router.start()
        progress.ready(router)

        prompts = Prompts(seed=2026)
        done: list[Handoff] = []
        for length in (FIRST, *(length for length in LENGTHS for _ in range(EACH))):
            it = _hand_over(router, prefill, decode, prompts.fresh(length))
            done.append(it)
            progress.say(
                f"{length} tokens: {it.loaded_blocks} blocks in {it.handoff_ms:.1f} ms, first token after "
                f"{it.ttft_ms:.0f} ms, {'tokens right' if it.right else 'WRONG TOKENS'}"
            )
    wrong = sum(not it.right for it in done)
    recomputed = sum(it.recomputed for it in done)
    ok = not wrong and not recomputed
    if options.json:
        # The first is apart: its time includes connecting.
        shown = [asdict(it) | {"recomputed_tokens": it.recomputed} for it in done]
        report = {
            "schema": "kvferry.demo-vllm/1",
            "vllm": VLLM,
            "ok": ok,
            "connected_by": shown[0],
            "handoffs": shown[1:],
        }
        print(json.dumps(report, indent=2))
    else:
        print(f"\n{_table(done[1:])}\n\nmedians; handoff: from the first read of a request's KV to the last\n")
        tokens = (
            f"all {len(done) * NEW_TOKENS} tokens are a single server's" if not wrong else f"{wrong} ANSWERS ARE WRONG"
        )
        computed = (
            "decode recomputed none of the prompts" if not recomputed else f"DECODE RECOMPUTED {recomputed} TOKENS"
        )
        print(f"{len(done)} requests through vllm-router, prefill to decode: {tokens}; {computed}")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
