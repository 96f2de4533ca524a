"""A stock Mooncake engine with memory to write to, for `kvferry bench transfers --faults --stock`."""

import ctypes
import json
import sys

from mooncake.engine import TransferEngine

PR_SET_PDEATHSIG, SIGKILL = 1, 9

# Ends with the bench, even if that is killed.
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, SIGKILL)
nbytes = int(sys.argv[1])
engine = TransferEngine()
memory = ctypes.create_string_buffer(nbytes)
address = ctypes.addressof(memory)
if engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") or engine.register_memory(address, nbytes):
    sys.exit("the stock engine does not start")
session = f"127.0.0.1:{engine.get_rpc_port()}"
print(json.dumps({"Ok": {"session": session, "address": address}}), flush=True)
sys.stdin.read()
