"""KVFerryOffloadingSpec in real vLLM: KV that outlives the instance that computed it."""

from __future__ import annotations

from kvferry_e2e.client import Tokens, complete, in_parallel
from kvferry_e2e.instance import Instance
from kvferry_e2e.pair import METRICS_SETTLE_S, eventually, mismatch
from kvferry_e2e.prompts import Prompts
from kvferry_e2e.report import Report, ensure

LENGTHS = (1, 127, 128, 129, 300, 700, 1500, 1900)
BLOCK_TOKENS = 128
_LOADED = 'source="external_kv_transfer"'

Answers = dict[tuple[int, ...], Tokens]


def from_disk(instance: Instance) -> float:
    """Prompt tokens that were loaded from the store."""
    return instance.metric("vllm:prompt_tokens_by_source_total", _LOADED)


def computed(report: Report, instance: Instance, prompts: Prompts) -> Answers:
    """Has an instance compute prompts, and returns its tokens. It is the reference of the instances after it."""
    answers: Answers = {}
    with report.check(f"offload: {instance.name} computes and stores") as note:
        for length in LENGTHS:
            prompt = prompts.fresh(length)
            answer = complete(instance.port, prompt)
            ensure(answer.status == 200, f"{length} tokens: {answer}")
            answers[tuple(prompt)] = answer.tokens
        least = sum(length // BLOCK_TOKENS for length in LENGTHS)

        def stored() -> float:
            return instance.metric("vllm:kv_offload_kvferry_put_blocks_total", 'outcome="stored"')

        # A store begins one step after its blocks were computed, and the last of them with the next request.
        complete(instance.port, prompts.fresh(5))
        ensure(eventually(lambda: stored() >= least, METRICS_SETTLE_S), f"{stored():.0f} of {least} blocks are stored")
        note.text = f"{stored():.0f} blocks of {len(LENGTHS)} prompts"
    return answers


def loaded(report: Report, instance: Instance, answers: Answers, what: str) -> None:
    """Another instance, or another incarnation of one, loads what was stored, and says the same."""
    with report.check(f"offload: {what}: equal tokens, prompts loaded") as note:
        before = from_disk(instance)
        for prompt, expected in answers.items():
            answer = complete(instance.port, list(prompt))
            ensure(answer.tokens == expected, mismatch(list(prompt), answer.tokens, expected))
        least = sum((len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS for prompt in answers)
        ensure(
            eventually(lambda: from_disk(instance) - before >= least, METRICS_SETTLE_S),
            f"{from_disk(instance) - before:.0f} of {least} tokens came from the store",
        )
        failed = instance.metric("vllm:kv_offload_kvferry_failed_loads_total")
        ensure(failed == 0, f"{failed:.0f} loads failed")
        note.text = f"{from_disk(instance) - before:.0f} tokens from the store"


def killed_while_it_stores(report: Report, instance: Instance, prompts: Prompts) -> None:
    """Kills an instance while requests of all lengths run. What it has put before must be found by the next one."""
    with report.check(f"offload: {instance.name} is killed while it stores and loads"):
        many = [prompts.fresh(length) for length in (1900, 700, 1500, 300) * 2]

        def ask(prompt: Tokens) -> None:
            if prompt is many[5]:
                instance.kill()
                return
            try:
                complete(instance.port, prompt)
            except OSError:
                return

        in_parallel(ask, many, 4)
