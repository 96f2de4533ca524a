"""Adds up what libFuzzer says about covered edges, by source file: `coverage.py FOLDER`.

The folder has the output of each target with `-print_coverage=1`, of a build without inlining, so that an edge belongs to
the function it was written in. An edge counts as reached if any target reaches it.
"""

import collections
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
# What decodes bytes of strangers, and the state machines behind it.
FILES = [
    "kvferry-proto/src/frame.rs",
    "kvferry-proto/src/message.rs",
    "kvferry-proto/src/admission.rs",
    "kvferry-proto/src/code.rs",
    "kvferry-proto/src/id.rs",
    "kvferry-proto/src/text.rs",
    "kvferry-proto/src/auth.rs",
    "kvferry-proto/src/session/mod.rs",
    "kvferry-proto/src/session/handshake.rs",
    "kvferry-proto/src/session/heartbeat.rs",
    "kvferry-proto/src/session/queues.rs",
    "kvferry-proto/src/session/streams.rs",
    "kvferry-proto/src/layout/mod.rs",
    "kvferry-proto/src/layout/check.rs",
    "kvferry-proto/src/layout/context.rs",
    "kvferry-proto/src/layout/spec.rs",
    "kvferry-proto/src/layout/wire.rs",
    "kvferry-proto/src/plan/ask.rs",
    "kvferry-proto/src/plan/copies.rs",
    "kvferry-proto/src/plan/kernel.rs",
    "kvferry-proto/src/plan/map.rs",
    "kvferry-proto/src/plan/topology.rs",
    "kvferry-proto/src/plan/topology/wire.rs",
    "kvferry/src/transport/mooncake/wire.rs",
    "kvferry/src/transport/mooncake/layout.rs",
    "kvferry/src/pack.rs",
    "kvferry/src/config.rs",
    "kvferry/src/transfer/batch.rs",
]
FUNCTION = re.compile(r"^(COVERED|UNCOVERED)_FUNC: hits: \d+ edges: (\d+)/(\d+) (.*) (\S+):(\d+)(?::\d+)?$")
DERIVED = re.compile(r" as core::(fmt::|cmp::|clone::Clone|hash::|default::Default)")
EDGE = re.compile(r"^  UNCOVERED_PC: (\S+?):(\d+)(?::\d+)?$")


class Function:
    """One function, generic ones once for all their types."""

    def __init__(self, name: str, total: int) -> None:
        self.name = name
        self.total = total
        self.missing: collections.Counter[int] | None = None

    def seen(self, missing: collections.Counter[int]) -> None:
        self.missing = missing if self.missing is None else self.missing & missing


def relative(path: str) -> str:
    try:
        return str(pathlib.Path(path).relative_to(ROOT / "crates"))
    except ValueError:
        return ""


def read(folder: pathlib.Path) -> dict[tuple[str, int, int], Function]:
    functions: dict[tuple[str, int, int], Function] = {}
    for log in sorted(folder.iterdir()):
        key, missing, covered = None, collections.Counter[int](), False

        def done() -> None:
            if key is not None and covered:
                functions[key].seen(missing)

        for line in log.read_text(errors="replace").splitlines():
            if match := FUNCTION.match(line):
                done()
                file = relative(match[5])
                key, missing, covered = None, collections.Counter(), match[1] == "COVERED"
                # Derived code stands at its attribute and says nothing about us.
                if file in FILES and not DERIVED.search(match[4]):
                    key = (file, int(match[6]), int(match[3]))
                    functions.setdefault(key, Function(match[4], int(match[3])))
            elif (match := EDGE.match(line)) and key is not None:
                missing[int(match[2])] += 1
        done()
    return functions


def main() -> None:
    functions = read(pathlib.Path(sys.argv[1]))
    print(f"{'edges the corpus reaches':45} {'reached':>8} {'of':>6} {'':>7}")
    all_reached = all_edges = 0
    untouched: list[str] = []
    for file in FILES:
        reached = edges = 0
        lines: collections.Counter[int] = collections.Counter()
        for (where, line, _), function in sorted(functions.items()):
            if where != file:
                continue
            if function.missing is None:
                untouched.append(f"{file}:{line} {function.name}")
                continue
            edges += function.total
            reached += function.total - function.missing.total()
            lines += function.missing
        if edges == 0:
            continue
        all_reached += reached
        all_edges += edges
        rest = ", ".join(str(line) for line in sorted(lines) if line) or "none"
        print(f"{file:45} {reached:8} {edges:6} {reached / edges:7.1%}   not at lines {rest}")
    print(f"{'all':45} {all_reached:8} {all_edges:6} {all_reached / all_edges:7.1%}")
    print(f"\n{len(untouched)} functions of these files are not called by any target:")
    for one in untouched:
        print(f"  {one}")


main()
