"""The Python side of `kvferry bench transfers`: commands on standard input, one JSON value per line, one answer each."""

import ctypes
import gc
import json
import mmap
import sys
import time

import kvferry

PR_SET_PDEATHSIG, SIGKILL = 1, 9


class Side:
    def __init__(self):
        self.agent = kvferry.Agent("bench-python")
        self.region = self.peer = self.map = None
        self.tables = []

    def open(self, address, nbytes, transport):
        self.peer = self.agent.peer(address)
        self.map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.map[:] = bytes(nbytes)  # every page is there
        self.region = self.agent.register(self.map)
        chosen = self.peer.connect().transport
        if transport not in ("auto", chosen):
            raise RuntimeError(f"the agents chose {chosen}, not {transport}")

    def plan(self, base, tables):
        """What an engine has at hand: lists of addresses."""
        self.tables = [
            ([self.region.addr + at for at in here], [base + at for at in there], lengths)
            for here, there, lengths in tables
        ]

    def call(self, op, calls, limit):
        """Seconds of each call; a call moves all tables."""
        move = self.peer.write if op == "write" else self.peer.read
        meant = sum(sum(lengths) for _, _, lengths in self.tables)
        times = []
        first = time.perf_counter()
        while len(times) < calls and (len(times) < 2 or time.perf_counter() - first < limit):
            began = time.perf_counter()
            moved = sum([move(*table).nbytes for table in self.tables])
            times.append(time.perf_counter() - began)
            assert moved == meant
        return times

    def load(self, path):
        with open(path, "rb") as file:
            data = file.read()
        self.map[: len(data)] = data

    def store(self, path, nbytes):
        with open(path, "wb") as file:
            file.write(self.map[:nbytes])


def main():
    # Ends with the bench, even if that is killed.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL)
    side = Side()
    gc.disable()
    print(json.dumps({"Ok": kvferry.__version__}), flush=True)
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            answer = {"Ok": getattr(side, name)(*arguments)}
        except Exception as error:
            answer = {"Err": {"Failed": f"Python: {type(error).__name__}: {error}"}}
        print(json.dumps(answer), flush=True)


main()
