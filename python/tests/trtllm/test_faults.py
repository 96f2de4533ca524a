"""Handoffs between two processes survive a fault of either engine, or of the network between them, at each step.

The steps are the calls of the connector that the engines' executors make, and the messages that pass between the
engines. A handoff without a fault counts them. At each of them either engine is killed or stopped, or connections
between them are silent or reset. All requests end and generate what an engine without a connector generates, from the
same KV; a later handoff works; and then nothing is held.
"""

from __future__ import annotations

import functools
import random
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal

import pytest
from kit import Child, eventually
from relay import Relay, Side
from trtllm_led import BLOCKS, expected

Name = Literal["prefill", "decode"]
Fault = Literal["kill", "stop", "partition", "reset"]

LOAD_WAIT_S = 1
# A look-up holds the executor for twice LOAD_WAIT_S at most: for the engines, and for the store (docs/trtllm.md). This is
# a watchdog, for machines of any speed.
ANSWER_S = 30.0
HANDOFF_TIMEOUT_S = 3
# Sessions end in a long fault.
SILENCE_S = 1
LONG_S = 2.0
# Beyond the watchdog. LOAD_WAIT_S alone ends a look-up in a brief fault: neither a session nor the prompt's time ends.
NEVER_S = 2 * int(ANSWER_S)
# An engine that took all of a look-up is not asked for 2 s (docs/trtllm.md).
PAUSE_S = 2.2
# Runs at a time: most of a run's time is waiting.
LANES = 8
# `make test` runs a selection; `make test-slow` runs all cases.
SEED = 23

BOTH: tuple[Name, ...] = ("prefill", "decode")
# The engine that decodes connects to the one that prefills.
SIDES: dict[Name, Side] = {"prefill": "server", "decode": "client"}
STRUCK: list[tuple[Fault, tuple[Name, ...]]] = [
    ("kill", ("prefill",)),
    ("kill", ("decode",)),
    ("stop", ("prefill",)),
    ("stop", ("decode",)),
    ("partition", ("prefill",)),
    ("partition", ("decode",)),
    ("partition", BOTH),
    ("reset", ("prefill",)),
    ("reset", ("decode",)),
    ("reset", BOTH),
]


@dataclass(frozen=True)
class Step:
    """Before call `number` of an engine ("prefill", "decode"), or before message `number`: of the first fetch, for which
    the engines connect, of a later one ("fetch"), or of those while a prompt is prefilled ("offer").
    """

    where: Literal["prefill", "decode", "offer", "first fetch", "fetch"]
    number: int
    call: str = ""

    @property
    def is_message(self) -> bool:
        return self.where not in BOTH

    def __str__(self) -> str:
        return f"{self.where} {self.number}" + (f" ({self.call})" if self.call else "")


@dataclass(frozen=True)
class Case:
    """A fault of the engines `struck`: a partition takes what these send, and their ends of connections are reset first."""

    fault: Fault
    struck: tuple[Name, ...]
    step: Step
    is_long: bool
    load: str

    @property
    def is_brief(self) -> bool:
        """True for a fault after the prompt was offered, in which nothing but `load_wait` ends."""
        return self.fault in ("stop", "partition") and not self.is_long and self.step.where not in ("prefill", "offer")

    @property
    def silence_s(self) -> int:
        return SILENCE_S if self.is_long or self.fault in ("kill", "reset") else NEVER_S

    def __str__(self) -> str:
        kind = f"long {self.fault}" if self.is_long else self.fault
        return f"{kind} of {' and '.join(self.struck)} at {self.step}, load {self.load}"


def tokens(name: Name) -> int:
    return 1 if name == "prefill" else 3


