"""The part `sglang` of `e2e/run`. A server takes half a minute of two cores to start: each serves several checks."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvferry_e2e.overlay import mooncake_overlay
from kvferry_e2e.prompts import Prompts
from kvferry_e2e.sglang import checks
from kvferry_e2e.sglang.environment import sglang_overlay
from kvferry_e2e.sglang.server import SGLang, SGLangRouter, environment_of, generate

if TYPE_CHECKING:
    from kvferry_e2e.__main__ import Run


def sglang_phases(run: Run) -> None:
    report, prompts = run.report, Prompts(seed=2031)
    overlay = sglang_overlay(run.setup.environment, report.say)

    def start(name: str, role: Literal["both", "prefill", "decode"], like: SGLang | None = None, **more: Any) -> SGLang:
        """`like`: a dead server whose ports the new one takes."""
        ports = {} if like is None else {"port": like.port, "bootstrap": like.bootstrap}
        server = SGLang(name=f"sglang-{name}", role=role, setup=run.setup, overlay=overlay, **ports, **more)
        run.servers.append(server)
        server.start()
        return server

    alone, p1, d1 = start("alone", "both"), start("p1", "prefill"), start("d1", "decode")
    run.ready(alone, p1, d1)
    answers = checks.references(report, alone, prompts)
    alone.kill()
    # They start while these two are checked.
    p2, d2 = start("p2", "prefill"), start("d2", "decode")
    checks.equal(report, "1P1D, one by one", answers[:20], checks.through([p1], [d1]), width=1)
    checks.decode_uses_prefills_kv(report, p1, d1, answers)
    checks.equal(report, "1P1D", answers, checks.through([p1], [d1]))
    checks.engine_is_kvferry(report, run.setup.environment.python, (p1, d1))
    run.ready(p2, d2)

    router = SGLangRouter(name="sglang-router", setup=run.setup, prefills=[p1, p2], decodes=[d1], overlay=overlay)
    run.servers.append(router)
    router.start()
    checks.equal(report, "1P2D", answers, checks.through([p1], [d1, d2]))
    run.ready(router)
    checks.equal(report, "2P1D behind sglang-router", answers, lambda _, prompt: generate(router.port, prompt))
    router.kill()
    p2.kill()
    d2.kill()

    # Decode waits for most of this time.
    with _hicache(run, overlay):
        checks.prefill_dies(report, p1, d1, answers)
        again = start("p1-again", "prefill", like=p1)
        pairs = _stock_pair(run, start)
        nixl = start("p-nixl", "prefill", shim="nixl"), start("d-nixl", "decode", shim="nixl")
        run.ready(again, *pairs, *nixl)
    checks.works_again(report, again, d1, answers)
    checks.equal(report, "1P1D, prefill restarted", answers, checks.through([again], [d1]))
    if pairs:
        stock_prefill, stock_decode = pairs
        checks.equal(report, "stock Mooncake to kvferry", answers, checks.through([stock_prefill], [d1]))
        checks.equal(report, "kvferry to stock Mooncake", answers, checks.through([again], [stock_decode]))
    nixl_again = _over_nixl(run, *nixl, answers, start)
    servers = [server for server in run.servers if isinstance(server, SGLang)]
    checks.no_crash(report, servers, [d1, again, *pairs, nixl[1], nixl_again])
    for server in servers:
        server.kill()


def _over_nixl(run: Run, prefill: SGLang, decode: SGLang, answers: checks.Answers, start: Any) -> SGLang:
    """The same through SGLang's NIXL backend. Returns the restarted prefill."""
    report = run.report
    checks.equal(report, "1P1D on nixl", answers, checks.through([prefill], [decode]))
    checks.decode_uses_prefills_kv(report, prefill, decode, answers)
    checks.engine_is_kvferry(report, run.setup.environment.python, (prefill, decode))
    checks.prefill_dies(report, prefill, decode, answers)
    again: SGLang = start("p-nixl-again", "prefill", like=prefill, shim="nixl")
    run.ready(again)
    checks.works_again(report, again, decode, answers)
    return again


@contextmanager
def _hicache(run: Run, overlay: Path) -> Iterator[None]:
    """Runs the checks of `KVFerryStorage` beside the block: see `kvferry_e2e.sglang.hicache`."""
    setup = run.setup
    found = setup.folder / "hicache.json"
    env = environment_of(setup.site, overlay, None, setup.scratch)
    env["PYTHONPATH"] += f":{Path(__file__).parents[2]}"
    command = [str(setup.environment.python), "-m", "kvferry_e2e.sglang.hicache"]
    with (
        open(setup.folder / "hicache.log", "w", encoding="utf-8") as log,
        subprocess.Popen(
            [*command, str(setup.environment.models), str(found)], env=env, stdout=log, stderr=subprocess.STDOUT
        ) as checks_of_storage,
    ):
        try:
            yield
            checks_of_storage.wait(timeout=600)
        finally:
            checks_of_storage.kill()
    run.report.take(found)
    with run.report.check("hicache: all checks were run"):
        checks.ensure(checks_of_storage.returncode in (0, 1), f"{log.name} ends with {checks_of_storage.returncode}")


def _stock_pair(run: Run, start: Any) -> list[SGLang]:
    """A prefill and a decode on the stock Mooncake, if it runs here."""
    try:
        stock = mooncake_overlay(run.setup.environment, run.report.say)
    except RuntimeError as error:
        run.report.skip("sglang: stock Mooncake at one end", str(error).splitlines()[0])
        return []
    return [start("p-stock", "prefill", stock=stock), start("d-stock", "decode", stock=stock)]
