"""Controls: the comparison of tokens does notice a damaged transfer, and checksums keep the damage
from being used.
"""

from __future__ import annotations

from kvferry_e2e.client import Tokens
from kvferry_e2e.pair import Pair, mismatch
from kvferry_e2e.prompts import Prompts
from kvferry_e2e.relay import Damage, Relay
from kvferry_e2e.report import Report, ensure

PROMPT_TOKENS = 900
# Well inside the payload of a stream, and enough of it that attention cannot miss it.
SKIP_BYTES = 160_000
DAMAGED_BYTES = 16_384


def relay_alone(report: Report, pair: Pair, prompts: Prompts) -> None:
    """Without this one the two below could be the relay's own doing."""
    with (
        report.check("control: relayed undamaged, tokens right") as note,
        pair.relayed() as relay,
    ):
        pair.check_handoff(prompts.fresh(PROMPT_TOKENS))
        ensure(relay.carried > SKIP_BYTES, f"only {relay.carried} bytes went through the relay")
        note.text = f"{relay.carried} bytes relayed"


def damage_changes_tokens(report: Report, pair: Pair, prompts: Prompts) -> None:
    """No checksums: the decode uses what it got."""
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
        ensure(answer.status == 200, f"the damage was noticed, or hit more than payload: {answer}")
        ensure(
            answer.tokens != reference,
            "the tokens are right all the same: this test could not see a bad transfer",
        )
        note.text = f"{damage.flipped} bytes flipped, {_differing(answer.tokens, reference)} tokens differ"


def damage_is_caught(report: Report, pair: Pair, prompts: Prompts) -> None:
    """With checksums the same damage may cost the request, never its truth; and the next request is
    as good as any.
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