class Pair:
    """An engine that prefills and one that decodes, in processes of their own, and a relay between them."""

    def __init__(
        self,
        folder: Path,
        load: str,
        *,
        load_wait: int = LOAD_WAIT_S,
        silence: int = NEVER_S,
        handoff_timeout: int = HANDOFF_TIMEOUT_S,
    ) -> None:
        self._folder = folder
        self._held_s = ANSWER_S + handoff_timeout
        self._settings: dict[str, Any] = {
            "DISK_GIB": 1 / 16,
            "STAGING_GIB": 1 / 64,
            "LOAD": load,
            "LOAD_WAIT": load_wait,
            "HANDOFF_GIB": 1 / 64,
            "HANDOFF_TIMEOUT": handoff_timeout,
            "SECRET_FILE": folder / "secret",
        }
        self._silence_s = silence
        self._numbers = count(1)
        (folder / "secret").write_text("a secret of the tests")
        self.relay = Relay(2)
        self.engines: dict[Name, Child] = {}

    def __enter__(self) -> Pair:
        for name in BOTH:
            self.start(name)
        return self

    def __exit__(self, *_: object) -> None:
        for engine in self.engines.values():
            engine.__exit__()
        self.relay.close()

    def start(self, name: Name) -> None:
        settings = self._settings | {"HANDOFF": name, "DISK": self._folder / name}
        env = {"KVFERRY_SILENCE_MS": str(1000 * self._silence_s)}
        if name == "prefill":
            # An address of loopback would be the advertised one.
            settings["LISTEN"] = "0.0.0.0:0"
            env["KVFERRY_ADVERTISE"] = self.relay.addresses[1]
        else:
            settings["PREFILL"] = self.relay.addresses[0]
        env |= {f"TLLM_KVFERRY_{setting}": str(value) for setting, value in settings.items()}
        if name in self.engines:
            self.engines[name].__exit__()
        self.engines[name] = Child("from trtllm_led import Led\nengine = Led()", env=env)
        if name == "prefill":
            self.relay.connect_to(self.run("prefill", "engine.addresses"))

    def run(self, name: Name, code: str) -> Any:
        return self.engines[name].run(code, ANSWER_S)

    def next_number(self) -> int:
        return next(self._numbers)

    def begin(self, name: Name, number: int) -> str | None:
        first: str | None = self.run(name, f"engine.begin({number}, {tokens(name)})")
        return first

    def serve(self, name: Name, number: int) -> int:
        """A request from its beginning to its end. Returns how many tokens of the prompt were computed."""
        self.begin(name, number)
        return check(name, number, self.run(name, "engine.go()"))

    def hears(self, before: int = 0) -> None:
        """Waits until the engine that decodes has heard of a prompt, or none is on offer."""
        eventually(lambda: self.run("decode", "engine.heard") > before or self.run("prefill", "engine.offers") == 0)

    def hands_over(self) -> bool:
        """Whether a prompt is handed over."""
        number, before = self.next_number(), self.run("decode", "(engine.heard, engine.received)")
        self.serve("prefill", number)
        self.hears(before[0])
        computed = self.serve("decode", number)
        moved = self.run("decode", "engine.received") - before[1]
        assert (computed == 1) >= (moved > 0)
        return bool(computed == 1 and moved == BLOCKS)

    def works(self) -> None:
        """Handoffs work: engines may connect again, and ask again, after some seconds."""
        eventually(lambda: self.hands_over() or time.sleep(0.2), what="a handoff")

    def ends(self) -> None:
        """Nothing is held at either end, and the processes end."""
        for name in BOTH:
            held = self.run(name, "engine.held()")
            until = time.monotonic() + self._held_s
            while held:
                assert time.monotonic() < until, (name, held)
                time.sleep(0.05)
                held = self.run(name, "engine.held()")
        for name in BOTH:
            self.run(name, "engine.end()")
            status, errors = self.engines[name].finish(ANSWER_S)
            assert status == 0, (name, errors)


def check(name: Name, number: int, outcome: dict[str, Any]) -> int:
    assert (outcome["generated"], outcome["digest"]) == expected(number, tokens(name)), (name, number, outcome)
    return int(outcome["computed"])


