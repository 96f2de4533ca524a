"""`python -m kvferry_peers ENGINE ROLE`: commands on standard input, one JSON value per line, one answer each."""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import sys
from typing import Any

PR_SET_PDEATHSIG, SIGKILL = 1, 9
ENGINES = ("mooncake", "nixl", "nixl-no-progress-thread", "kvferry-nixl", "nixl-file-aio", "nixl-file-uring")
COMMANDS = ("open", "connect", "plan", "fill", "poison", "check", "call", "call_unprepared", "post", "together", "run")


def engine(name: str, role: str) -> Any:
    # Only the one asked for: each brings libraries and threads of its own.
    if name == "mooncake":
        from kvferry_peers.mooncake_engine import MooncakeEngine

        return MooncakeEngine()
    if name.startswith("nixl-file-"):
        from kvferry_peers.nixl_files import NixlFiles

        return NixlFiles(name.removeprefix("nixl-file-"))
    from kvferry_peers.nixl_engine import NixlEngine

    if name == "kvferry-nixl":
        return NixlEngine(progress_thread=True, module="kvferry.nixl._api")
    # A target makes no calls, so a thread has to make progress for it.
    return NixlEngine(progress_thread=role == "target" or name == "nixl")


def answer(side: Any, line: str) -> dict[str, Any]:
    try:
        command, arguments = json.loads(line)
        if command not in COMMANDS:
            raise ValueError(f"there is no {command}")
        return {"Ok": getattr(side, command)(*arguments)}
    except Exception as error:
        return {"Err": {"Failed": f"{type(error).__name__}: {error}"}}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("role", choices=["target", "initiator"])
    asked = parser.parse_args()
    # Ends with the bench, even if that is killed.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL)
    # The engines' libraries may print: answers have a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    side = engine(asked.engine, asked.role)
    gc.disable()
    print(json.dumps({"Ok": None}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(side, line)), file=answers, flush=True)
    # Not the ordinary way out: with UCX's libraries loaded, it ends in a crash.
    os._exit(0)


if __name__ == "__main__":
    main()
