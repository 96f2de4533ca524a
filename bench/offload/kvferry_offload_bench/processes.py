"""What the processes of a server have used: processor time and memory."""

from __future__ import annotations

import os
import time
from pathlib import Path

from kvferry_e2e.instance import Instance

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
# No processor time in this many readings, one per interval: what runs in the background has ended.
_IDLE_READINGS = 3
_INTERVAL_S = 0.1
_IDLE_WITHIN_S = 30.0


def cpu_seconds(server: Instance) -> float:
    """User and system time of all threads of all processes of a server, and of children that have ended."""
    ticks = 0
    for pid in server.members():
        # utime, stime, cutime, cstime.
        ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:15]))
    return ticks * _TICK_S


def cpu_seconds_when_idle(server: Instance) -> float:
    """Waits until the server does nothing: blocks are stored after the answer."""
    deadline = time.monotonic() + _IDLE_WITHIN_S
    last, idle = cpu_seconds(server), 0
    while idle < _IDLE_READINGS:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{server.name} is not idle {_IDLE_WITHIN_S:.0f} s after its last request")
        time.sleep(_INTERVAL_S)
        now = cpu_seconds(server)
        # A tick may be a timer's.
        idle = idle + 1 if now - last <= _TICK_S else 0
        last = now
    return last


def memory_bytes(server: Instance) -> int:
    """Resident memory of all processes of a server, without pages of files."""
    total = 0
    for pid in server.members():
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in ("RssAnon", "RssShmem"):
                total += int(value.split()[0]) * 1024
    return total
