"""The checks of SGLang's prefill and decode. The reference is one server without either."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvferry_e2e.client import Tokens
from kvferry_e2e.pair import mismatch
from kvferry_e2e.prompts import Prompts
from kvferry_e2e.report import Report, ensure
from kvferry_e2e.server import Server
from kvferry_e2e.sglang.server import MAX_TOKENS, Reply, SGLang, environment_of, generate, handoff

PROMPTS = 100
WIDTH = 32
_SPECIAL = (1, 2, 15, 16, 17, 31, 32, 33, 255, 256, 257, 512, 1000, MAX_TOKENS)
_IS_INSTALLED = """
import importlib.metadata, importlib.util
names = [d.metadata["Name"] or "" for d in importlib.metadata.distributions()]
print(*[name for name in names if "mooncake" in name or "nixl" in name])
print(importlib.util.find_spec("mooncake") or "", importlib.util.find_spec("nixl") or "")
"""

Answers = list[tuple[Tokens, Tokens]]
Ask = Callable[[int, Tokens], Reply]


def references(report: Report, alone: SGLang, prompts: Prompts) -> Answers:
    """Prompts of many lengths, each with the tokens of a server alone."""
    lengths = [*_SPECIAL, *(1 + at * (MAX_TOKENS - 1) // PROMPTS for at in range(PROMPTS - len(_SPECIAL)))]
    asked = [prompts.fresh(length) for length in lengths]
    with report.check(f"sglang: one server answers {PROMPTS} prompts") as note:
        with ThreadPoolExecutor(4) as pool:
            replies = list(pool.map(lambda prompt: generate(alone.port, prompt), asked))
        for prompt, reply in zip(asked, replies, strict=True):
            ensure(reply.status == 200, f"{len(prompt)} tokens: {reply}")
        distinct = {tuple(reply.tokens) for reply in replies}
        ensure(len(distinct) == PROMPTS, f"only {len(distinct)} answers differ: equal answers would prove nothing")
        note.text = f"of 1 to {max(lengths)} tokens"
    return [(prompt, reply.tokens) for prompt, reply in zip(asked, replies, strict=True)]


def equal(report: Report, name: str, answers: Answers, ask: Ask, width: int = WIDTH) -> None:
    """`ask` gets the number of the prompt, too."""
    with report.check(f"sglang: {name}: {len(answers)} prompts, {width} at once, 0 wrong") as note:
        with ThreadPoolExecutor(width) as pool:
            replies = list(pool.map(lambda at: ask(at, answers[at][0]), range(len(answers))))
        wrong = []
        for (prompt, expected), reply in zip(answers, replies, strict=True):
            if reply.tokens != expected:
                wrong.append(mismatch(prompt, reply.tokens, expected) if reply.status == 200 else str(reply))
        ensure(not wrong, f"{len(wrong)} wrong, such as {wrong[0] if wrong else ''}")
        note.text = f"{sum(len(prompt) for prompt, _ in answers)} tokens"


def through(prefills: Sequence[SGLang], decodes: Sequence[SGLang]) -> Ask:
    """Handoffs by this test, each server in turn."""
    return lambda at, prompt: handoff(prefills[at % len(prefills)], decodes[at % len(decodes)], prompt)


def engine_is_kvferry(report: Report, python: Path, servers: Sequence[SGLang]) -> None:
    with report.check(f"sglang{_on(servers[0])}: the engine is kvferry's, and neither Mooncake nor NIXL is installed"):
        one = servers[0]
        env = environment_of(one.setup.site, one.overlay, None, one.setup.scratch)
        del env["KVFERRY_SHIMS"]
        found = subprocess.run(
            [str(python), "-c", _IS_INSTALLED], env=env, capture_output=True, text=True, check=True, timeout=60
        )
        ensure(not found.stdout.strip(), f"installed: {found.stdout}")
        for server in servers:
            ensure(server.log_has("kvferry::agent: agent started"), f"{server.log} does not name kvferry's engine")
            ensure(server.log_has("session established"), f"{server.log} shows no session of kvferry")


def _on(server: SGLang) -> str:
    return " on nixl" if server.shim == "nixl" else ""


def decode_uses_prefills_kv(report: Report, prefill: SGLang, decode: SGLang, answers: Answers) -> None:
    """Decode is given another prompt of the same length. It must answer from the KV that prefill has sent."""
    (sent, expected), (other, others) = next(
        (one, two) for one in answers for two in answers if len(one[0]) == len(two[0]) >= 255 and one[0] != two[0]
    )
    with report.check(f"sglang{_on(prefill)}: control: decode answers from prefill's KV, whatever prompt it was given"):
        reply = handoff(prefill, decode, sent, asked=other)
        ensure(reply.tokens != others, "decode has computed its prompt itself")
        ensure(reply.tokens == expected, mismatch(sent, reply.tokens, expected))


def prefill_dies(report: Report, prefill: SGLang, decode: SGLang, answers: Answers) -> None:
    """Kills prefill while requests run. Each ends, with the right tokens or an error."""
    with report.check(
        f"sglang{_on(prefill)}: prefill SIGKILLed under load: answers are right or errors, decode lives"
    ) as note:
        begun = threading.Semaphore(0)

        def ask(answer: tuple[Tokens, Tokens]) -> Reply:
            reply = handoff(prefill, decode, answer[0])
            begun.release()
            return reply

        some = answers[-64:]
        with ThreadPoolExecutor(WIDTH) as pool:
            replies = [pool.submit(ask, answer) for answer in some]
            # Some have ended, and others run or wait.
            for _ in range(8):
                begun.acquire()
            prefill.kill()
            ended = [reply.result() for reply in replies]
        for (prompt, expected), reply in zip(some, ended, strict=True):
            ensure(reply.status != 200 or reply.tokens == expected, mismatch(prompt, reply.tokens, expected))
        right = sum(reply.status == 200 for reply in ended)
        ensure(right < len(ended), "all requests were answered before prefill was killed")
        ensure(decode.alive(), f"decode is dead; its log ends:\n{decode.log_tail()}")
        note.text = f"{right} right, {len(ended) - right} errors"


def works_again(report: Report, prefill: SGLang, decode: SGLang, answers: Answers) -> None:
    """`prefill`: a restarted one."""
    with report.check(f"sglang{_on(prefill)}: prefill restarted: the next request works"):
        prompt, expected = answers[-1]
        ensure(handoff(prefill, decode, prompt).tokens == expected, "the tokens differ, or an error")


def no_crash(report: Report, servers: Sequence[Server], stopped: Sequence[Server]) -> None:
    """`stopped`: those that were not killed, which have to be alive."""
    with report.check("sglang: no server crashed"):
        for server in stopped:
            ensure(server.alive(), f"{server.name} is dead; its log ends:\n{server.log_tail()}")
        for server in servers:
            crash = server.log_has(r"panicked at|Fatal Python error|Segmentation fault|Scheduler hit an exception")
            ensure(not crash, f"{server.log} shows a crash")