class Run:
    """A handoff with a fault."""

    def __init__(self, case: Case, pair: Pair) -> None:
        self._case, self._pair = case, pair
        # Held while the fault begins; it is there; it is over.
        self._begins, self._is_there, self._is_over = threading.Lock(), threading.Event(), False
        # Requests that were begun, and those whose executors were told to go on.
        self._begun: set[Name] = set()
        self._going: set[Name] = set()
        self._ended: set[Name] = set()

    def survives(self) -> None:
        pair, step = self._pair, self._case.step
        if step.where == "first fetch":
            eventually(lambda: pair.run("prefill", "engine.followers") == 1)
        else:
            pair.works()
        number = pair.next_number()
        self._serve("prefill", number)
        if step.where == "offer":
            # The last message of the offer may come later than the end of the request.
            self._is_there.wait(1)
            self._strike()
        if not self._is_out("decode"):
            if not self._is_there.is_set():
                pair.hears()
            self._serve("decode", number)
        # Not every fetch has as many messages.
        self._strike()
        if self._case.is_long:
            time.sleep(LONG_S)
        self._end()
        for name in BOTH:
            self._resume(name, number)
        if self._case.is_brief:
            # What is offered meanwhile would be held for long.
            time.sleep(PAUSE_S)
        pair.works()
        pair.ends()

    def _serve(self, name: Name, number: int) -> None:
        """A request, with the fault at its step."""
        pair, step = self._pair, self._case.step
        pair.begin(name, number)
        self._begun.add(name)
        if step.where == name:
            for _ in range(step.number):
                pair.run(name, "engine.step()")
            self._strike()
        elif step.is_message and (step.where == "offer") == (name == "prefill"):
            self._strike_at(step.number)
        if not self._is_out(name):
            self._go(name, number)

    def _resume(self, name: Name, number: int) -> None:
        """What the fault has kept from its end ends now. A process that was killed has forgotten its requests."""
        if self._case.fault == "kill" and name in self._case.struck:
            if name == "decode" and name not in self._ended:
                self._pair.serve(name, number)
        elif name not in self._begun:
            self._pair.serve(name, number)
        elif name not in self._ended:
            self._go(name, number)
            assert name in self._ended, name

    def _go(self, name: Name, number: int) -> None:
        """Has a request end, unless the fault stops or kills its engine."""
        engine = self._pair.engines[name]
        if name not in self._going:
            self._going.add(name)
            try:
                engine.start("engine.go()")
            except BrokenPipeError:
                assert self._is_killed(name)
                return
        until = time.monotonic() + ANSWER_S
        while True:
            try:
                outcome = engine.result(0.1)
            except TimeoutError:
                if self._is_out(name):
                    return
                assert time.monotonic() < until, f"{name} does not answer"
            except EOFError:
                if self._is_killed(name):
                    return
                raise
            else:
                check(name, number, outcome)
                self._ended.add(name)
                return

    # The fault.

    def _is_out(self, name: Name) -> bool:
        """True if an engine does nothing now."""
        is_hit = self._case.fault in ("kill", "stop") and name in self._case.struck
        return is_hit and self._is_there.is_set() and not self._is_over

    def _is_killed(self, name: Name) -> bool:
        """True if the fault has killed an engine, and waits until it has."""
        return self._case.fault == "kill" and name in self._case.struck and self._is_there.wait(ANSWER_S)

    def _strike(self, *, wait: bool = True) -> None:
        """The fault is there, from now on or from before. `wait`: if another thread makes it, until it has."""
        self._pair.relay.on_message = lambda: None
        if not self._begins.acquire(blocking=wait):
            return
        try:
            if self._is_there.is_set():
                return
            fault, struck = self._case.fault, self._case.struck
            if fault == "kill":
                self._pair.engines[struck[0]].kill()
            elif fault == "stop":
                self._pair.engines[struck[0]].send(signal.SIGSTOP)
            elif fault == "partition":
                self._pair.relay.silence(SIDES[name] for name in struck)
            else:
                self._pair.relay.reset(SIDES[name] for name in struck)
            self._is_there.set()
        finally:
            self._begins.release()

    def _strike_at(self, number: int) -> None:
        """Strikes before the message of this number, of those that arrive at the relay from now on."""
        first = self._pair.relay.messages

        def arrived() -> None:
            if self._pair.relay.messages > first + number:
                # A thread that strikes may wait for this one, which is the relay's.
                self._strike(wait=False)

        self._pair.relay.on_message = arrived

    def _end(self) -> None:
        fault, struck = self._case.fault, self._case.struck
        self._is_over = True
        if fault == "kill":
            self._pair.start(struck[0])
        elif fault == "stop":
            self._pair.engines[struck[0]].send(signal.SIGCONT)
        elif fault == "partition":
            self._pair.relay.heal()


@functools.cache
def steps_of(load: str) -> list[Step]:
    """The steps of a handoff, which a run without a fault counts."""
    found: list[Step] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        Pair(Path(folder), load, load_wait=int(ANSWER_S), handoff_timeout=NEVER_S) as pair,
    ):
        relay = pair.relay
        eventually(lambda: pair.run("prefill", "engine.followers") == 1)
        number = pair.next_number()
        pair.serve("prefill", number)
        pair.hears()
        before = relay.messages
        assert pair.serve("decode", number) == 1
        found += [Step("first fetch", number) for number in range(relay.messages - before)]
        before, number = relay.messages, pair.next_number()
        found += calls(pair, "prefill", number)
        pair.hears()
        found += [Step("offer", number) for number in range(relay.messages - before)]
        before = relay.messages
        found += calls(pair, "decode", number)
        found += [Step("fetch", number) for number in range(relay.messages - before)]
        pair.works()
        pair.ends()
    return found


