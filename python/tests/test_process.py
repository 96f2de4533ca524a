"""What kvferry does to its host process: exit, forks, threads, stderr."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
from conftest import Target
from kit import Child, clean_environment, eventually, run_python

START = """
import kvferry, os, sys, threading, time
agent = kvferry.Agent("here", listen="127.0.0.1:0")
other = kvferry.Agent("there", listen="127.0.0.1:0")
source, place = bytearray(1 << 20), bytearray(1 << 20)
local, remote = agent.register(source), other.register(place)
peer = agent.peer(other.address)
batch = kvferry.Batch()
batch.push(local, 0, remote.remote(), 0, 1 << 20)
peer.write(batch)
"""


@pytest.mark.parametrize(
    "end",
    [
        "",
        "sys.exit(0)",
        "transfer = peer.write_async(batch); other.wait_notification(0)",
        "for _ in range(200): peer.write_async(batch)",
        "threading.Thread(target=agent.wait_notification, daemon=True).start(); time.sleep(0.2)",
        "threading.Thread(target=lambda: [peer.write(batch) for _ in range(10**9)], daemon=True).start(); time.sleep(0.2)",
        "sys.keep = (agent, other, local, remote, peer, batch, peer.write_async(batch))",
        "import kvferry.mooncake as m; e = m.TransferEngine(); e.initialize('127.0.0.1', 'P2PHANDSHAKE', 'tcp', '')",
        "cycle = [agent, peer]; cycle.append(cycle)",
        "del agent, other",
        "agent.shutdown(); other.shutdown()",
        "other.shutdown()",
    ],
)
def test_the_interpreter_exits_cleanly_with_open_objects(end: str) -> None:
    ended = run_python(START + end)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


@pytest.mark.parametrize(
    "call",
    [
        "agent.wait_notification()",
        "[peer.write(batch) for _ in range(10**9)]",
        "[peer.write_async(batch).wait() for _ in range(10**9)]",
        "[peer.probe() for _ in range(10**9)]",
        "[agent.unregister(agent.register(bytearray(64))) for _ in range(10**9)]",
    ],
)
def test_an_atexit_callback_can_join_a_thread_that_is_inside_a_call(call: str) -> None:
    ended = run_python(
        # Callbacks run in reverse order: this one runs after kvferry's own, which `import kvferry` registers.
        "import atexit; atexit.register(lambda: (thread.join(), print('joined')))\n"
        + START
        + f"thread = threading.Thread(target=lambda: {call}, daemon=True); thread.start(); time.sleep(0.3)"
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "joined\n", "")


def test_the_interpreter_exits_cleanly_while_a_peer_is_silent(target: Target) -> None:
    target.child.send(signal.SIGSTOP)
    ended = run_python(
        f"""
        import kvferry, mmap, threading, time
        agent = kvferry.Agent(listen="127.0.0.1:0", silence=600)
        peer = agent.peer({target.address!r})
        transfer = peer.write_async(4096, {target.base}, 10)
        threading.Thread(target=peer.probe, daemon=True).start()
        threading.Thread(target=lambda: peer.write(4096, {target.base}, 10), daemon=True).start()
        time.sleep(0.3)
        """
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def test_ctrl_c_ends_a_program_as_usual(target: Target) -> None:
    target.child.send(signal.SIGSTOP)
    program = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"import kvferry; print('ready', flush=True);"
            f"kvferry.Agent(listen='127.0.0.1:0', timeout=600, silence=600).peer({target.address!r}).connect()",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environment(),
    )
    assert program.stdout is not None
    assert program.stdout.readline() == "ready\n"
    time.sleep(0.3)
    program.send_signal(signal.SIGINT)
    _, stderr = program.communicate(timeout=60)
    assert program.returncode == -signal.SIGINT
    assert stderr.rstrip().endswith("KeyboardInterrupt")
    assert "panicked" not in stderr


def test_after_a_fork_every_call_raises_forked_error_and_the_parent_goes_on(
    agent: object, children: Callable[..., Child]
) -> None:
    child = children(START + "import kvferry.mooncake; engine = kvferry.mooncake.TransferEngine()")
    child.run(
        "engine.initialize('127.0.0.1', 'P2PHANDSHAKE', 'tcp', ''); transfer = peer.write_async(batch); transfer.wait()"
    )
    calls = [
        "agent.register(bytearray(8))",
        "agent.register_batch([])",
        "agent.allocate(8)",
        "agent.unregister(local)",
        "agent.unregister_batch([local])",
        "agent.regions()",
        "agent.peer('127.0.0.1:1')",
        "agent.notifications()",
        "agent.wait_notification(1)",
        "agent.notification_fd()",
        "agent.stats()",
        "agent.shutdown()",
        "peer.write(batch)",
        "peer.read(batch)",
        "peer.write_async(batch)",
        "peer.read_async(batch)",
        "peer.notify(('a', b''))",
        "peer.connect()",
        "peer.regions()",
        "peer.region('kv')",
        "agent.region('kv')",
        "peer.probe()",
        "peer.transport",
        "peer.disconnect()",
        "transfer.poll()",
        "transfer.wait(1)",
        "transfer.cancel()",
        "transfer.done()",
        "transfer.fileno()",
    ]
    result = child.run(
        f"""
        import json
        r, w = os.pipe()
        pid = os.fork()
        if pid == 0:
            answers = {{}}
            for call in {calls!r}:
                try: answers[call] = repr(eval(call))
                except BaseException as e: answers[call] = type(e).__name__
            answers["mooncake"] = [engine.register_memory(4096, 10), engine.transfer_sync_write("127.0.0.1:1", 1, 1, 1),
                                engine.get_rpc_port(), engine.get_notifies(), engine.get_batch_transfer_status([1]),
                                engine.allocate_managed_buffer(10), engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""),
                                "forked" in engine.last_error()]
            fresh = kvferry.Agent(listen="127.0.0.1:0")
            answers["fresh"] = fresh.peer(other.address).write([local.addr], [remote.addr], [10]).nbytes
            fresh.shutdown()
            with agent: pass
            del agent, peer, transfer
            os.write(w, json.dumps(answers).encode())
            os._exit(0)
        os.close(w)
        text = b""
        while piece := os.read(r, 65536): text += piece
        os.close(r)
        json.loads(text), os.waitpid(pid, 0)[1]
        """
    )
    answers, status = result
    assert status == 0
    assert answers.pop("mooncake") == [-1, -1, 0, [], -1, 0, -1, True]
    assert answers.pop("fresh") == 10
    assert answers == dict.fromkeys(calls, "ForkedError")
    assert child.run("peer.write(batch).nbytes") == 1 << 20
    assert child.finish() == (0, "")


def test_a_forked_child_exits_as_usual(children: Callable[..., Child]) -> None:
    ended = run_python(
        START
        + """
        pid = os.fork()
        if pid == 0:
            sys.exit(7)
        status = os.waitpid(pid, 0)[1]
        print(os.waitstatus_to_exitcode(status), peer.write(batch).nbytes)
        """.replace("\n        ", "\n")
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "7 1048576\n", "")


def test_multiprocessing_by_fork_works_beside_an_agent() -> None:
    ended = run_python(
        START
        + """
