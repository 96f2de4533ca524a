"""The halves of a connector, driven as an engine drives them: two engines of one rank each, in this process."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from kvferry import Agent
from kvferry._kvferry import READS_INTS_DIRECTLY
from kvferry.connector import SchedulerHalf, WorkerHalf, prompt_id

BLOCKS, TOKENS, CONTENT, LAYERS = 16, 4, 64, 3
BLOCK = TOKENS * CONTENT
PROMPT = list(range(10))


class Engine:
    """A scheduler half and the worker half of its one rank. Layer by layer, all blocks of a layer lie together."""

    def __init__(self, model: dict[str, str] | None = None, *, eager: bool = True) -> None:
        self.agent = Agent(listen="127.0.0.1:0")
        self.region = self.agent.allocate(LAYERS * BLOCKS * BLOCK)
        self.memory = self.region.memory()
        self.scheduler = SchedulerHalf([("full", 0, TOKENS)], ranks=1, timeout=20, null_block=0, eager=eager)
        self.worker = WorkerHalf(self.agent, self.layout(), [self.region], rank=0, timeout=20, model=model or {})
        self.scheduler.set_ranks([self.worker.card])
        self.sent: list[str] = []
        self.received: list[str] = []
        self.failed: list[str] = []

    def layout(self) -> str:
        shape = {
            "role": "kv", "encoding": "float32", "bits": 32, "heads_total": 1, "head_start": 0, "heads": 1,
            "rows": TOKENS, "content": CONTENT, "block_stride": BLOCK, "kernel_blocks": 1, "kernel_stride": BLOCK,
            "head_stride": CONTENT, "row_stride": CONTENT,
        }  # fmt: skip
        layers = [
            {"name": f"layers.{at}", "group": 0, "planes": [{"shape": 0, "region": 0, "base": at * BLOCKS * BLOCK}]}
            for at in range(LAYERS)
        ]
        group = {"name": "0", "kind": "full", "block_tokens": TOKENS, "blocks": BLOCKS}
        regions = [{"id": self.region.id, "len": self.region.nbytes}]
        return json.dumps({"v": 1, "regions": regions, "groups": [group], "shapes": [shape], "layers": layers})

    def step(self, *scheduled: Any) -> None:
        """One step of an engine: `scheduled` is computed."""
        self.worker.apply(self.scheduler.step(scheduled, []))
        self.worker.fetch()
        for layer in range(LAYERS):
            self.worker.layer_computed(layer)
        self.worker.step_computed()
        sent, received, failed, notes = self.worker.reports()
        if notes is not None:
            self.scheduler.reported(0, notes)
        self.scheduler.sent(sent)
        self.scheduler.received(received)
        self.sent += sent
        self.received += received
        self.failed += failed

    def until(self, ended: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20
        while not ended():
            assert time.monotonic() < deadline, (self.scheduler.gauges(), self.worker.gauges())
            self.step()
            time.sleep(0.001)

    def block(self, layer: int, block: int) -> memoryview:
        start = (layer * BLOCKS + block) * BLOCK
        return self.memory[start : start + BLOCK]


@pytest.fixture
def engines() -> Iterator[tuple[Engine, Engine]]:
    both = Engine(), Engine()
    yield both
    for engine in both:
        engine.worker.close()
        engine.agent.shutdown()


def produce(engine: Engine, request: str, params: dict[str, Any], blocks: list[int], prompt: list[int] = PROMPT) -> Any:
    """Prefills a request, whose one token is then generated."""
    identity = prompt_id(prompt)
    engine.scheduler.arrived(request, len(prompt), 1, params, identity)
    for at, block in enumerate(blocks):
        for layer in range(LAYERS):
            engine.block(layer, block)[:] = bytes([layer * 16 + at + 1]) * BLOCK
    engine.step((request, 0, len(prompt), True, [blocks]))
    held, answer = engine.scheduler.finished(request, "length", [blocks]) or (False, None)
    assert held
    return answer


def consume(
    engine: Engine, request: str, params: dict[str, Any], blocks: list[int], prompt: list[int] = PROMPT
) -> int | None:
    engine.scheduler.arrived(request, len(prompt), 8, params, prompt_id(prompt))
    matched = engine.scheduler.matched(request, 0)
    engine.scheduler.allocated(request, matched or 0, [blocks])
    return matched


def finish(engine: Engine, request: str) -> None:
    assert engine.scheduler.finished(request, "length", None) == (False, None)


def test_the_blocks_of_a_request_arrive_and_both_sides_report_it_once(engines: tuple[Engine, Engine]) -> None:
    prefill, decode = engines
    answer = produce(prefill, "p", {"do_remote_decode": True}, [3, 1, 2])
    assert answer["remote_engine_id"] == prefill.scheduler.engine_id
    assert consume(decode, "d", answer, [7, 9, 8]) == len(PROMPT)
    decode.until(lambda: bool(decode.received))
    assert (decode.received, decode.failed) == (["d"], [])
    for layer in range(LAYERS):
        for at, block in enumerate([7, 9, 8]):
            content = bytes([layer * 16 + at + 1]) * BLOCK
            used = min(TOKENS, len(PROMPT) - at * TOKENS) * CONTENT
            assert bytes(decode.block(layer, block)[:used]) == content[:used]
    finish(decode, "d")
    prefill.until(lambda: bool(prefill.sent))
    assert prefill.sent == ["p"]
    ((request, seconds, nbytes, failure),) = decode.worker.take_loads()
    assert (request, nbytes, failure) == ("d", LAYERS * len(PROMPT) * CONTENT, None)
    assert seconds > 0
    for engine in engines:
        assert not engine.scheduler.has_pending_work()
        assert set(engine.scheduler.gauges().values()) == {0}


def test_a_request_with_another_prompt_loads_nothing(engines: tuple[Engine, Engine]) -> None:
    prefill, decode = engines
    answer = produce(prefill, "p", {"do_remote_decode": True}, [3, 1, 2])
    assert consume(decode, "d", answer, [7, 9, 8], prompt=[1, *PROMPT[1:]]) == 0


def test_a_load_from_an_engine_that_is_gone_fails_and_says_why(engines: tuple[Engine, Engine]) -> None:
    prefill, decode = engines
    answer = produce(prefill, "p", {"do_remote_decode": True}, [3, 1, 2])
    prefill.worker.close()
    prefill.agent.shutdown()
    consume(decode, "d", answer, [7, 9, 8])
    decode.until(lambda: bool(decode.received))
    assert decode.failed == ["d"]
    ((_, _, _, failure),) = decode.worker.take_loads()
    assert failure is not None
    assert prefill.agent.address in failure[1]


def test_steps_are_asked_for_only_of_requests_that_may_be_handed_over() -> None:
    half = SchedulerHalf([("full", 0, TOKENS)], ranks=1, timeout=20, null_block=0)
    asked: list[dict[str, bool]] = []

    def steps(producing: dict[str, bool]) -> list[Any]:
        asked.append(producing)
        return [(name, 0, len(PROMPT), True, [[1, 2, 3]]) for name, all_steps in producing.items() if all_steps]

    ids = {"other": 1, "p": len(PROMPT), "later": 2}
    assert half.step_of(ids, steps, []) == (b"", False, [], [])
    half.arrived("p", len(PROMPT), 8, {"do_remote_decode": True}, None)
    half.arrived(
        "d", len(PROMPT), 8, {"do_remote_prefill": True, "transfer_id": "x", "remote_address": "127.0.0.1:1"}, None
    )
    assert not half.step_of({"other": 1, "d": 1}, steps, [])[1]
    assert asked == []
    data, computes, loads, endings = half.step_of(ids, steps, [])
    assert data and computes and (loads, endings) == ([], [])
    # Its prompt is computed: only a step with all its blocks matters now.
    assert half.step_of(ids, steps, []) == (b"", False, [], [])
    assert half.step_of(ids, steps, ["p"])[0], "it has lost its blocks"
    assert half.step_of(ids, steps, [])[1]
    assert asked == [{"p": True}, {"p": False}, {"p": False}, {"p": True}]
    half.give_up(["p"])
    half.step_of(ids, steps, [])
    assert half.finished("p", "length", [[1, 2, 3]]) == (False, None)
    assert half.finished("p", "length", [[1, 2, 3]]) is None
    assert len(asked) == 4


def nothing(_: dict[str, bool]) -> list[Any]:
    return []


def test_of_a_step_that_can_not_be_read_loads_and_held_requests_are_reported_once_each(
    engines: tuple[Engine, Engine],
) -> None:
    prefill, decode = engines
    # The first step says who the ranks are.
    decode.step()
    answer = produce(prefill, "p", {"do_remote_decode": True}, [3, 1, 2])
    consume(decode, "d", answer, [7, 9, 8])
    for engine, awaited in ((prefill, ([], ["p"])), (decode, (["d"], []))):
        data, computes, loads, endings = engine.scheduler.step_of({}, nothing, [])
        assert data and not computes
        assert (loads, [it for it, _, held in endings if held]) == awaited
        with pytest.raises(ValueError, match="malformed"):
            engine.worker.apply(data[:-1], loads=loads, endings=endings)
        for _ in range(50):
            engine.step()
        assert (engine.received, engine.failed, engine.sent) == (loads, loads, awaited[1])
        assert not engine.scheduler.has_pending_work()
    ((_, _, _, failure),) = decode.worker.take_loads()
    assert failure is not None and "could not read a step" in failure[1]
    finish(decode, "d")
    later = produce(prefill, "q", {"do_remote_decode": True}, [3, 1, 2])
    consume(decode, "e", later, [4, 5, 6])
    decode.until(lambda: "e" in decode.received)
    assert decode.failed == ["d"]


def test_the_loads_and_endings_of_a_step_that_is_read_are_not_reported_for_it(engines: tuple[Engine, Engine]) -> None:
    prefill, decode = engines
    answer = produce(prefill, "p", {"do_remote_decode": True}, [3, 1, 2])
    consume(decode, "d", answer, [7, 9, 8])
    for engine in (decode, prefill):
        data, _, loads, endings = engine.scheduler.step_of({}, nothing, [])
        assert loads or endings
        engine.worker.apply(data, loads=loads, endings=endings)
        engine.worker.fetch()
    decode.until(lambda: bool(decode.received))
    assert (decode.received, decode.failed) == (["d"], [])
    prefill.until(lambda: bool(prefill.sent))
    assert prefill.sent == ["p"]


def test_a_step_whose_requests_can_not_be_read_has_no_effect() -> None:
    half = SchedulerHalf([("full", 0, TOKENS)], ranks=1, timeout=20, null_block=0)
    half.arrived("p", len(PROMPT), 1, {"do_remote_decode": True}, None)

    def fails(_: dict[str, bool]) -> list[Any]:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        half.step_of({"p": 4}, fails, [])
    with pytest.raises(OverflowError, match="item 1"):
        half.step_of({"p": 4}, lambda _: [("p", 0, 4, True, [[1, -1]])], [])
    assert half.step_of({"p": 10}, lambda _: [("p", 0, 10, True, [[1, 2, 3]])], [])[1]
    held, _ = half.finished("p", "length", [[1, 2, 3]]) or (False, None)
    assert held


def test_blocks_of_a_request_that_is_not_handed_over_are_not_read() -> None:
    half = SchedulerHalf([("full", 0, TOKENS)], ranks=1, timeout=20, null_block=0)

    class Unread(list[int]):
        def __len__(self) -> int:
            raise AssertionError("they were read")

    assert half.finished("unknown", "length", [Unread([1])]) is None
    half.refuse("r")
    assert half.finished("r", "length", [Unread([1])]) == (False, None)
    half.arrived("p", len(PROMPT), 1, {"do_remote_decode": True}, None)
    with pytest.raises(OverflowError):
        half.finished("p", "length", [[-1]])
    assert half.finished("p", "length", [[1]]) == (False, None)


def test_a_closed_half_refuses_calls_and_closes_again(engines: tuple[Engine, Engine]) -> None:
    worker = engines[0].worker
    worker.close()
    worker.close()
    with pytest.raises(ValueError, match="closed"):
        worker.fetch()


def test_wrong_arguments_raise_and_name_what_is_wrong(engines: tuple[Engine, Engine]) -> None:
    engine = engines[0]
    with pytest.raises(ValueError, match="ring"):
        SchedulerHalf([("ring", 0, 4)], ranks=1, timeout=1)
    with pytest.raises(ValueError, match="expected metadata from 2 ranks"):
        SchedulerHalf([("full", 0, 4)], ranks=2, timeout=1).set_ranks([engine.worker.card])
    with pytest.raises(ValueError, match="missing field"):
        WorkerHalf(engine.agent, "{}", [engine.region], rank=0, timeout=20)
    with pytest.raises(ValueError, match="malformed"):
        engine.worker.apply(b"nonsense")


def test_the_layout_that_the_docs_show_is_sound_and_its_planes_stay_in_their_region() -> None:
    page = (Path(__file__).parents[2] / "docs/internals/layout.md").read_text()
    layout = json.loads(page.split("```json\n")[1].split("```")[0])
    agent = Agent(listen="127.0.0.1:0")
    region = agent.allocate(layout["regions"][0]["len"])
    layout["regions"][0]["id"] = region.id
    layout["layers"][1]["planes"][0]["base"] = region.nbytes // 2 + 32768 * 64
    assert WorkerHalf(agent, json.dumps(layout), [region], rank=0, timeout=20).card
    layout["layers"][1]["planes"][0]["base"] += 1
    with pytest.raises(ValueError, match="region"):
        WorkerHalf(agent, json.dumps(layout), [region], rank=0, timeout=20)


# Names of prompts on the wire: they stay the same from version to version.
NAMED: list[tuple[Sequence[int], list[str], str]] = [
    ([], [], "732f2b9ea583db00b919aabcd5d19c52"),
    ([0, 1, 256, 257, 70_000, 2**30 - 1, 2**30, 2**31, 2**32 - 1], ["salt:x"], "dfd7ecdff1a368250fada024e9735ca3"),
    (range(100_000), [], "0f92190cff38b59f064286572bc8acfd"),
    ((True, 5), [], "79be60fbb0c9530bf482210376d4caea"),
]


class Listed(list[int]):
    """Read by calls of the interpreter, as a list is where CPython's ints are not known."""


