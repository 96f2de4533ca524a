"""What a long run is doing, on standard error: standard output is for its report."""

from __future__ import annotations

import sys
import time

from kvferry_e2e.server import Server

_SAY_EVERY_S = 10
# Several servers that import vLLM at once, on two cores.
_READY_WITHIN_S = 600


class Progress:
    def __init__(self) -> None:
        self._began = time.monotonic()

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self._began:6.1f} s] {text}", file=sys.stderr, flush=True)

    def ready(self, *servers: Server) -> None:
        """Waits until all serve. Raises `RuntimeError` if one dies, or takes too long."""
        began = said = time.monotonic()
        waiting = list(servers)
        while waiting:
            for server in list(waiting):
                if server.is_ready():
                    self.say(f"{server.name} is ready")
                    waiting.remove(server)
                elif not server.alive() or time.monotonic() - began > _READY_WITHIN_S:
                    raise RuntimeError(f"{server.name} does not start; its log ends:\n{server.log_tail()}")
            if waiting and time.monotonic() - said > _SAY_EVERY_S:
                said = time.monotonic()
                self.say(f"waiting for {', '.join(server.name for server in waiting)}")
            time.sleep(0.5)