import multiprocessing
def work(n):
    with kvferry.Agent(listen="127.0.0.1:0") as mine:
        region = mine.allocate(64)
        return mine.peer(other_address).write(region.addr, there, 64).nbytes + n
other_address, there = other.address, remote.addr
if __name__ == "__main__":
    with multiprocessing.get_context("fork").Pool(2) as pool:
        print(pool.map(work, range(4)))
"""
    )
    assert (ended.stdout, ended.stderr, ended.returncode) == ("[64, 65, 66, 67]\n", "", 0)


@pytest.mark.parametrize(
    "call",
    [
        "peer.write(mine.addr, {base}, len(mine.map))",
        "peer.read(mine.addr, {base}, len(mine.map))",
        "peer.probe(1)",
        "kvferry.Agent(listen='127.0.0.1:0').peer({address!r}).connect(1)",
        "agent.wait_notification(1)",
        "peer.write_async(mine.addr, {base}, len(mine.map)).wait(1)",
        "engine.transfer_sync_write({address!r}, mine.addr, {base}, len(mine.map))",
    ],
)
def test_other_threads_run_while_a_call_blocks(
    call: str, targets: Callable[..., Target], children: Callable[..., Child]
) -> None:
    target = targets(64 << 20)
    caller = children(
        f"""
        import kvferry, kvferry.mooncake, threading, time
        agent = kvferry.Agent(listen="127.0.0.1:0", silence=1.0)
        engine = kvferry.mooncake.TransferEngine()
        engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
        mine = Memory(64 << 20)
        peer = agent.peer({target.address!r})
        def connects():
            try: return bool(peer.connect())
            except kvferry.Error: return False
        def count():
            while not stop:
                counted.append(time.monotonic())
                time.sleep(0.001)
        """,
        env={"KVFERRY_SILENCE_MS": "1000"},
    )
    # On a busy machine it takes several calls to see it.
    for _ in range(20):
        # The silence of the last call has ended the session.
        target.child.send(signal.SIGCONT)
        eventually(lambda: caller.run("connects()"))
        target.child.send(signal.SIGSTOP)
        counted, took = caller.run(
            f"""
            counted, stop = [], False
            thread = threading.Thread(target=count)
            thread.start()
            began = time.monotonic()
            try: {call.format(base=target.base, address=target.address)}
            except kvferry.Error: pass
            ended = time.monotonic()
            stop = True
            thread.join()
            sum(began < at < ended for at in counted), ended - began
            """
        )
        if counted >= 5:
            break
    # The call blocks for that time at least, and a thread that runs each millisecond runs meanwhile: not as often on a
    # busy machine, but more often than the interpreter's own switches before and after the call let it.
    assert took > 0.3
    assert counted >= 5


def test_nothing_is_printed_without_kvferry_log() -> None:
    program = START + "agent.peer('127.0.0.1:1')\ntry: agent.peer('127.0.0.1:1').connect()\nexcept kvferry.Error: pass"
    assert run_python(program).stderr == ""
    assert run_python(program, env={"KVFERRY_LOG": ""}).stderr == ""
    assert run_python(program, env={"KVFERRY_LOG": "kvferry=oops,,=,"}).returncode == 0
    logged = run_python(program, env={"KVFERRY_LOG": "info"})
    assert logged.returncode == 0
    assert "agent started" in logged.stderr
    assert run_python(program, env={"KVFERRY_LOG": "info", "KVFERRY_SECRET": "hunter2"}).stderr.count("hunter2") == 0


def test_a_stderr_that_nothing_reads_keeps_no_program_from_starting_whatever_kvferry_log_says() -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as stderr:
        command = [sys.executable, "-c", "import kvferry"]
        environment = clean_environment() | {"KVFERRY_LOG": "kvferry=oops,trace"}
        assert subprocess.run(command, stderr=stderr, env=environment, timeout=60).returncode == 0


WAKES = """
def wakes():
    count = 0
    for task in os.listdir("/proc/self/task"):
        try: status = open(f"/proc/self/task/{task}/status").read()
        except (FileNotFoundError, ProcessLookupError): continue  # it has just ended
        if "Name:\tkvferry-" in status:
            count += sum(int(line.split()[1]) for line in status.splitlines() if "ctxt_switches" in line)
    return count
