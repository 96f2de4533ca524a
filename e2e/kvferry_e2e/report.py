"""Prints each check when it ends, and the table of all at the end."""

from __future__ import annotations

import contextlib
import json
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path


class CheckError(AssertionError):
    """A check failed."""


class SkippedError(Exception):
    """The check needs what this machine does not have."""


def ensure(condition: object, message: str) -> None:
    if not condition:
        raise CheckError(message)


@dataclass
class Note:
    """Text beside the result of a running check."""

    text: str = ""


@dataclass
class _Line:
    name: str
    outcome: str
    seconds: float
    note: str


@dataclass
class Report:
    lines: list[_Line] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    @contextlib.contextmanager
    def check(self, name: str) -> Iterator[Note]:
        """One line of the table. A failure is recorded and does not end the run: the later checks
        still give information.
        """
        note = Note()
        start = time.monotonic()
        try:
            yield note
        except SkippedError as why:
            self.skip(name, str(why))
        except Exception as error:
            if not isinstance(error, CheckError):
                traceback.print_exc()
            text = f"{type(error).__name__}: {error}" if not isinstance(error, CheckError) else str(error)
            self._add(_Line(name, "FAILED", time.monotonic() - start, text))
        else:
            self._add(_Line(name, "ok", time.monotonic() - start, note.text))

    def skip(self, name: str, why: str) -> None:
        self._add(_Line(name, "SKIPPED", 0.0, why))

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began:6.1f} s] {text}", flush=True)

    def take(self, lines: Path) -> None:
        """The checks that another process wrote."""
        for line in json.loads(lines.read_text()):
            self._add(_Line(**line))

    def write(self, lines: Path) -> None:
        lines.write_text(json.dumps([asdict(line) for line in self.lines]))

    def _add(self, line: _Line) -> None:
        self.lines.append(line)
        self.say(_row(line, 0))

    def finish(self) -> int:
        """Prints the table and returns the exit status."""
        count = {o: sum(line.outcome == o for line in self.lines) for o in ("ok", "FAILED", "SKIPPED")}
        width = max((len(line.name) for line in self.lines), default=0)
        print()
        for line in self.lines:
            print(_row(line, width))
        print(f"\nin {time.monotonic() - self.began:.0f} s")
        if count["SKIPPED"]:
            print(f"!!! {count['SKIPPED']} SKIPPED !!!")
        print(f"{count['ok']} passed, {count['FAILED']} failed", flush=True)
        return 1 if count["FAILED"] or not count["ok"] else 0


def _row(line: _Line, width: int) -> str:
    row = f"{line.outcome:7} {line.name:{width}} {line.seconds:6.1f} s"
    return f"{row}  {line.note}" if line.note else row
