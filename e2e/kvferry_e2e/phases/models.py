"""Handoffs between instances of other models and other parallelism, in NIXL's flow without a router."""

from __future__ import annotations

from kvferry_e2e.client import complete, in_parallel
from kvferry_e2e.instance import Instance
from kvferry_e2e.phases.connector import LONGEST, Cluster, expect_right, offer
from kvferry_e2e.prompts import Prompts
from kvferry_e2e.report import Report, ensure

LENGTHS = (1, 2, 127, 128, 129, 255, 256, 257, 300, 511, 512, 700, 1500, LONGEST)
AT_ONCE = 16


def hands_over(report: Report, cluster: Cluster, prompts: Prompts, what: str) -> None:
    prefill, decode = cluster.prefills[0], cluster.decodes[0]
    with report.check(f"{what}: a single instance's tokens, prompt loaded") as note:
        for length in LENGTHS:
            prompt, before = prompts.fresh(length), cluster.sources()
            expect_right(cluster, prompt, complete(decode.port, prompt, params=offer(prefill, prompt)))
            cluster.expect_loaded(before, 1, length)
        note.text = f"{len(LENGTHS)} prompts of {min(LENGTHS)} to {max(LENGTHS)} tokens; {cluster.expect_blocks_back()}"
    with report.check(f"{what}: {AT_ONCE} requests at once") as note:
        many = [prompts.fresh(LENGTHS[i % len(LENGTHS)]) for i in range(AT_ONCE)]
        before = cluster.sources()

        answers = in_parallel(
            lambda prompt: complete(decode.port, prompt, params=offer(prefill, prompt)), many, AT_ONCE
        )
        for prompt, answer in zip(many, answers, strict=True):
            expect_right(cluster, prompt, answer)
        cluster.expect_loaded(before, AT_ONCE, sum(map(len, many)))
        note.text = cluster.expect_blocks_back()


def guesses(report: Report, decode: Instance) -> None:
    with report.check(f"{decode.name}: speculative decoding is on") as note:
        drafted = decode.metric("vllm:spec_decode_num_draft_tokens_total")
        ensure(drafted > 0, "no token was drafted")
        note.text = f"{drafted:.0f} tokens drafted"
