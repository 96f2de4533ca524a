"""Controls: comparing tokens detects a damaged transfer, and with checksums damage is never used."""

from __future__ import annotations

from kvferry_e2e.client import Tokens
from kvferry_e2e.pair import Pair, mismatch
from kvferry_e2e.prompts import Prompts
from kvferry_e2e.relay import Damage, Relay
from kvferry_e2e.report import Report, ensure

PROMPT_TOKENS = 900
# Inside the payload of a stream, and enough bytes to change the attention.
SKIP_BYTES = 160_000
DAMAGED_BYTES = 16_384


def relay_alone(report: Report, pair: Pair, prompts: Prompts) -> None:
    """Shows that the relay itself causes no failure of the checks below."""
    with (
        report.check("control: relayed undamaged, tokens right") as note,
        pair.relayed() as relay,
    ):
        pair.check_handoff(prompts.fresh(PROMPT_TOKENS))
        ensure(relay.carried > SKIP_BYTES, f"only {relay.carried} bytes went through the relay")
        note.text = f"{relay.carried} bytes relayed"


def damage_changes_tokens(report: Report, pair: Pair, prompts: Prompts) -> None:
    """Without checksums the decode uses the damaged bytes."""
    name = "control: flipped bytes change the tokens, checksums off"
    with report.check(name) as note, pair.relayed() as relay:
        prompt = prompts.fresh(PROMPT_TOKENS)
        reference = pair.alone(prompt)
        damage = order_damage(relay)
        answer = pair.handoff(prompt)
        ensure(
            damage.flipped == DAMAGED_BYTES,
            f"{damage.flipped} bytes were flipped, not {DAMAGED_BYTES}",
        )
        ensure(answer.status == 200, f"the damage was detected, or hit more than payload: {answer}")
        ensure(
            answer.tokens != reference,
            "the tokens are the reference: this test can't detect a bad transfer",
        )
        note.text = f"{damage.flipped} bytes flipped, {_differing(answer.tokens, reference)} tokens differ"


def damage_is_caught(report: Report, pair: Pair, prompts: Prompts) -> None:
    """With checksums the same damage may fail the request but never gives wrong tokens; the next
    request succeeds.
    """
    name = "control: flipped bytes never used, checksums on"
    with report.check(name) as note, pair.relayed() as relay:
        prompt = prompts.fresh(PROMPT_TOKENS)
        damage = order_damage(relay)
        answer = pair.handoff(prompt)
        ensure(
            damage.flipped == DAMAGED_BYTES,
            f"{damage.flipped} bytes were flipped, not {DAMAGED_BYTES}",
        )
        if answer.status == 200:
            reference = pair.alone(prompt)
            ensure(
                answer.tokens == reference,
                "the damage was used: " + mismatch(prompt, answer.tokens, reference),
            )
            note.text = "sent again or computed: right tokens"
        else:
            note.text = f"HTTP {answer.status}"
        note.text += f"; the prefill's write ended with {pair.prefill.records.last_write()}"
    with report.check("control: the next request is right"):
        pair.check_handoff(prompts.fresh(PROMPT_TOKENS))


def order_damage(relay: Relay) -> Damage:
    relay.damage = Damage(skip=SKIP_BYTES, length=DAMAGED_BYTES)
    return relay.damage


def _differing(a: Tokens, b: Tokens) -> str:
    return f"{sum(x != y for x, y in zip(a, b, strict=True))} of {len(b)}"
