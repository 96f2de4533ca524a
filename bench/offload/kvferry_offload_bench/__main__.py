"""KV that outlives the engine, on real vLLM: required, reached, spread. Exit code 1 where short."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import traceback
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

from kvferry_e2e.environment import VLLM, vllm_environment
from kvferry_e2e.overlay import newest_wheel
from kvferry_e2e.progress import Progress
from kvferry_vllm_bench.rows import Row, as_json, table

from kvferry_offload_bench.bench import Bench
from kvferry_offload_bench.catalogue import DEFAULT, LONG, ROWS

CHECKOUT = Path(__file__).resolve().parents[3]
COMMAND = CHECKOUT / "target" / "dist" / "kvferry"
ROUNDS = 7


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench/offload/run", description=__doc__)
    named = f"[all but {', '.join(LONG)}]"
    parser.add_argument("--rows", nargs="+", choices=tuple(ROWS), default=DEFAULT, help=f"only these {named}")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"7 or more to judge by [{ROUNDS}]")
    parser.add_argument("--requests", type=int, default=1000, help="of the soak [1000]")
    parser.add_argument("--trace", type=Path, help="a trace of requests with hash_ids [prompts made like one]")
    parser.add_argument("--prompts", type=int, default=200, help="of the trace [200]")
    parser.add_argument("--folder", type=Path, help="on the disk to measure [that of temporary files]")
    parser.add_argument("--wheel", type=Path, help="the kvferry wheel [the newest in target/wheels]")
    parser.add_argument("--command", type=Path, default=COMMAND, help="the kvferry command [target/dist/kvferry]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report to FILE, as JSON")
    options = parser.parse_args()
    if options.rounds < 1 or options.requests < 1 or options.prompts < 1:
        parser.error("--rounds, --requests and --prompts are 1 or more")
    if "trace" in options.rows and not options.command.exists():
        parser.error(f"{options.command} is missing: run `make command-dist`, or name the command with --command")
    return options


def _interrupt(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


def main() -> int:
    options = arguments()
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, _interrupt)
    wheel = options.wheel or newest_wheel(CHECKOUT)
    if wheel is None:
        sys.exit("no wheel in target/wheels: run `make wheel` first")
    if options.folder:
        options.folder.mkdir(parents=True, exist_ok=True)
    progress = Progress()
    rows: list[Row] = []
    failed: list[str] = []
    with ExitStack() as stack:
        environment = stack.enter_context(vllm_environment(progress.say))
        bench = Bench(stack, environment, wheel, options, progress)
        for name in options.rows:
            progress.say(f"-- {name}")
            try:
                for row in ROWS[name](bench):
                    rows.append(row)
                    progress.say(table([row]).splitlines()[-1])
            except Exception as error:
                # The other rows are still wanted.
                traceback.print_exc()
                failed.append(f"{name}: {error}")
            bench.kill_all()
    return report(options, rows, failed)


def report(options: argparse.Namespace, rows: list[Row], failed: list[str]) -> int:
    short = [row for row in rows if row.ok is False]
    judged = sum(row.ok is not None for row in rows)
    ok = judged > 0 and not short and not failed
    if options.json:
        said = {"schema": "kvferry.bench-offload/1", "vllm": VLLM, "rounds": options.rounds, "ok": ok, "failed": failed}
        options.json.write_text(json.dumps(said | {"rows": as_json(rows)}, indent=1) + "\n")
    print(f"vLLM {VLLM} on the CPU\nmedians [quartiles, or 95 % of a difference]\n\n{table(rows)}\n")
    for line in failed:
        print(f"FAILED {line}")
    print(f"{len(short)} of {judged} figures fall short" if short else f"all {judged} figures are reached")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
