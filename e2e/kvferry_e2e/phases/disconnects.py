"""Clients that disconnect: both engines continue to serve and free all blocks."""

from __future__ import annotations

import time

from kvferry_e2e.client import abandonable, complete, new_transfer_id
from kvferry_e2e.pair import Pair
from kvferry_e2e.prompts import Prompts
from kvferry_e2e.report import Report, ensure

SLOW_BYTES_PER_S = 1 << 20


def run(report: Report, pair: Pair, prompts: Prompts) -> None:
    _while_waiting_for_prefill(report, pair, prompts)
    _while_transferring(report, pair, prompts)
    _while_generating(report, pair, prompts)
    _before_asking_decode(report, pair, prompts)
    _before_prefill_is_done(report, pair, prompts)


def _serves_on(pair: Pair, prompts: Prompts) -> str:
    pair.check_handoff(prompts.fresh(500))
    return f"blocks free after {pair.expect_blocks_back():.1f} s"


def _while_waiting_for_prefill(report: Report, pair: Pair, prompts: Prompts) -> None:
    with report.check("client leaves: decode waits, prefill never asked") as note:
        route = pair.route()
        client = abandonable(route.decode, prompts.fresh(600), 24, route.decode_params(new_transfer_id()))
        time.sleep(1)
        ensure(pair.decode.counters().usage > 0, "the decode holds no blocks for the request")
        client.close()
        note.text = _serves_on(pair, prompts)


def _while_transferring(report: Report, pair: Pair, prompts: Prompts) -> None:
    with (
        report.check("client leaves: during the transfer") as note,
        pair.relayed() as relay,
    ):
        relay.bytes_per_s = SLOW_BYTES_PER_S
        route, transfer, prompt = pair.route(), new_transfer_id(), prompts.fresh(1100)
        begun = pair.prefill.records.writes_begun()
        client = abandonable(route.decode, prompt, 24, route.decode_params(transfer))
        complete(route.prefill, prompt, 1, route.prefill_params(transfer))
        time.sleep(1)
        ensure(pair.prefill.records.writes_begun() == begun + 1, "the prefill's write has not begun")
        ensure(len(pair.prefill.records.writes()) == begun, "the prefill's write is over already")
        client.close()
        time.sleep(0.5)
        relay.bytes_per_s = None
        note.text = _serves_on(pair, prompts)


def _while_generating(report: Report, pair: Pair, prompts: Prompts) -> None:
    with report.check("client leaves: decode generates") as note:
        route, transfer, prompt = pair.route(), new_transfer_id(), prompts.fresh(300)
        client = abandonable(route.decode, prompt, 1500, route.decode_params(transfer))
        complete(route.prefill, prompt, 1, route.prefill_params(transfer))
        ensure(client.recv(1 << 16).startswith(b"HTTP/1.1 200"), "no first token")
        client.close()
        note.text = _serves_on(pair, prompts)


def _before_asking_decode(report: Report, pair: Pair, prompts: Prompts) -> None:
    with report.check("client leaves: prefill done, decode never asked") as note:
        route = pair.route()
        complete(route.prefill, prompts.fresh(600), 1, route.prefill_params(new_transfer_id()))
        note.text = _serves_on(pair, prompts)


def _before_prefill_is_done(report: Report, pair: Pair, prompts: Prompts) -> None:
    with report.check("client leaves: both, before prefill is done") as note:
        route, transfer, prompt = pair.route(), new_transfer_id(), prompts.fresh(1900)
        clients = [
            abandonable(route.decode, prompt, 24, route.decode_params(transfer)),
            abandonable(route.prefill, prompt, 1, route.prefill_params(transfer)),
        ]
        time.sleep(0.02)
        for client in clients:
            client.close()
        note.text = _serves_on(pair, prompts)
