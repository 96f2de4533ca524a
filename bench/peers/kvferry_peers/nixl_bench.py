"""`bench/peers/run nixl`: kvferry's `nixl` beside NIXL, through Python, and what an idle agent costs.

The engines take turns within each cell. NIXL's processes are stopped while they do not have theirs: their threads poll,
and would take the processors from the others. NIXL counts with the better of two settings: as Python configures it, and
without a progress thread at the initiator.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

OURS = "kvferry-nixl"
ENGINES = (OURS, "nixl", "nixl-no-progress-thread")
SHAPES = ((4 << 10, 1024), (32 << 10, 256), (256 << 10, 256), (1 << 20, 64), (16 << 20, 16))
QUICK = ((4 << 10, 1024), (1 << 20, 64))
POSTED = (4 << 10, 1024)
POST_US = 150.0
IDLE = 0.005
# The lanes: for UCX, and for kvferry.
TRANSPORTS = {
    "tcp": {"UCX_TLS": "tcp", "KVFERRY_TRANSPORTS": "tcp"},
    "within the host": {"UCX_TLS": "posix,sysv,cma,self,tcp"},
}
SEED = 7
# Of one turn.
TURN_S = 0.25
CALLS = 40
IDLE_S = 4.0


class Side:
    """One process of an engine, driven as `kvferry_peers` says."""

    def __init__(self, engine: str, role: str, env: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvferry_peers", engine, role],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=env,
        )
        self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        answer = json.loads(self.process.stdout.readline() or '{"Err": "the process ended"}')
        if "Ok" not in answer:
            raise RuntimeError(str(answer))
        return answer["Ok"]

    def do(self, *command: Any) -> Any:
        assert self.process.stdin is not None
        print(json.dumps([command[0], command[1:]]), file=self.process.stdin, flush=True)
        return self._answer()

    def ticks(self) -> int:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return int(fields[11]) + int(fields[12])


class Couple:
    """Target and initiator of an engine."""

    def __init__(self, engine: str, env: dict[str, str], nbytes: int) -> None:
        self.engine = engine
        self.sides = [Side(engine, role, env) for role in ("target", "initiator")]
        self.target, self.initiator = self.sides
        opened = [side.do("open", nbytes) for side in self.sides]
        self.initiator.do("connect", opened[0])
        if engine != OURS:
            self._send(signal.SIGSTOP)

    def _send(self, number: signal.Signals) -> None:
        for side in self.sides:
            side.process.send_signal(number)

    def __enter__(self) -> Couple:
        if self.engine != OURS:
            self._send(signal.SIGCONT)
        return self

    def __exit__(self, *_: object) -> None:
        if self.engine != OURS:
            self._send(signal.SIGSTOP)

    def close(self) -> None:
        for side in self.sides:
            side.process.kill()
            side.process.wait()


def table(block: int, count: int, nbytes: int) -> tuple[list[int], list[int], list[int]]:
    """Blocks in another order here and there, so that no two neighbours merge."""
    chance = random.Random(SEED)
    places = range(nbytes // block)
    return (
        [at * block for at in chance.sample(places, count)],
        [at * block for at in chance.sample(places, count)],
        [block] * count,
    )


def checked(couple: Couple, op: str, rows: Any, nbytes: int) -> None:
    """One transfer, of which every byte is compared. RuntimeError if one differs."""
    here, there, lengths = rows
    source, sink = (couple.initiator, couple.target) if op == "write" else (couple.target, couple.initiator)
    source.do("fill", SEED, nbytes)
    sink.do("poison", nbytes)
    couple.initiator.do("call", 1, 1, 0.0)
    of, to = (here, there) if op == "write" else (there, here)
    wrong = sink.do("check", SEED, nbytes, list(zip(of, to, lengths, strict=True)))
    if wrong:
        raise RuntimeError(f"{couple.engine}: {wrong}")


def cell(
    couples: list[Couple], op: str, block: int, count: int, rounds: int, check: bool
) -> dict[str, dict[str, float]]:
    """For each way of posting and each engine, the median of bytes per second in GB."""
    nbytes = max(2 * block * count, 1 << 22)
    rows = table(block, count, nbytes)
    rates: dict[str, dict[str, list[float]]] = {"prepped": {}, "made for each call": {}}
    for couple in couples:
        with couple:
            couple.initiator.do("plan", op, [rows])
            if check:
                checked(couple, op, rows, nbytes)
    for _ in range(rounds):
        for couple in couples:
            with couple:
                for way, command in (("prepped", "call"), ("made for each call", "call_unprepared")):
                    # The first call of a turn wakes the processes.
                    times = couple.initiator.do(command, 1, CALLS, TURN_S)[1:]
                    rates[way].setdefault(couple.engine, []).extend(block * count / taken / 1e9 for taken in times)
    return {
        way: {engine: statistics.median(some) for engine, some in engines.items()} for way, engines in rates.items()
    }


def posting(couple: Couple) -> float:
    """Microseconds, the median, that a post of `POSTED` blocks takes its caller."""
    block, count = POSTED
    with couple:
        couple.initiator.do("plan", "write", [table(block, count, 2 * block * count)])
        times: list[float] = couple.initiator.do("post", 200)
    return 1e6 * statistics.median(times)


def idle(couple: Couple) -> float:
    """The share of a core that the target, which does nothing, uses."""
    with couple:
        before, began = couple.target.ticks(), time.monotonic()
        time.sleep(IDLE_S)
        used = couple.target.ticks() - before
        return used / os.sysconf("SC_CLK_TCK") / (time.monotonic() - began)


def site_of(wheel: Path, folder: Path) -> Path:
    """The wheel, unpacked for PYTHONPATH."""
    folder.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--upgrade", "--target", str(folder), str(wheel)], check=True)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench/peers/run nixl", description=__doc__)
    root = Path(__file__).resolve().parents[3] / "target"
    parser.add_argument("--wheel", type=Path, required=True, help="kvferry's wheel")
    parser.add_argument(
        "--rounds", type=int, default=5, help="turns of each engine in each cell (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="two shapes of batches and two rounds")
    parser.add_argument("--transport", choices=tuple(TRANSPORTS), help="only this one")
    parser.add_argument("--check", action="store_true", help="fail if kvferry is behind in a cell or short of a bound")
    parser.add_argument("--output", type=Path, default=root / "bench" / "nixl.json", help="(default: %(default)s)")
    asked = parser.parse_args()
    shapes, rounds = (QUICK, 2) if asked.quick else (SHAPES, asked.rounds)
    site = site_of(asked.wheel, root / "bench" / "nixl-site")
    common = {key: value for key, value in os.environ.items() if not key.startswith(("KVFERRY_", "UCX_", "NIXL_"))}
    path = f"{os.environ.get('PYTHONPATH', '')}:{site}"
    results: list[dict[str, Any]] = []
    behind: list[str] = []
    print(f"{'GB/s, median':46} {'kvferry':>8} {'NIXL':>8} {'no p. t.':>8} {'ratio':>6}")
    for transport, lanes in TRANSPORTS.items():
        if asked.transport not in (None, transport):
            continue
        env = {**common, **lanes, "KVFERRY_LISTEN": "127.0.0.1:0", "PYTHONPATH": path, "UCX_LOG_LEVEL": "error"}
        largest = max(2 * block * count for block, count in shapes)
        couples = [Couple(engine, env, largest) for engine in ENGINES]
        try:
            for block, count in shapes:
                for op in ("write", "read"):
                    for way, rates in cell(couples, op, block, count, rounds, True).items():
                        ours, theirs = rates[OURS], max(rates[engine] for engine in ENGINES[1:])
                        name = f"{transport}, {op}, {block >> 10} KiB x {count}, {way}"
                        print(
                            f"{name:46} " + " ".join(f"{rates[e]:8.2f}" for e in ENGINES) + f" {ours / theirs:6.2f}",
                            flush=True,
                        )
                        results.append({"cell": name, **rates})
                        if ours <= theirs:
                            behind.append(name)
            for couple in couples:
                took = posting(couple)
                name = f"{transport}, post of {POSTED[1]} prepped descriptors"
                print(f"{name}, {couple.engine}: {took:.0f} us", flush=True)
                results.append({"cell": name, couple.engine: took})
                if couple.engine == OURS and took > POST_US:
                    behind.append(name)
            for couple in couples:
                share = idle(couple)
                print(f"{transport}, idle target of {couple.engine}: {share:.1%} of a core", flush=True)
                results.append({"cell": f"{transport}, idle", couple.engine: share})
                if couple.engine == OURS and share > IDLE:
                    behind.append(f"{transport}, idle")
        finally:
            for couple in couples:
                couple.close()
    asked.output.parent.mkdir(parents=True, exist_ok=True)
    asked.output.write_text(json.dumps(results, indent=1))
    print(f"behind or short in {len(behind)} cells" + "".join(f"\n  {name}" for name in behind))
    return 1 if asked.check and behind else 0


if __name__ == "__main__":
    sys.exit(main())
