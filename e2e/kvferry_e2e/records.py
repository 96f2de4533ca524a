"""Reads the files of the recorder (plug/recorder.py) in an instance's worker."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Records:
    folder: Path

    def events(self) -> list[dict[str, Any]]:
        """All complete lines; the last line of a killed process may be incomplete."""
        events = []
        for path in sorted(self.folder.glob("engine-*.jsonl")):
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    events.append(json.loads(line))
                except ValueError:
                    continue
        return sorted(events, key=lambda event: event["at"])

    def engines(self) -> list[dict[str, Any]]:
        return [event for event in self.events() if event["event"] == "engine"]

    def writes(self) -> list[dict[str, Any]]:
        """Finished calls of `batch_transfer_sync_write`, oldest first."""
        return [
            e for e in self.events() if e["event"] in ("call", "raised") and e["call"] == "batch_transfer_sync_write"
        ]

    def last_write(self) -> str:
        """The result of the latest write, as text."""
        writes = self.writes()
        if not writes:
            return "nothing: it has not written"
        write = writes[-1]
        return " ".join(str(write[key]) for key in ("result", "why", "error") if key in write)

    def writes_begun(self) -> int:
        return sum(e["event"] == "begin" for e in self.events())

    def bytes_written(self) -> int:
        return sum(e["bytes"] for e in self.writes() if e.get("result") == 0)

    def session(self) -> str:
        """The address of the engine of this instance."""
        ports = [e["result"] for e in self.events() if e["event"] == "call" and e["call"] == "get_rpc_port"]
        return f"127.0.0.1:{ports[-1]}"

    def divert(self, session: str, to: str) -> None:
        """Redirects this instance's later writes from `session` to `to`."""
        partial = self.folder / "divert.partial"
        partial.write_text(f"{session} {to}\n")
        partial.rename(self.folder / "divert")

    def divert_nothing(self) -> None:
        (self.folder / "divert").unlink(missing_ok=True)
