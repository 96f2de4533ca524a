"""vLLM's own NixlConnector on kvferry's `nixl`: tokens as of a single instance, and a prefill that dies."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from kvferry_e2e.client import Answer, Tokens, complete, in_parallel
from kvferry_e2e.instance import Instance
from kvferry_e2e.pair import mismatch
from kvferry_e2e.phases.connector import BLOCKS_BACK_S, FAILED_WITHIN_S, Cluster, offer
from kvferry_e2e.phases.correctness import is_stock
from kvferry_e2e.prompts import Prompts
from kvferry_e2e.report import Report, ensure

LENGTHS = (2, 5, 64, 127, 128, 129, 200, 255, 256, 257, 300, 384, 512, 600, 777, 1000, 1024, 1100, 1280, 1500)
TOGETHER = 8
# NixlConnector's lease of a request's blocks, after which it would give a dead peer's request up.
LEASE_S = 30.0


def engine_is_kvferrys(report: Report, cluster: Cluster) -> None:
    """The connector is that of vLLM's wheel; no process has loaded UCX or NIXL, one of each instance has kvferry."""
    with report.check("stock NixlConnector on kvferry's nixl") as note:
        instances = (*cluster.prefills, *cluster.decodes)
        site = next(cluster.prefills[0].setup.environment.python.parents[1].glob("lib/python*/site-packages"))
        files = sorted((site / "vllm/distributed/kv_transfer/kv_connector/v1/nixl").glob("*.py"))
        ensure(files, "vLLM's wheel has no NixlConnector")
        for file in (*files, site / "vllm/distributed/nixl_utils.py"):
            is_stock(file)
        for instance in instances:
            loaded = [_libraries(process) for process in instance.members()]
            foreign = {name for names in loaded for name in names if name.startswith(("libucp", "libnixl", "libuct"))}
            ensure(not foreign, f"{instance.name} has loaded {sorted(foreign)}")
            ensure(any("_kvferry.abi3.so" in names for names in loaded), f"{instance.name} has not loaded kvferry")
        note.text = f"{len(files) + 1} files as in vLLM's wheel"


def _libraries(process: int) -> set[str]:
    try:
        lines = Path(f"/proc/{process}/maps").read_text().splitlines()
    except OSError:
        return set()
    return {Path(line.split(maxsplit=5)[5]).name for line in lines if line.count("/")}


def _handoff(cluster: Cluster, prompt: Tokens) -> Answer:
    """As a router does it: prefill, then decode with the parameters of the prefill's answer."""
    return complete(cluster.decodes[0].port, prompt, params=offer(cluster.prefills[0], prompt))


def _expect_right(cluster: Cluster, prompts: Sequence[Tokens], answers: Sequence[Answer]) -> None:
    for prompt, answer in zip(prompts, answers, strict=True):
        ensure(answer.status == 200, f"{len(prompt)} tokens: {answer}")
        reference = cluster.alone(prompt)
        ensure(answer.tokens == reference.tokens, mismatch(prompt, answer.tokens, reference.tokens))


def one_by_one(report: Report, cluster: Cluster, prompts: Prompts) -> None:
    with report.check("NixlConnector: a single instance's tokens, prompt loaded") as note:
        for length in LENGTHS:
            prompt, before = prompts.fresh(length), cluster.sources()
            _expect_right(cluster, [prompt], [_handoff(cluster, prompt)])
            cluster.expect_loaded(before, 1, length)
        back = cluster.expect_blocks_back(BLOCKS_BACK_S)
        note.text = f"{len(LENGTHS)} prompts of {LENGTHS[0]} to {LENGTHS[-1]} tokens; {back}"


def together(report: Report, cluster: Cluster, prompts: Prompts) -> None:
    with report.check(f"NixlConnector: {TOGETHER} at a time") as note:
        many, before = [prompts.fresh(length) for length in LENGTHS], cluster.sources()
        answers = in_parallel(lambda prompt: _handoff(cluster, prompt), many, TOGETHER)
        _expect_right(cluster, many, answers)
        cluster.expect_loaded(before, len(many), sum(map(len, many)))
        note.text = f"{len(many)} prompts; {cluster.expect_blocks_back(BLOCKS_BACK_S)}"


def prefill_dies(report: Report, cluster: Cluster, prompts: Prompts) -> None:
    """Kills the prefill, whose offer decode then takes. The caller starts another."""
    (prefill,), (decode,) = cluster.prefills, cluster.decodes
    with report.check("prefill SIGKILLed: NixlConnector fails the request in seconds") as note:
        prompt = prompts.fresh(1000)
        params = offer(prefill, prompt)
        prefill.kill()
        start = time.monotonic()
        answer = complete(decode.port, prompt, params=params)
        took = time.monotonic() - start
        ensure(answer.status >= 500, f"instead of an error: {answer}")
        ensure(took < FAILED_WITHIN_S, f"it took {took:.1f} s")
        ensure(decode.alive(), "the decode died too")
        ensure(decode.log_has("transfer_failed|transfer_exception"), "the decode's log does not show a failed transfer")
        note.text = f"HTTP {answer.status} after {took:.2f} s; the connector's lease is {LEASE_S:.0f} s"
    with report.check("prefill SIGKILLed: decode frees the blocks") as note:
        note.text = Cluster([], [decode]).expect_blocks_back()


def restarted(report: Report, prefill: Instance, decode: Instance, prompts: Prompts) -> None:
    with report.check("prefill restarted: NixlConnector loads from it") as note:
        cluster = Cluster([prefill], [decode])
        prompt, before = prompts.fresh(700), cluster.sources()
        start = time.monotonic()
        _expect_right(cluster, [prompt], [_handoff(cluster, prompt)])
        cluster.expect_loaded(before, 1, len(prompt))
        note.text = f"{time.monotonic() - start:.1f} s"