def calls(pair: Pair, name: Name, number: int) -> Iterator[Step]:
    """The calls of a request, up to the first that asks whether its blocks are saved."""
    call, has_finished, is_over = pair.begin(name, number), False, False
    for at in count():
        if call is None:
            return
        if not is_over:
            yield Step(name, at, call)
        has_finished |= call == "request_finished"
        is_over |= has_finished and call == "get_finished"
        call = pair.run(name, "engine.step()")


def cases_of(fault: Fault, struck: tuple[Name, ...], load: str) -> Iterator[Case]:
    """Nothing but the decode engine's calls depends on `load`."""
    for step in steps_of(load):
        if load != "sync" and step.where != "decode":
            continue
        for is_long in (False, True) if fault in ("stop", "partition") else (False,):
            yield Case(fault, struck, step, is_long, load)


def selected() -> Iterator[Case]:
    """Of each fault, one case at a call, and one at a message of a fetch, which is brief if others are long."""
    chance = random.Random(SEED)
    for fault, struck in STRUCK:
        cases = list(cases_of(fault, struck, "sync"))
        has_long = any(it.is_long for it in cases)
        yield chance.choice([it for it in cases if not it.step.is_message and it.is_long == has_long])
        yield chance.choice([it for it in cases if it.step.where in ("first fetch", "fetch") and not it.is_long])


def failure_of(case: Case, folder: Path) -> str:
    """Runs a case. Returns "" if it is survived, or what went wrong."""
    folder.mkdir()
    timeout = NEVER_S if case.is_brief else HANDOFF_TIMEOUT_S
    with Pair(folder, case.load, silence=case.silence_s, handoff_timeout=timeout) as pair:
        try:
            Run(case, pair).survives()
        except Exception as error:
            said = {name: engine._errors.decode()[-2000:] for name, engine in pair.engines.items()}
            return f"{case}:\n{''.join(traceback.format_exception(error))}{said}\n"
    return ""


def survive(folder: Path, cases: Sequence[Case]) -> None:
    """Runs cases, some at a time. Raises AssertionError with all that fail."""
    with ThreadPoolExecutor(LANES) as lanes:
        folders = [folder / str(number) for number in range(len(cases))]
        told = list(filter(None, lanes.map(failure_of, cases, folders)))
    assert not told, f"{len(told)} of {len(cases)}\n" + "\n".join(told)


def test_a_handoff_has_the_steps_of_the_seam() -> None:
    steps = steps_of("sync")
    of_step = ["build_connector_meta", "bind_connector_meta", "start_load_kv", "wait_for_save"]
    # In two chunks, and with two tokens more.
    for name, passes in (("prefill", 2), ("decode", 3)):
        made = ["get_num_new_matched_tokens", "update_state_after_alloc"]
        made += [*of_step, "get_finished"] * (passes - 1) + [*of_step, "request_finished", "get_finished"]
        assert [it.call for it in steps if it.where == name] == made
    messages = {it.where for it in steps if it.is_message}
    assert messages == {"offer", "first fetch", "fetch"}


@pytest.fixture(scope="module")
def ahead(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Future[str]]]:
    """What went wrong in each of the selected cases, which run some at a time before their tests wait for them."""
    cases, folder = list(selected()), tmp_path_factory.mktemp("selected")
    with ThreadPoolExecutor(LANES) as lanes:
        yield [lanes.submit(failure_of, case, folder / str(number)) for number, case in enumerate(cases)]
        lanes.shutdown(cancel_futures=True)


@pytest.mark.parametrize("number", range(2 * len(STRUCK)))
def test_a_handoff_survives_each_fault_at_a_call_and_at_a_message(number: int, ahead: list[Future[str]]) -> None:
    assert len(ahead) == 2 * len(STRUCK)
    told = ahead[number].result()
    assert not told, told


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("load", ["sync", "async"])
@pytest.mark.parametrize(("fault", "struck"), STRUCK, ids=lambda it: it if isinstance(it, str) else "+".join(it))
def test_a_handoff_survives_a_fault_at_each_step(
    fault: Fault, struck: tuple[Name, ...], load: str, tmp_path: Path
) -> None:
    survive(tmp_path, list(cases_of(fault, struck, load)))
