"""A stock Mooncake engine that runs commands, one line of JSON each."""

import ctypes
import json
import sys
import threading
import time

from mooncake.engine import TransferEngine, TransferNotify, TransferOpcode

CYCLE = bytes(range(251))


def pattern(seed, length):
    seed %= 251
    return ((CYCLE[seed:] + CYCLE[:seed]) * (length // 251 + 1))[:length]


class Peer:
    def __init__(self):
        self.engine = TransferEngine()
        self.memory = {}

    def start(self, host):
        assert self.engine.initialize(host, "P2PHANDSHAKE", "tcp", "") == 0
        return f"{host}:{self.engine.get_rpc_port()}"

    def allocate(self, length, seed, register=True):
        buffer = ctypes.create_string_buffer(pattern(seed, length), length)
        address = ctypes.addressof(buffer)
        self.memory[address] = buffer
        if register:
            assert self.engine.register_memory(address, length) == 0
        return address

    def unregister(self, address):
        return self.engine.unregister_memory(address)

    def holds(self, address, seed, length):
        """Whether memory holds a pattern."""
        return ctypes.string_at(address, length) == pattern(seed, length)

    def holds_turned(self, address, seed, block, blocks):
        """Whether memory holds a pattern whose blocks are in reverse order."""
        whole = pattern(seed, block * blocks)
        parts = [whole[i * block : (i + 1) * block] for i in reversed(range(blocks))]
        return ctypes.string_at(address, block * blocks) == b"".join(parts)

    def move(self, target, opcode, local, remote, length, hint=None):
        call = getattr(self.engine, f"transfer_sync_{opcode}")
        start = time.perf_counter()
        code = call(target, local, remote, length)
        return code, time.perf_counter() - start

    def batch(self, target, opcode, local, remote, block, blocks, threads=1, notify=None, rounds=1):
        """Moves blocks to or from the place that is theirs in reverse order."""
        lists = [
            [local + i * block for i in range(blocks)],
            [remote + (blocks - 1 - i) * block for i in range(blocks)],
            [block] * blocks,
        ]
        codes, times = [], []

        def run():
            for _ in range(rounds):
                start = time.perf_counter()
                if notify:
                    opcodes = {"write": TransferOpcode.Write, "read": TransferOpcode.Read}
                    codes.append(
                        self.engine.batch_transfer_sync(
                            target, *lists, opcodes[opcode], TransferNotify(*notify)
                        )
                    )
                else:
                    codes.append(
                        getattr(self.engine, f"batch_transfer_sync_{opcode}")(target, *lists)
                    )
                times.append(time.perf_counter() - start)

        workers = [threading.Thread(target=run) for _ in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return codes, sorted(times)[len(times) // 2]

    def probe(self, target):
        return self.engine.send_probe(target)

    def first_address(self, target):
        return self.engine.get_first_buffer_address(target)

    def notifies(self):
        return [[n.name, n.msg] for n in self.engine.get_notifies()]


def main():
    peer = Peer()
    for line in sys.stdin:
        name, arguments = json.loads(line)
        print(json.dumps(getattr(peer, name)(**arguments)), flush=True)


main()
