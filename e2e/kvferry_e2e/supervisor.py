"""Runs one server and kills all its processes when the test ends, even if the test is killed.

    python supervisor.py LOG COMMAND...

Starts COMMAND in its own process group with its output in LOG and prints the group's id. Then waits
for the end of its standard input, a pipe from the test, which the kernel closes when the test ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def _die_with_supervisor() -> None:
    """In the child, before exec: the server dies at once if this process is killed."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def group_members(group: int) -> list[int]:
    """The live processes of a group (zombies are dead)."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rsplit(")", 1)[1].split()
            if int(fields[2]) == group and fields[0] != "Z":
                members.append(int(stat.parent.name))
    return members


def _shared_memory(group: int) -> set[str]:
    """Files in /dev/shm that the group has mapped. A killed server does not unlink them.

    Compares inodes: the name in the mapping of a semaphore is not the file's name.
    """
    mapped = set()
    for pid in group_members(group):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                fields = line.split(maxsplit=5)
                if len(fields) == 6 and fields[5].startswith("/dev/shm/"):
                    mapped.add(int(fields[4]))
    files = [*Path("/dev/shm").glob("psm_*"), *Path("/dev/shm").glob("sem.mp-*")]
    found = set()
    for file in files:
        with contextlib.suppress(OSError):
            if file.stat().st_ino in mapped:
                found.add(str(file))
    return found


def main(log: str, command: list[str]) -> int:
    with open(log, "ab") as out:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_supervisor,
        )
    print(child.pid, flush=True)
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    leftover: set[str] = set()
    while child.poll() is None:
        leftover |= _shared_memory(child.pid)
        readable, _, _ = select.select([sys.stdin], [], [], 1.0)
        if readable and not os.read(sys.stdin.fileno(), 1):
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    for path in leftover:
        Path(path).unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
