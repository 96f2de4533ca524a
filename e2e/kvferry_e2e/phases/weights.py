"""Two instances with different weights, which were under one path when each started, on one store.

The weights of a path change while the instances come and go: a server loads the files that are there when it starts.
The instances are restarted in turns, and each must say what its own weights say, although the other one stores the KV
of the same prompts. The models have one layout and one configuration: nothing but the weights tells their KV apart.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from kvferry_e2e.client import Tokens, complete
from kvferry_e2e.instance import Instance
from kvferry_e2e.pair import METRICS_SETTLE_S, eventually, mismatch
from kvferry_e2e.phases.offload import from_disk
from kvferry_e2e.prompts import BLOCK_TOKENS, Prompts
from kvferry_e2e.report import Report, ensure

# Folders of make_model.py.
MODELS = ("llama", "other")
LENGTHS = (129, 300, 700)
# Prompts that are new in each round, so that each round also stores.
FRESH = 257


def place(models: Path, name: str, path: Path) -> None:
    """Puts a model's files under `path`, in place of those that are there, as a deployment does: by renames."""
    path.mkdir(exist_ok=True)
    for file in (models / name).iterdir():
        partial = path / f".{file.name}"
        shutil.copyfile(file, partial)
        partial.rename(path / file.name)


def restarted_in_turns(
    report: Report, models: Path, path: Path, start: Callable[[str, int], Instance], rounds: int
) -> list[Instance]:
    """`start` makes an instance, number 0 or 1 of the two, that has loaded what is under `path`."""
    prompts = Prompts(seed=2034)
    shared = [prompts.fresh(length) for length in LENGTHS]
    live: list[Instance | None] = [None, None]
    # What each of the two models says of the shared prompts.
    said: dict[int, list[Tokens]] = {}
    loaded = 0.0
    with report.check(f"weights: two models under one path, {rounds} starts in turns: no wrong token") as note:
        for number in range(rounds):
            at = number % 2
            _end(live[at], is_asked=number % 4 < 2)
            place(models, MODELS[at], path)
            instance = live[at] = start(f"w{number}-{MODELS[at]}", at)
            answers = [_tokens(instance, prompt) for prompt in shared]
            for prompt, tokens, own in zip(shared, answers, said.setdefault(at, answers), strict=True):
                ensure(tokens == own, f"start {number}: {mismatch(prompt, tokens, own)}")
            new = prompts.fresh(FRESH)
            tokens = _tokens(instance, new)
            other = live[1 - at]
            if other is not None:
                # It still serves its own weights, which are not those under the path any more.
                for prompt, own in zip(shared, said[1 - at], strict=True):
                    ensure(_tokens(other, prompt) == own, f"start {number}: {other.name} says something else")
                is_seen = said[0] != said[1] and _tokens(other, new) != tokens
                ensure(is_seen, "both models say the same, so a wrong hit would not show")
            if number < 2:
                _wait_stored(instance, prompts)
            else:
                loaded += _wait_loaded(instance)
            report.say(f"weights: start {number + 1} of {rounds}: right tokens")
        note.text = f"{loaded:.0f} tokens from the store"
    return [instance for instance in live if instance is not None]


def _end(instance: Instance | None, *, is_asked: bool) -> None:
    if instance is not None and is_asked:
        instance.stop()
    elif instance is not None:
        instance.kill()


def _wait_stored(instance: Instance, prompts: Prompts) -> None:
    """Until the shared prompts are in the store. A store begins with the request after."""
    _tokens(instance, prompts.fresh(5))
    least = sum(length // BLOCK_TOKENS for length in LENGTHS)

    def stored() -> float:
        return instance.metric("vllm:kv_offload_kvferry_put_blocks_total", 'outcome="stored"')

    ensure(eventually(lambda: stored() >= least, METRICS_SETTLE_S), f"{stored():.0f} of {least} blocks are stored")


def _wait_loaded(instance: Instance) -> float:
    """The tokens of the shared prompts that came from the store: all that its model has stored in its first start."""
    least = sum((length - 1) // BLOCK_TOKENS * BLOCK_TOKENS for length in LENGTHS)
    is_loaded = eventually(lambda: from_disk(instance) >= least, METRICS_SETTLE_S)
    ensure(is_loaded, f"{instance.name}: {from_disk(instance):.0f} of {least} tokens came from the store")
    return from_disk(instance)


def _tokens(instance: Instance, prompt: Tokens) -> Tokens:
    answer = complete(instance.port, prompt)
    ensure(answer.status == 200, f"{instance.name}: {answer}")
    return answer.tokens
