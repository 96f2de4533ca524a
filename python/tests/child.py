"""The other process of a test: runs the statements that `kit.Child` sends, one JSON line each, and answers likewise.

Needs nothing but the standard library, so that it also runs in the environment of a stock Mooncake.
"""

import ast
import base64
import ctypes
import json
import mmap
import os
import sys
import time


class Memory:
    """Memory that no allocator moves or reuses; page-aligned, zeroed."""

    def __init__(self, nbytes: int) -> None:
        self.map = mmap.mmap(-1, nbytes)
        self.addr = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.nbytes = nbytes

    def __getitem__(self, at: slice) -> bytes:
        return self.map[at]

    def __setitem__(self, at: slice, data: bytes) -> None:
        self.map[at] = data


def left() -> tuple[int, int]:
    """The open descriptors and the threads of this process, once it has one thread or after a minute.

    The kernel lists a thread for a moment after it was joined.
    """
    until = time.monotonic() + 60
    while (threads := len(os.listdir("/proc/self/task"))) > 1 and time.monotonic() < until:
        time.sleep(0.01)
    return len(os.listdir("/proc/self/fd")), threads


def execute(code: str, names: dict) -> object:
    """Runs statements and returns the value of the last one if it is an expression."""
    tree = ast.parse(code)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<test>", "exec"), names)
    return None if last is None else eval(compile(ast.Expression(last.value), "<test>", "eval"), names)


def main() -> None:
    # Statements may print: keep stdout for the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def begun() -> None:
        """Tells the test that statements have come so far: a signal before that may end this process."""
        print(json.dumps({"begun": True}), file=answers)

    names: dict = {"Memory": Memory, "begun": begun, "left": left}
    print(json.dumps({"value": repr(os.getpid())}), file=answers)
    for line in sys.stdin:
        began = time.monotonic()
        try:
            value = execute(json.loads(line), names)
            is_bytes = isinstance(value, bytes)
            answer = {"bytes": base64.b64encode(value).decode()} if is_bytes else {"value": repr(value)}
        except BaseException as error:
            answer = {"error": type(error).__name__, "message": str(error)}
            if isinstance(error, SystemExit):
                raise
        print(json.dumps(answer | {"seconds": time.monotonic() - began}), file=answers)


if __name__ == "__main__":
    main()
