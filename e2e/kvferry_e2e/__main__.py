"""`e2e/run`: builds the environment, starts the instances, runs the phases, prints the table."""

from __future__ import annotations

import argparse
import fcntl
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

from kvferry_e2e.environment import vllm_environment
from kvferry_e2e.instance import Instance, Role, Setup
from kvferry_e2e.overlay import kvferry_overlay, mooncake_overlay, newest_wheel
from kvferry_e2e.pair import Pair
from kvferry_e2e.phases import correctness, corruption, disconnects, faults
from kvferry_e2e.prompts import Prompts
from kvferry_e2e.report import Report

CHECKOUT = Path(__file__).resolve().parents[2]
CHECKSUMS_ON = {"KVFERRY_CHECKSUM": "on"}
# Copies within one host bypass the relay and the peer.
OVER_TCP = {"KVFERRY_TRANSPORTS": "tcp,mooncake"}
# vLLM binds each server to one core and polls there. Linux 6.18 keeps other threads of that core waiting
# for up to 3.6 s, measured, which is longer than the 3 s after which a peer counts as silent. No check
# here is about silence: the peers that die are killed, and their connections are reset.
ON_BUSY_CORES = {"KVFERRY_SILENCE_MS": "20000"}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="e2e/run", description=__doc__)
    parser.add_argument(
        "--engine",
        choices=("kvferry", "mooncake"),
        default="kvferry",
        help="the implementation of mooncake.engine (mooncake: the stock engine, as a baseline)",
    )
    parser.add_argument(
        "--wheel",
        type=Path,
        help="the kvferry wheel to test (default: the newest in target/wheels)",
    )
    parser.add_argument("--build-only", action="store_true", help="build the vLLM environment and stop")
    return parser.parse_args()


class Run:
    """The instances of one run. `close` ends them all."""

    def __init__(self, report: Report, setup: Setup) -> None:
        self.report = report
        self.setup = setup
        self.instances: list[Instance] = []

    def start(self, name: str, role: Role, *, caching: bool, like: Instance | None = None, **env: str) -> Instance:
        """`like`: a dead instance whose ports the new one reuses, as a restarted server does."""
        instance = Instance(name, role, self.setup, caching, env)
        if like is not None:
            instance.port, instance.bootstrap = like.port, like.bootstrap
        self.instances.append(instance)
        return instance.start()

    def ready(self, *instances: Instance) -> None:
        for instance in instances:
            self.report.say(f"{instance.name} ready after {instance.wait_ready():.0f} s")

    def close(self) -> None:
        for instance in self.instances:
            instance.release()


def phases(run: Run, engine: str) -> None:
    """Starting an instance takes a minute. The faults need new instances in any case, so they run
    between the two big phases.
    """
    report, prompts = run.report, Prompts(seed=2024)
    prefill = run.start("prefill-1", "prefill", caching=False, KVFERRY_LOG="info")
    near = run.start("decode-0", "decode", caching=False)
    run.ready(prefill, near)
    if engine == "kvferry":
        correctness.concurrent(report, Pair(prefill, near), prompts, ", within the host")
        correctness.bytes_were_copied(report, prefill)
    near.kill()
    decode = run.start("decode-1", "decode", caching=False, **OVER_TCP)
    run.ready(decode)
    pair = Pair(prefill, decode)
    correctness.engines_are(report, pair, engine)
    correctness.one_by_one(report, pair, prompts)
    correctness.concurrent(report, pair, prompts)
    corruption.relay_alone(report, pair, prompts)
    corruption.damage_changes_tokens(report, pair, prompts)
    disconnects.run(report, pair, prompts)

    faults.decode_dies_while_written_to(report, pair, prompts)
    decode.kill()
    decode = run.start("decode-2", "decode", caching=True, like=decode, **CHECKSUMS_ON)
    run.ready(decode)
    pair = Pair(prefill, decode)
    with report.check("restarted decode: right tokens"):
        pair.check_handoff(prompts.fresh(700))

    lost = faults.prefill_dies(report, pair, prompts)
    prefill.kill()
    prefill = run.start("prefill-2", "prefill", caching=True, like=prefill, **CHECKSUMS_ON)
    run.ready(prefill)
    pair = Pair(prefill, decode)
    with report.check("restarted prefill: right tokens"):
        pair.check_handoff(prompts.fresh(700))
    lost.check(report)
    faults.decode_recovered(report, pair, prompts)

    correctness.engines_are(report, pair, engine)
    correctness.shared_prefixes(report, pair, prompts)
    correctness.shared_prefixes_concurrent(report, pair, prompts)
    correctness.whole_prompt_again(report, pair, prompts)
    if engine == "kvferry":
        corruption.damage_is_caught(report, pair, prompts)
    else:
        report.skip(
            "control: flipped bytes never used, checksums on",
            "Mooncake has no checksums",
        )
    faults.stops_when_asked(report, pair)
    faults.no_crash_in_logs(report, run.instances)


@contextmanager
def _only_one_run(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit(f"another run uses {folder}")
        yield


def _interrupt(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


def main() -> int:
    options = arguments()
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, _interrupt)
    report = Report()
    target = CHECKOUT / "target" / "e2e"
    with ExitStack() as stack:
        stack.enter_context(_only_one_run(target))
        venv = stack.enter_context(vllm_environment(report.say))
        if options.build_only:
            return 0
        folder = target / "run"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        if options.engine == "mooncake":
            site, engine_env = mooncake_overlay(venv, report.say), {}
        else:
            wheel = options.wheel or newest_wheel(CHECKOUT)
            if wheel is None:
                sys.exit("no wheel in target/wheels: run `make build` first")
            site = kvferry_overlay(venv, wheel, target / "site", report.say)
            engine_env = {"KVFERRY_SHIMS": "mooncake", **ON_BUSY_CORES}
        scratch = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="kvferry-e2e-", ignore_cleanup_errors=True))
        )
        run = Run(report, Setup(venv, site, folder, scratch, engine_env))
        stack.callback(run.close)
        report.say(f"logs of the servers: {folder.relative_to(CHECKOUT)}")
        with report.check("the run was completed"):
            phases(run, options.engine)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