def test_ints_are_read_directly_in_the_versions_of_cpython_that_are_known() -> None:
    known = sys.implementation.name == "cpython" and (3, 10) <= sys.version_info[:2] <= (3, 14)
    assert known == READS_INTS_DIRECTLY


def test_a_prompt_keeps_its_name_however_it_is_given() -> None:
    for tokens, extra, name in NAMED:
        for given in (list(tokens), tuple(tokens), Listed(tokens)):
            assert prompt_id(given, extra).hex() == name


def test_reading_ints_directly_gives_what_calls_give() -> None:
    """Random lists against the same items in a sequence that is read by calls: lengths around what is read and hashed at
    a time, ints at the limits of a digit, in new objects and shared ones, and items that are ints only in a wider sense.
    """
    numpy = pytest.importorskip("numpy")
    seed = time.time_ns()
    rng = random.Random(seed)

    class Int(int):
        pass

    class Index:
        def __init__(self, value: int) -> None:
            self.value = value

        def __index__(self) -> int:
            return self.value

    edges = [0, 1, 255, 256, 257, 2**15, 2**16, 2**30 - 1, 2**30, 2**30 + 1, 2**31 - 1, 2**31, 2**32 - 1]

    def token() -> Any:
        plain = rng.choice([rng.randrange(257), rng.randrange(200_000), rng.randrange(2**32), rng.choice(edges)])
        if rng.random() < odd:
            return rng.choice([Int(plain), bool(plain % 2), Index(plain), numpy.uint32(plain), numpy.int64(plain)])
        return int(str(plain))

    for _ in range(200):
        odd = rng.choice([0, 0, 0.001, 0.5])
        around = rng.choice([0, 1, 2, 100, 1024, 2048, 16_384, 32_768])
        tokens = [token() for _ in range(max(0, around + rng.randrange(-2, 3)))]
        by_calls = prompt_id(tuple(tokens), ["x"])
        assert prompt_id(tokens, ["x"]) == by_calls, seed
        assert prompt_id(Listed(tokens), ["x"]) == by_calls, seed
        # Lists with more memory than items, and with fewer items than they had.
        grown: list[Any] = []
        for it in tokens:
            grown.append(it)
        grown += [7, 8]
        del grown[len(tokens) :]
        assert prompt_id(grown, ["x"]) == by_calls, seed


