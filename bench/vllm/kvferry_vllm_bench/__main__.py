"""KVFerryConnector beside vLLM's own connectors, on real vLLM: required, reached, spread. Exit code 1 where short."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

from kvferry_e2e.environment import VLLM, Environment, vllm_environment
from kvferry_e2e.instance import Connector, Instance, Role
from kvferry_e2e.overlay import MOONCAKE, kvferry_overlay, mooncake_overlay, newest_wheel
from kvferry_e2e.progress import Progress
from kvferry_e2e.prompts import Prompts
from kvferry_e2e.server import Setup

from kvferry_vllm_bench import first_token, spans, steps
from kvferry_vllm_bench.first_token import Flow, Pair
from kvferry_vllm_bench.peers import NIXL, nixl_overlay
from kvferry_vllm_bench.rows import Row, as_json, table

CHECKOUT = Path(__file__).resolve().parents[3]
ROWS = ("concurrent", "sequential", "connector", "step")
ROUNDS = 31
COMMAND = CHECKOUT / "target" / "dist" / "kvferry"
# Each server polls on one core, and the driver needs one too: see `ON_BUSY_CORES` of the end-to-end test.
KVFERRY = {"KVFERRY_SILENCE_MS": "20000"}
# Each flow with the peer that it was made for.
PEERS: dict[Flow, Connector] = {"concurrent": "MooncakeConnector", "sequential": "NixlConnector"}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench/vllm/run", description=__doc__)
    parser.add_argument("--only", action="append", choices=ROWS, help="only these rows; can be repeated")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"15 or more to judge by (default: {ROUNDS})")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--wheel", type=Path, help="the kvferry wheel (default: the newest in target/wheels)")
    parser.add_argument("--command", type=Path, default=COMMAND, help="the kvferry command, for the Rust figure")
    return parser.parse_args()


class Bench:
    """The servers and folders of a run."""

    def __init__(self, stack: ExitStack, environment: Environment, wheel: Path, progress: Progress) -> None:
        self._stack = stack
        self._progress = progress
        self._environment = environment
        scratch = tempfile.TemporaryDirectory(prefix="kvferry-bench-", ignore_cleanup_errors=True)
        self._folder = Path(stack.enter_context(scratch))
        self.site = kvferry_overlay(environment, wheel, self._folder / "site", self._progress.say)

    def _site(self, connector: Connector) -> Path:
        if connector == "KVFerryConnector":
            return self.site
        overlay = mooncake_overlay if connector == "MooncakeConnector" else nixl_overlay
        return overlay(self._environment, self._progress.say)

    def start(self, connector: Connector) -> Pair:
        """The prefill and the decode of a connector, not yet ready."""
        env = KVFERRY if connector == "KVFerryConnector" else {}
        setup = Setup(self._environment, self._site(connector), self._folder, self._folder, env)

        def one(role: Role) -> Instance:
            name = f"{connector}-{role}"
            instance = Instance(name=name, role=role, setup=setup, connector=connector, recorded=False)
            self._stack.callback(instance.release)
            instance.start()
            return instance

        self._progress.say(f"starting vLLM twice with {connector}")
        return Pair(connector, one("prefill"), one("decode"))

    def first_tokens(self, flows: list[Flow], rounds: int) -> list[Row]:
        ours = self.start("KVFerryConnector")
        rows = []
        for at, flow in enumerate(flows):
            peer = self.start(PEERS[flow])
            pairs = (ours, peer) if at == 0 else (peer,)
            self._progress.ready(*(server for pair in pairs for server in (pair.prefill, pair.decode)))
            if at > 0:
                ours.resume()
            rows += first_token.measure(flow, ours, peer, rounds, Prompts(seed=at), self._progress.say)
            # Servers take 2 GB each.
            peer.prefill.kill()
            peer.decode.kill()
        for server in (ours.prefill, ours.decode):
            server.kill()
        return rows

    def spans(self, rounds: int) -> list[Row]:
        names: tuple[Connector, ...] = ("KVFerryConnector", "MooncakeConnector", "NixlConnector")
        with ExitStack() as stack:
            sites = {name: self._site(name) for name in names}
            every = spans.start(stack, self._environment, sites, self._folder, self._progress.say)
            return spans.measure(every, rounds, Prompts(seed=3), self._progress.say)

    def steps(self, command: Path) -> list[Row]:
        return steps.measure(self._environment, self.site, command, self._folder, self._progress.say)


def _interrupt(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


def main() -> int:
    options = arguments()
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, _interrupt)
    wheel = options.wheel or newest_wheel(CHECKOUT)
    if wheel is None:
        sys.exit("no wheel in target/wheels: run `make wheel` first")
    wanted = options.only or ROWS
    rows: list[Row] = []
    progress = Progress()
    with ExitStack() as stack:
        bench = Bench(stack, stack.enter_context(vllm_environment(progress.say)), wheel, progress)
        flows: list[Flow] = [flow for flow in PEERS if flow in wanted]
        if flows:
            rows += bench.first_tokens(flows, options.rounds)
        if "connector" in wanted:
            rows += bench.spans(options.rounds)
        if "step" in wanted:
            rows += bench.steps(options.command)
    short = [row for row in rows if row.ok is False]
    versions = {"vllm": VLLM, "mooncake": MOONCAKE, "nixl": NIXL}
    if options.json:
        report = {"schema": "kvferry.bench-vllm/1", **versions, "ok": not short, "rows": as_json(rows)}
        print(json.dumps(report, indent=2))
    else:
        about = f"vLLM {VLLM} on the CPU, Mooncake {MOONCAKE}, NIXL {NIXL}"
        judged = sum(row.ok is not None for row in rows)
        print(f"{about}\nmedians [95 % interval of a difference, else quartiles]\n\n{table(rows)}\n")
        print(f"{len(short)} of {judged} figures fall short" if short else f"all {judged} figures are reached")
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
