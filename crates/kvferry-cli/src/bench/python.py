"""The Python side of `kvferry bench`: commands on standard input, one JSON value per line, one answer each."""

import ctypes
import gc
import json
import sys
import time

import kvferry

PR_SET_PDEATHSIG, SIGKILL = 1, 9


class Side:
    def __init__(self):
        self.agent = kvferry.Agent("bench-python")
        self.region = self.peer = self.table = None

    def open(self, address, nbytes):
        self.peer = self.agent.peer(address)
        self.region = self.agent.allocate(nbytes)
        self.region.memory()[:] = bytes(nbytes)  # every page is there

    def plan(self, local, remote, length):
        """What an engine has at hand: lists of addresses."""
        local = [self.region.addr + offset for offset in local]
        self.table = local, remote, [length] * len(local)

    def call(self, op, calls):
        """Seconds of each call."""
        move = self.peer.write if op == "write" else self.peer.read
        local, remote, lengths = self.table
        times = []
        for _ in range(calls):
            began = time.perf_counter()
            moved = move(local, remote, lengths)
            times.append(time.perf_counter() - began)
            assert moved.nbytes == sum(lengths)
        return times

    def load(self, path):
        with open(path, "rb") as file:
            data = file.read()
        self.region.memory()[: len(data)] = data

    def store(self, path, nbytes):
        with open(path, "wb") as file:
            file.write(self.region.memory()[:nbytes])


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
