"""Many requests with clients that leave at random moments, and a prefill that is restarted in the middle."""

from __future__ import annotations

import http.client
import json
import random
import socket
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvferry_e2e.client import Answer, Route, Tokens, abandonable, complete, new_transfer_id
from kvferry_e2e.instance import Instance
from kvferry_e2e.pair import mismatch
from kvferry_e2e.phases.connector import BLOCKS_BACK_S, UNCLAIMED_S, Cluster, offer
from kvferry_e2e.prompts import LENGTHS, Prompts
from kvferry_e2e.report import CheckError, Report, ensure

AT_ONCE = 8
PROMPTS = 60
# The client of one request of so many leaves.
LEFT_ONE_OF = 4


@dataclass
class Soak:
    prefill: Instance
    decode: Instance
    prompts: list[Tokens]
    references: list[Tokens]

    def request(self, number: int) -> str:
        """How it ended. Raises CheckError for wrong tokens."""
        chance = random.Random(number)
        at = number % len(self.prompts)
        prompt, reference = self.prompts[at], self.references[at]
        try:
            if chance.randrange(LEFT_ONE_OF) == 0:
                self._left(prompt, chance)
                return "left"
            answer = self._sequential(prompt) if number % 2 else self._concurrent(prompt)
        except (OSError, http.client.HTTPException, json.JSONDecodeError, RuntimeError, CheckError):
            # No prefill answers while it is restarted.
            time.sleep(1)
            return "without a prefill"
        if answer.status != 200:
            return f"HTTP {answer.status}"
        ensure(answer.tokens == reference, mismatch(prompt, answer.tokens, reference))
        return "right"

    def _sequential(self, prompt: Tokens) -> Answer:
        return complete(self.decode.port, prompt, params=offer(self.prefill, prompt))

    def _route(self) -> Route:
        return Route.between(self.prefill.port, self.decode.port, self.prefill.bootstrap)

    def _concurrent(self, prompt: Tokens) -> Answer:
        route, transfer = self._route(), new_transfer_id()
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(complete, route.prefill, prompt, 1, route.prefill_params(transfer))
            answer = complete(route.decode, prompt, params=route.decode_params(transfer))
            waiting.exception()
        return answer

    def _left(self, prompt: Tokens, chance: random.Random) -> None:
        """The clients of both sides leave; of some requests one side is never asked."""
        route, transfer = self._route(), new_transfer_id()
        asks = [(route.decode, 200, route.decode_params(transfer)), (route.prefill, 1, route.prefill_params(transfer))]
        clients: list[socket.socket] = []
        for port, tokens, params in chance.sample(asks, chance.choice((1, 2, 2))):
            clients.append(abandonable(port, prompt, tokens, params))
            time.sleep(chance.random() * 0.1)
        time.sleep(chance.random() ** 3)
        for client in clients:
            client.close()


def soak(
    report: Report,
    prefill: Instance,
    decode: Instance,
    prompts: Prompts,
    count: int,
    restart: Callable[[Instance], Instance],
) -> Instance:
    """`restart`: kills the prefill and starts another, while requests arrive. Returns that one."""
    some = [prompts.fresh(LENGTHS[i % len(LENGTHS)]) for i in range(PROMPTS)]
    alone = Cluster([prefill], [decode]).alone
    run = Soak(prefill, decode, some, [alone(prompt).tokens for prompt in some])
    with report.check(f"soak: {count} requests, clients leave, prefill is restarted: no wrong token") as note:
        start = time.monotonic()
        with ThreadPoolExecutor(AT_ONCE) as pool:
            ended = list(pool.map(run.request, range(count // 2)))
            while_dead = pool.map(run.request, range(2 * AT_ONCE))
            run.prefill = restart(prefill)
            ended += list(while_dead)
            ended += list(pool.map(run.request, range(count // 2, count)))
        seen = ", ".join(f"{number} {what}" for what, number in sorted(Counter(ended).items()))
        ensure(ended.count("right") > count / 2, f"too few requests were answered: {seen}")
        note.text = f"{seen}; {time.monotonic() - start:.0f} s"
    with report.check("soak: both engines live, the blocks are free, the next requests are loaded") as note:
        ensure(run.prefill.alive() and decode.alive(), "an engine died")
        cluster = Cluster([run.prefill], [decode])
        note.text = cluster.expect_blocks_back(UNCLAIMED_S + BLOCKS_BACK_S)
        before = cluster.sources()
        ended = [run.request(number) for number in range(AT_ONCE)]
        ensure(set(ended) <= {"left", "right"}, str(ended))
        loaded = int(cluster.sources()[2] - before[2])
        ensure(loaded > 0, "nothing was loaded")
        note.text += f"; {loaded} tokens loaded"
    return run.prefill