@pytest.mark.parametrize(
    ("token", "kind"),
    [
        (-1, OverflowError), (-70_000, OverflowError), (2**32, OverflowError), (2**40, OverflowError),
        (-(2**40), OverflowError), (2**70, OverflowError), (1.5, TypeError), ("x", TypeError), (None, TypeError),
    ],
)  # fmt: skip
def test_the_error_names_the_first_item_that_is_no_token_id(token: Any, kind: type[Exception]) -> None:
    for tokens in ([token], [1, token, "y"], [70_000] * 20_000 + [token]):
        where = f"^item {tokens.index(token)}: "
        for given in (tokens, tuple(tokens), Listed(tokens)):
            with pytest.raises(kind, match=where):
                prompt_id(given, [])


@pytest.mark.parametrize("given", ["abc", {1: 2}, {1}, 5, iter([1]), None])
def test_what_is_no_sequence_is_no_prompt(given: Any) -> None:
    with pytest.raises(TypeError):
        prompt_id(given)


def test_a_list_that_an_item_changes_while_it_is_read_is_read_as_a_loop_reads_it() -> None:
    class Changes:
        def __init__(self, change: Callable[[list[Any]], None]) -> None:
            self.change = change

        def __index__(self) -> int:
            self.change(tokens)
            return 3

    def refill(tokens: list[Any]) -> None:
        tokens.clear()
        tokens.extend(int(str(it)) for it in range(5000, 5040))

    tokens: list[Any] = [70_000, Changes(list.clear), 70_001]
    assert prompt_id(tokens) == prompt_id((70_000, 3))
    tokens = [70_000, Changes(refill), 70_001]
    assert prompt_id(tokens) == prompt_id((70_000, 3, *range(5002, 5040)))
    tokens = [Changes(lambda it: it.extend([9] * 40_000)), 70_001]
    assert prompt_id(tokens) == prompt_id((3, 70_001, *[9] * 40_000))


def test_an_exception_of_an_item_is_passed_on() -> None:
    class Broken:
        def __index__(self) -> int:
            raise KeyError("mine")

    tokens: list[Any] = [1, Broken()]
    with pytest.raises(KeyError, match="mine"):
        prompt_id(tokens)


def test_a_block_number_that_is_none_is_refused_with_its_place(engines: tuple[Engine, Engine]) -> None:
    prefill, _ = engines
    for blocks in ([1, -1], (1, 2**32), Listed([1, 2**40])):
        with pytest.raises(OverflowError, match="item 1"):
            prefill.scheduler.step([("p", 0, 4, True, [blocks])], [])
