"""Ctrl-C in every call that can block raises KeyboardInterrupt, and the process can go on."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import pytest
from conftest import Target
from kit import NEVER, Child, ChildError, eventually

BIG = 64 << 20
# Has the test know when Ctrl-C has come. Not for asyncio, which has its own handler only instead of Python's.
HANDLER = """
import signal
def interrupt(*_):
    begun()
    raise KeyboardInterrupt
signal.signal(signal.SIGINT, interrupt)
"""

SETUP = f"""
import kvferry, kvferry.mooncake, asyncio
agent = kvferry.Agent("here", listen="127.0.0.1:0", timeout={NEVER})
mine = Memory({BIG})
peer = agent.peer(%r)
engine = kvferry.mooncake.TransferEngine()
assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
session = peer.address
"""

# Those that after Ctrl-C wait for the peer's confirmation. All others end at the next check.
CONFIRMED = {
    "write": "peer.write(mine.addr, %d, len(mine.map))",
    "read": "peer.read(mine.addr, %d, len(mine.map))",
    "notify": "peer.notify(('name', b''))",
    "transfer_sync_write": "engine.transfer_sync_write(session, mine.addr, %d, len(mine.map))",
    "batch_transfer_sync_read": "engine.batch_transfer_sync_read(session, [mine.addr], [%d], [4096])",
}
CALLS = CONFIRMED | {
    "connect": "agent.peer(peer.address).connect()",
    "regions": "peer.regions()",
    "probe": "peer.probe()",
    "wait": "transfer = peer.write_async(mine.addr, %d, len(mine.map)); transfer.wait()",
    "wait_notification": "agent.wait_notification()",
    "wait_notification with a limit": f"agent.wait_notification({NEVER})",
    "get_batch_transfer_status": "engine.get_batch_transfer_status([identity])",
    "send_probe": "engine.send_probe(session)",
    "get_first_buffer_address": "engine.get_first_buffer_address(session)",
    # asyncio has its handler from here on.
    "await": "async def go(): begun(); await peer.write_async(mine.addr, %d, len(mine.map))\nasyncio.run(go())",
}


@pytest.mark.parametrize("name", CALLS)
def test_ctrl_c_ends(name: str, targets: Callable[..., Target], children: Callable[..., Child]) -> None:
    code = CALLS[name]
    target = targets(BIG)
    caller = children(SETUP % target.address, env={"KVFERRY_TIMEOUT_MS": str(int(NEVER * 1000))})
    if name != "connect":
        # Open a stream, so that bytes can be in flight.
        caller.run(f"peer.write(mine.addr, {target.base}, 64)")
        assert caller.run(f"engine.transfer_sync_write(session, mine.addr, {target.base}, 64)") == 0
    # Neither the peer nor a limit ends the call.
    target.child.send(signal.SIGSTOP)
    if "identity" in code:
        # More bytes than the kernels' buffers hold: the transfer runs until the peer continues.
        big = f"identity = engine.batch_transfer_async_write(session, [mine.addr], [{target.base}], [{BIG}]); identity"
        assert caller.run(big) > 0
    if name in CONFIRMED:
        caller.run(HANDLER)
    begins = "" if "begun()" in code else "begun()\n"
    caller.start(begins + (code % target.base if "%d" in code else code))
    caller.has_begun()
    time.sleep(0.4)
    caller.send(signal.SIGINT)
    if name in CONFIRMED:
        caller.has_begun()
        target.child.send(signal.SIGCONT)
    with pytest.raises(ChildError) as caught:
        caller.result()
    assert caught.value.kind == "KeyboardInterrupt", caught.value
    target.child.send(signal.SIGCONT)

    # The process and its objects still work.
    assert caller.run("1 + 1") == 2

    def works() -> bool:
        try:
            return bool(
                caller.run(f"agent.peer({target.address!r}).write(mine.addr, {target.base}, 4096).nbytes == 4096")
            )
        except ChildError:
            return False  # until the stopped peer has noticed the end of its old session

    eventually(works)
    assert caller.finish() == (0, "")


def test_ctrl_c_ends_calls_whose_peer_never_confirms(
    targets: Callable[..., Target], children: Callable[..., Child]
) -> None:
    """They end by the silence limit."""
    target = targets(BIG)
    callers = {}
    for name in CONFIRMED:
        env = {"KVFERRY_TIMEOUT_MS": str(int(NEVER * 1000)), "KVFERRY_SILENCE_MS": "10000"}
        caller = callers[name] = children(SETUP % target.address, env=env)
        caller.run(f"peer.write(mine.addr, {target.base}, 64)")
        assert caller.run(f"engine.transfer_sync_write(session, mine.addr, {target.base}, 64)") == 0
        caller.run(HANDLER)
    target.child.send(signal.SIGSTOP)
    for name, caller in callers.items():
        code = CONFIRMED[name]
        caller.start("begun()\n" + (code % target.base if "%d" in code else code))
    for caller in callers.values():
        caller.has_begun()
    time.sleep(0.4)
    for caller in callers.values():
        caller.send(signal.SIGINT)
        caller.has_begun()
    for name, caller in callers.items():
        with pytest.raises(ChildError) as caught:
            caller.result()
        assert caught.value.kind == "KeyboardInterrupt", (name, caught.value)
        assert caller.run("1 + 1") == 2
    target.child.send(signal.SIGCONT)


def test_another_signal_whose_handler_returns_does_not_end_a_call(
    targets: Callable[..., Target], children: Callable[..., Child]
) -> None:
    target = targets(BIG, silence=NEVER)
    caller = children(SETUP % target.address)
    caller.run("import signal; seen = []; signal.signal(signal.SIGUSR1, lambda *_: seen.append(1)); peer.connect()")
    target.child.send(signal.SIGSTOP)
    caller.start(f"begun(); peer.write(mine.addr, {target.base}, {BIG}).nbytes")
    caller.has_begun()
    time.sleep(0.2)
    caller.send(signal.SIGUSR1)
    time.sleep(0.2)
    target.child.send(signal.SIGCONT)
    assert caller.result() == BIG
    assert caller.run("seen") == [1]


def test_a_signal_handler_runs_while_the_call_goes_on(
    targets: Callable[..., Target], children: Callable[..., Child]
) -> None:
    target = targets(BIG, silence=NEVER)
    caller = children(SETUP % target.address)
    # The peer is stopped until the handler has run, and nothing else ends the call before.
    caller.run(
        f"import os, signal; seen = []; "
        f"signal.signal(signal.SIGALRM, lambda *_: (seen.append(1), os.kill({target.child.pid}, signal.SIGCONT)))"
    )
    caller.run("peer.connect()")
    target.child.send(signal.SIGSTOP)
    caller.start(
        f"""
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        peer.write(mine.addr, {target.base}, {BIG}).nbytes, seen
        """
    )
    assert caller.result() == (BIG, [1])


def test_ctrl_c_does_not_interrupt_calls_of_other_threads(
    targets: Callable[..., Target], children: Callable[..., Child]
) -> None:
    target = targets(BIG, silence=NEVER)
    caller = children(SETUP % target.address)
    caller.run("peer.connect()")
    target.child.send(signal.SIGSTOP)
    caller.start(
        f"""
        import threading, time
        outcome = []
        def work():
            try: outcome.append(peer.write(mine.addr, {target.base}, {BIG}).nbytes)
            except BaseException as e: outcome.append(type(e).__name__)
        thread = threading.Thread(target=work)
        try:
            thread.start()
            begun()
            time.sleep(600)
        except KeyboardInterrupt: pass
        """
    )
    caller.has_begun()
    time.sleep(0.3)
    caller.send(signal.SIGINT)
    caller.result()
    target.child.send(signal.SIGCONT)
    assert caller.run("thread.join(); outcome") == [BIG]