"""


def test_an_idle_agent_with_live_sessions_sleeps(target: Target) -> None:
    # Count wake-ups instead of CPU time: the cost of a wake-up varies by machine.
    child = Child(START, env={"KVFERRY_SILENCE_MS": "3000"})
    with child:
        child.run(WAKES)
        child.run(f"for _ in range(8): agent.peer({target.address!r}).connect()")
        time.sleep(1)
        before, began = child.run("wakes(), time.monotonic()")
        time.sleep(4)
        after, ended = child.run("wakes(), time.monotonic()")
    # Two agents with a session: each sends one heartbeat per second and answers one.
    assert 0 < after - before <= (ended - began) * 6 * 3


def test_agents_leak_no_descriptor_and_no_thread(children: Callable[..., Child]) -> None:
    child = children("import kvferry")
    code = """
    for _ in range(50):
        with kvferry.Agent(listen="127.0.0.1:0") as a, kvferry.Agent(listen="127.0.0.1:0") as b:
            region, place = a.register(bytearray(4096)), b.register(bytearray(4096))
            a.peer(b.address).write(region.addr, place.addr, 4096)
    left()
    """
    first = child.run(code)
    assert child.run(code) == first
    assert first[1] == 1
    assert child.finish() == (0, "")


def test_importing_kvferry_is_quick_and_starts_no_thread() -> None:
    # Of the processor, which a busy machine gives late, but not more of it.
    program = "import time; t = time.process_time(); import kvferry; took = time.process_time() - t;"
    program += "import os; print(len(os.listdir('/proc/self/task')), took < 0.5)"
    for _ in range(5):
        ended = run_python(program)
        assert ended.stdout in ("1 True\n", "1 False\n") and ended.stderr == ""
        if "True" in ended.stdout:
            break
    else:
        pytest.fail("importing kvferry took half a second of the processor each time")
    assert os.environ.get("KVFERRY_LOG") is None
