"""Measures processor time and wake-ups of Python processes with nothing to do.

Each is a process of its own. It works once, so that its sessions are open and its threads have run. Then all have
nothing to do at the same time, and each counts its own processor time and the times that its threads slept, a wake-up
each; the main thread sleeps once. `kvferry bench idle` does the same with processes without Python.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from typing import IO, Any

import kvferry

PERCENT_MAX = 0.02
# What each works with stands in `subjects.py`.
SUBJECTS = {
    "halves": "kvferry.connector, scheduler half and worker half",
    "vllm": "kvferry.vllm, an engine that prefills and one that decodes",
    "nixl": "kvferry.nixl, an agent with a listener and a peer",
    "trtllm": "kvferry.trtllm, a store",
    "prefill": "kvferry.trtllm, a store, and an engine that decodes its prompts",
    "decode": "kvferry.trtllm, a store, and an engine that prefills for it",
}


class Process:
    """A subject. It answers a line with a line, and ends with its input."""

    def __init__(self, subject: str, directory: str, *arguments: str) -> None:
        command = [sys.executable, "-m", "kvferry_idle_bench.subjects", subject, f"{directory}/{subject}", *arguments]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TLLM_KVFERRY_")}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
        self.name = subject

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def tell(self, *words: Any) -> None:
        asks: IO[str] | None = self._process.stdin
        assert asks is not None
        asks.write(json.dumps(words) + "\n")
        asks.flush()

    def hear(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} has ended with status {self._process.wait()}")
        return json.loads(line)


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench/idle/run", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="time with nothing to do (default: %(default)s)")
    parser.add_argument("--check", action="store_true", help=f"fail if one uses more than {PERCENT_MAX} %% of a core")
    options = parser.parse_args()
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        measured = [stack.enter_context(Process(it, directory)) for it in SUBJECTS if it != "decode"]
        hellos = {it.name: it.hear() for it in measured}
        decode = stack.enter_context(Process("decode", directory, hellos["prefill"]))
        decode.hear()
        measured.append(decode)
        prefill = next(it for it in measured if it.name == "prefill")
        for it in (prefill, decode):
            it.tell("work")
            it.hear()
        for it in measured:
            it.tell("idle", options.seconds)
        found = {it.name: it.hear() for it in measured}
    python = f"{platform.python_implementation()} {platform.python_version()}"
    print(f"kvferry {kvferry.__version__}, {python}, {options.seconds:.0f} s with nothing to do")
    width = max(map(len, SUBJECTS.values()))
    print(f"{'':{width}}  % of a core  wake-ups/s  threads")
    is_over = False
    for name, what in SUBJECTS.items():
        percent, wakes, threads = found[name]
        over = f"  OVER {PERCENT_MAX}" if percent > PERCENT_MAX else ""
        is_over |= percent > PERCENT_MAX
        print(f"{what:{width}}  {percent:11.4f}  {wakes:10.1f}  {threads:7}{over}")
    return int(options.check and is_over)


if __name__ == "__main__":
    sys.exit(main())
