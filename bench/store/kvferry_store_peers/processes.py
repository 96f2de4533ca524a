"""The environments of the stores, and a process in each that takes turns."""

from __future__ import annotations

import dataclasses
import json
import os
import select
import subprocess
import time
from pathlib import Path

from kvferry_e2e.environment import Environment, package_overlay
from kvferry_e2e.steps import Say

from kvferry_store_peers.turns import Answer, Asked, Figure

LMCACHE = "0.5.6"
# What LMCache's disk back-end imports and vLLM's environment lacks. It needs torch, but no GPU.
LMCACHE_PACKAGES = (
    f"lmcache=={LMCACHE}",
    "aiofile==3.12.3",
    "aiofiles==25.1.0",
    "caio==0.12.10",
    "sortedcontainers==2.4.0",
    "xxhash==4.1.0",
)
# A turn of a peer that hangs.
TURN_S = 600.0
HERE = Path(__file__).resolve()
# LMCache reports usage statistics by default; this turns them off.
QUIET = {
    "LMCACHE_TRACK_USAGE": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "LMCACHE_LOG_LEVEL": "ERROR",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def lmcache_overlay(environment: Environment, say: Say) -> Path:
    return package_overlay(environment, "LMCache", LMCACHE, LMCACHE_PACKAGES, say)


class TurnTaker:
    """A process of a store, started with its first turn, and again after a failure."""

    def __init__(self, name: str, environment: Environment, site: Path | None, log: Path) -> None:
        self.name = name
        paths = [HERE.parents[1], HERE.parents[3] / "e2e", *([site] if site else [])]
        self._env = os.environ | QUIET | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
        self._command = [str(environment.python), "-m", "kvferry_store_peers.turns", name]
        self._log = log
        self._process: subprocess.Popen[str] | None = None

    def take(self, asked: Asked) -> Answer:
        process = self._process or self._start()
        assert process.stdin
        try:
            print(json.dumps(dataclasses.asdict(asked)), file=process.stdin, flush=True)
            line = self._line(process)
        except OSError as why:
            line, reason = "", str(why)
        else:
            reason = f"no answer within {TURN_S:.0f} s" if process.poll() is None else "the process ended"
        if not line:
            self.stop()
            return Answer(failed=f"{reason}: see {self._log}")
        answer = Answer(**json.loads(line))
        answer.figures = {what: Figure(**figure) for what, figure in answer.figures.items()}  # type: ignore[arg-type]
        if answer.failed:
            self.stop()
        return answer

    def stop(self) -> None:
        if self._process:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _start(self) -> subprocess.Popen[str]:
        with open(self._log, "a", encoding="utf-8") as log:
            self._process = subprocess.Popen(
                self._command, env=self._env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        return self._process

    @staticmethod
    def _line(process: subprocess.Popen[str]) -> str:
        """An answer; empty if there is none in time. Answers are shorter than what a pipe takes at once."""
        assert process.stdout
        give_up = time.monotonic() + TURN_S
        while time.monotonic() < give_up:
            if select.select([process.stdout], [], [], 1.0)[0]:
                return process.stdout.readline()
        return ""
