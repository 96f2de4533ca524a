"""Runs one long command with its output in a log and prints its progress every 20 s."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

Say = Callable[[str], None]
_SAY_EVERY_S = 20


def run_step(name: str, command: Sequence[str], log: Path, say: Say) -> None:
    start = said = time.monotonic()
    foreign = ("PYTHONPATH", "VIRTUAL_ENV")
    env = {k: v for k, v in os.environ.items() if k not in foreign} | {"HF_HUB_OFFLINE": "1"}
    with (
        open(log, "ab") as out,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=env) as process,
    ):
        try:
            while process.poll() is None:
                time.sleep(0.2)
                if time.monotonic() - said > _SAY_EVERY_S:
                    said = time.monotonic()
                    say(f"  {name} ... {said - start:.0f} s")
        finally:
            process.kill()
    if process.returncode != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        raise RuntimeError(f"{name} failed; {log} ends:\n{tail}")
    say(f"  {name}: {time.monotonic() - start:.0f} s")
