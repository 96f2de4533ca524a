"""`e2e/run`: builds the environment, starts the instances, runs the phases, prints the table."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from kvferry_e2e.client import HOST
from kvferry_e2e.environment import VLLM, Environment, vllm_environment
from kvferry_e2e.instance import Connector, Instance, Role
from kvferry_e2e.overlay import kvferry_overlay, mooncake_overlay, moto_overlay, newest_wheel
from kvferry_e2e.pair import Pair
from kvferry_e2e.phases import (
    connector,
    correctness,
    corruption,
    disconnects,
    faults,
    models,
    nixl,
    offload,
    soak,
    survival,
    weights,
)
from kvferry_e2e.phases.connector import Cluster
from kvferry_e2e.prompts import LENGTHS, Prompts
from kvferry_e2e.relay import Relay
from kvferry_e2e.report import CheckError, Report
from kvferry_e2e.router import EXAMPLES, Kind, Router, example, routers_environment
from kvferry_e2e.server import Server, Setup, free_port
from kvferry_e2e.sglang.environment import sglang_overlay
from kvferry_e2e.sglang.part import sglang_phases

CHECKOUT = Path(__file__).resolve().parents[2]
CONNECTORS: dict[str, Connector] = {
    "mooncake": "MooncakeConnector",
    "nixl": "NixlConnector",
    "kvferry": "KVFerryConnector",
}
# The driver of GPUs that are not there, as `make test-wheel` leaves it.
FAKE_DRIVER = CHECKOUT / "target" / "test-wheel" / "libkvferry_fakecuda.so"
# What has vLLM's own connectors import kvferry.
SHIMS: dict[Connector, dict[str, str]] = {
    "MooncakeConnector": {"KVFERRY_SHIMS": "mooncake"},
    "NixlConnector": {"KVFERRY_SHIMS": "nixl"},
}
CHECKSUMS_ON = {"KVFERRY_CHECKSUM": "on"}
# Copies within one host bypass the relay and the peer.
OVER_TCP = {"KVFERRY_TRANSPORTS": "tcp,mooncake"}
# vLLM binds each server to one core and polls there. Linux 6.18 keeps other threads of that core waiting
# for up to 3.6 s, measured, which is longer than the 3 s after which a peer counts as silent. No check
# here is about silence: the peers that die are killed, and their connections are reset.
ON_BUSY_CORES = {"KVFERRY_SILENCE_MS": "20000"}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="e2e/run", description=__doc__)
    parser.add_argument(
        "--connector",
        choices=tuple(CONNECTORS),
        help="only KVFerryConnector, or only vLLM's MooncakeConnector or NixlConnector on kvferry (default: all)",
    )
    parser.add_argument(
        "--engine",
        choices=("kvferry", "mooncake"),
        default="kvferry",
        help="for MooncakeConnector, the implementation of mooncake.engine (mooncake: the stock engine, as a baseline)",
    )
    parser.add_argument(
        "--wheel",
        type=Path,
        help="the kvferry wheel to test (default: the newest in target/wheels)",
    )
    parser.add_argument(
        "--parts",
        nargs="+",
        choices=tuple(PARTS),
        help=f"with KVFerryConnector, what to check (default: {' '.join(DEFAULT_PARTS)}; sglang only with vLLM {VLLM})",
    )
    parser.add_argument(
        "--queue-seconds",
        type=float,
        default=40,
        help="how long a request queues at decode; more than the 30 s that an offer waits (default: %(default)s)",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=4,
        help="of the part weights: how often one of its two instances starts (default: %(default)s)",
    )
    parser.add_argument(
        "--vllm",
        metavar="VERSION",
        default=VLLM,
        help="the version of vLLM, such as 0.31.0; its environment is built in the cache first (default: %(default)s)",
    )
    parser.add_argument("--build-only", action="store_true", help="build the environments and stop")
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error("--rounds must be at least 2")
    if options.parts is None:
        options.parts = [part for part in DEFAULT_PARTS if part != "sglang" or options.vllm == VLLM]
    elif "sglang" in options.parts and options.vllm != VLLM:
        # SGLang runs on what vLLM's environment has, and its other packages are chosen for that of the default.
        parser.error(f"the part sglang needs vLLM {VLLM}")
    return options


class Run:
    """The servers of one run. `close` ends them all."""

    def __init__(self, report: Report, setup: Setup, connector: Connector, *, queue_s: float, rounds: int) -> None:
        self.report = report
        self.setup = setup
        self.connector = connector
        self.queue_s = queue_s
        self.rounds = rounds
        self.servers: list[Server] = []

    def start(
        self,
        name: str,
        role: Role,
        *options: str,
        caching: bool,
        like: Instance | None = None,
        env: Mapping[str, str] | None = None,
        **more: Any,
    ) -> Instance:
        """`like`: a dead instance whose ports the new one reuses, as a restarted server does. `more`: other fields."""
        instance = Instance(
            name=name,
            role=role,
            setup=self.setup,
            connector=self.connector,
            prefix_caching=caching,
            options=options,
            env=env or {},
            **more,
        )
        if like is not None:
            instance.port, instance.bootstrap = like.port, like.bootstrap
        self.servers.append(instance)
        return instance.start()

    def route(self, name: str, kind: Kind, commands: Path, cluster: Cluster) -> Router:
        router = Router(
            name=name,
            kind=kind,
            setup=self.setup,
            commands=commands,
            prefills=cluster.prefills,
            decodes=cluster.decodes,
        )
        self.servers.append(router)
        return router.start()

    def ready(self, *servers: Server) -> None:
        for server in servers:
            self.report.say(f"{server.name} ready after {server.wait_ready():.0f} s")

    def close(self) -> None:
        for server in self.servers:
            server.release()


def contract_phase(run: Run) -> None:
    """As `contract_of`, with both of vLLM's model runners."""
    contract_of(run, "0", "1")


def contract_of(run: Run, *runners: str, only: str = "") -> None:
    """Engine cores with vLLM's schedulers, in a process of their own per model runner: see `kvferry_e2e.contract`.

    `only`: the checks that have it in their names.
    """
    setup = run.setup
    moto = moto_overlay(setup.environment, run.report.say)
    for runner in runners:
        name = f"core-{runner}-part" if only else f"core-{runner}"
        found = setup.folder / f"{name}.json"
        command = [
            str(setup.environment.python),
            "-m",
            "kvferry_e2e.contract",
            str(setup.environment.model),
            str(found),
            only,
        ]
        env = {
            **_contract_env(setup, moto),
            "VLLM_USE_V2_MODEL_RUNNER": runner,
            **setup.engine_env,
        }
        with open(setup.folder / f"{name}.log", "w", encoding="utf-8") as log:
            subprocess.run(command, env=env, stdout=log, stderr=subprocess.STDOUT, timeout=900, check=False)
        run.report.take(found)


def _contract_env(setup: Setup, moto: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": f"{CHECKOUT / 'e2e'}:{setup.site}:{moto}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": HOST,
        "VLLM_LOGGING_LEVEL": "ERROR",
        # A port of the kernel's choice.
        "VLLM_MOONCAKE_BOOTSTRAP_PORT": "0",
    }


def device_contract_phase(run: Run) -> None:
    """As `contract_phase`, with KV in memory of GPUs on the fake driver: see `kvferry_e2e.contract.gpu`."""
    setup = run.setup
    if not FAKE_DRIVER.exists():
        raise CheckError(f"{FAKE_DRIVER.relative_to(CHECKOUT)} is missing: make test-wheel")
    moto = moto_overlay(setup.environment, run.report.say)
    for runner in ("0", "1"):
        found = setup.folder / f"core-gpu-{runner}.json"
        command = [str(setup.environment.python), "-m", "kvferry_e2e.contract.gpu", str(setup.environment.model)]
        env = {
            **_contract_env(setup, moto),
            "VLLM_USE_V2_MODEL_RUNNER": runner,
            "FAKECUDA": "",
            "FAKECUDA_LIBRARY": str(FAKE_DRIVER),
            **setup.engine_env,
        }
        # The fake driver reads the number of its GPUs here.
        env.pop("CUDA_VISIBLE_DEVICES", None)
        with open(setup.folder / f"core-gpu-{runner}.log", "w", encoding="utf-8") as log:
            subprocess.run(
                [*command, str(found)], env=env, stdout=log, stderr=subprocess.STDOUT, timeout=900, check=False
            )
        run.report.take(found)


def router_phases(run: Run) -> None:
    """KVFerryConnector behind routers. Starting an instance takes a minute: each serves as many checks as it can."""
    report, prompts = run.report, Prompts(seed=2026)
    commands = routers_environment(report.say)
    prefill, decode = run.start("p1", "prefill", caching=False), run.start("d1", "decode", caching=False)
    run.ready(prefill, decode)
    cluster = Cluster([prefill], [decode])
    nixl = run.route("vllm-router", "vllm-router", commands, cluster)
    mooncake = run.route("vllm-router mooncake", "vllm-router mooncake", commands, cluster)
    smg = run.route("smg", "smg", commands, cluster)
    run.ready(nixl, mooncake, smg)

    connector.lengths(report, cluster, nixl, prompts, (*LENGTHS, connector.LONGEST))
    connector.lengths(report, cluster, mooncake, prompts, (1, 2, 127, 128, 129, 500, 1500, connector.LONGEST))
    connector.lengths(report, cluster, smg, prompts, (1, 127, 128, 129, 500, 1500))
    for router in (nixl, mooncake, smg):
        connector.ends_at_once(report, cluster, router, prompts)
        connector.logprobs(report, cluster, router, prompts)
        connector.several_answers(report, cluster, router, prompts)
    connector.only_nixls_names(report, cluster, prompts)
    connector.foreign_engine(report, cluster, prompts)
    connector.rejected(report, cluster, prompts)
    connector.streams(report, cluster, nixl, prompts)
    connector.clients_leave(report, cluster, prompts)
    connector.concurrent(report, cluster, nixl, prompts, connector.MANY)
    connector.concurrent(report, cluster, mooncake, prompts, connector.MANY)
    connector.batch(report, cluster, mooncake, prompts, loaded=3)
    _examples(run, commands, cluster, prompts)
    smg.kill()

    # Decode dies first, then prefill. The third instance starts beside them.
    connector.decode_dies(report, cluster, mooncake, prompts)
    # Four workers poll on two cores, so none of them is bound to one. See `Instance.unbound`.
    decode = run.start("d2", "decode", caching=True, like=decode, unbound=True)
    both = run.start("tp2", "prefill", caching=False, tensor_parallel=2)
    run.ready(decode)
    cluster = Cluster([prefill], [decode])
    connector.restarted(report, cluster, (nixl, mooncake), prompts, "decode")
    # Offers that no decode takes: the prefill keeps their blocks until the offers expire, or it dies.
    connector.batch(report, cluster, nixl, prompts, loaded=1)
    connector.wrong_prompt(report, cluster, prompts)
    kept = connector.prefill_dies(report, cluster, nixl, prompts)
    chunks = ("--max-num-batched-tokens", "256", "--enable-chunked-prefill")
    prefill = run.start("p2", "prefill", *chunks, caching=True, like=prefill, unbound=True)
    run.ready(prefill, both)
    cluster = Cluster([prefill], [decode])
    connector.restarted(report, cluster, (nixl, mooncake), prompts, "prefill")
    connector.compare(report, cluster, kept)
    connector.chunked(report, prefill)
    for router in (nixl, mooncake):
        connector.prefix_hits(report, cluster, router, prompts)
        connector.prefix_hits_concurrent(report, cluster, router, prompts)
        connector.several_answers(report, cluster, router, prompts, seeded=False)
    nixl.kill()
    mooncake.kill()

    wide = Cluster([prefill, both], [decode])
    router = run.route("2P1D", "vllm-router", commands, wide)
    run.ready(router)
    connector.spread(report, wide, router, prompts, "TP 1 and TP 2 to TP 1")
    router.kill()
    wide = Cluster([prefill], [decode, both])
    router = run.route("1P2D", "vllm-router mooncake", commands, wide)
    run.ready(router)
    connector.spread(report, wide, router, prompts, "TP 1 to TP 1 and TP 2")
    router.kill()
    instances = [server for server in run.servers if isinstance(server, Instance)]
    faults.stops_when_asked(report, (prefill, decode, both))
    faults.no_crash_in_logs(report, instances)


def survival_phases(run: Run) -> None:
    """What goes wrong between live engines. The strangers start while a request queues."""
    report, prompts = run.report, Prompts(seed=2028)
    secret, other = _secret(run, "one"), _secret(run, "two")
    link = _link(run, secret)
    run.ready(link.prefill, link.decode)
    survival.beside_example(report, link, prompts)

    small: dict[str, Any] = {"caching": False, "cache_mib": 128}
    strangers = [
        run.start("other-secret", "decode", settings=_over_tcp(other), **small),
        run.start("other-model", "decode", settings=_over_tcp(secret), model="other", **small),
        run.start("other-blocks", "decode", "--block-size", "64", settings=_over_tcp(secret), **small),
    ]
    survival.queued(report, link, prompts, run.queue_s)
    run.ready(*strangers)
    reasons = ("the secrets differ", "models do not match", "layouts do not match")
    for stranger, reason in zip(strangers, reasons, strict=True):
        survival.refused(report, link, stranger, prompts, reason)
    survival.refused_blocks_back(report, link, strangers)
    survival.no_secret_shown(report, [link.prefill, link.decode, *strangers])
    for stranger in strangers:
        stranger.kill()
    survival.damaged(report, link, prompts)
    survival.prefill_stops(report, link, prompts)
    survival.decode_stops(report, link, prompts)
    survival.partition(report, link, prompts)
    faults.stops_when_asked(report, (link.prefill, link.decode))
    link.relay.close()
    faults.no_crash_in_logs(report, [link.prefill, link.decode, *strangers])


def _secret(run: Run, name: str) -> Path:
    file = run.setup.scratch / f"secret-{name}"
    file.write_text(f"{survival.HIDDEN}-{name}")
    return file


def _over_tcp(secret: Path) -> dict[str, str]:
    return {"secret_file": str(secret), "transports": "tcp"}


def _link(run: Run, secret: Path) -> survival.Link:
    """A prefill and a decode with checksums and vLLM's ExampleConnector beside; a relay carries their bytes."""
    port = free_port()
    relay = Relay(HOST, port, from_target=True)
    soon: dict[str, Any] = {"unbound": True, "policy": "recompute", "beside_example": True, "cache_mib": 256}
    # Close to the default of 3 s, and longer than threads wait for a core: see `ON_BUSY_CORES`.
    env = CHECKSUMS_ON | {"KVFERRY_SILENCE_MS": "5000"}
    prefill = run.start(
        "p",
        "prefill",
        caching=False,
        env=env | {"KVFERRY_ADVERTISE": f"{HOST}:{relay.port}"},
        settings=_over_tcp(secret) | {"address": f"0.0.0.0:{port}"},
        **soon,
    )
    # One request at a time, so that others can make a request wait.
    decode = run.start("d", "decode", "--max-num-seqs", "1", caching=False, env=env, settings=_over_tcp(secret), **soon)
    return survival.Link(prefill, decode, relay)


def model_phases(run: Run) -> None:
    """Models with windows and states, data parallelism, speculative decoding."""
    report, prompts = run.report, Prompts(seed=2027)
    for model in ("window", "state"):
        prefill = run.start(f"{model}-p", "prefill", caching=False, cache_mib=256, model=model)
        decode = run.start(f"{model}-d", "decode", caching=False, cache_mib=256, model=model)
        run.ready(prefill, decode)
        models.hands_over(report, Cluster([prefill], [decode]), prompts, model)
        faults.stops_when_asked(report, (prefill, decode))
    # Two pipeline stages die in vLLM on the CPU: see docs/vllm.md.
    several = run.start("dp2", "prefill", "--data-parallel-size", "2", caching=False, cache_mib=256, unbound=True)
    guesses = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
    decode = run.start("ngram", "decode", "--speculative-config", json.dumps(guesses), caching=False, cache_mib=256)
    run.ready(several, decode)
    models.hands_over(report, Cluster([several], [decode]), prompts, "DP 2 to speculative decoding")
    models.guesses(report, decode)
    faults.stops_when_asked(report, (several, decode))
    faults.no_crash_in_logs(report, [server for server in run.servers if isinstance(server, Instance)])


def offload_phases(run: Run) -> None:
    """vLLM's own offloading on kvferry's store: instances one after another, and two at once, on one directory."""
    report, prompts = run.report, Prompts(seed=2030)
    kept: dict[str, Any] = {"caching": True, "cache_mib": 256, "unbound": True}
    kept["store"] = {"disk": str(run.setup.scratch / "store"), "disk_gib": 0.5, "host_gib": 0.0625}
    first, second = run.start("o1", "prefill", tensor_parallel=2, **kept), run.start("o2", "decode", **kept)
    run.ready(first, second)
    answers = offload.computed(report, first, prompts)
    offload.loaded(report, second, answers, "TP 2's store serves TP 1 beside it")
    faults.stops_when_asked(report, (first,))
    answers = offload.computed(report, second, prompts)
    offload.killed_while_it_stores(report, second, prompts)
    third = run.start("o3", "decode", **kept)
    run.ready(third)
    offload.loaded(report, third, answers, "after a kill")
    offload.computed(report, third, prompts)
    faults.stops_when_asked(report, (third,))
    faults.no_crash_in_logs(report, [first, third])


def weights_phases(run: Run) -> None:
    """Two instances on one directory, whose weights were under one path when they started."""
    path, store_folder = run.setup.scratch / "weights", run.setup.scratch / "store"
    store = {"disk": str(store_folder), "disk_gib": 0.5, "host_gib": 0.0625}
    # Nothing is made beside the weights while a server starts, which could as well be other weights.
    for folder in (store_folder, run.setup.temporary):
        folder.mkdir(exist_ok=True)

    def start(name: str, number: int) -> Instance:
        kept: dict[str, Any] = {"caching": True, "cache_mib": 256, "unbound": True, "store": store, "model": str(path)}
        instance = run.start(name, ("prefill", "decode")[number], **kept)
        run.ready(instance)
        return instance

    live = weights.restarted_in_turns(run.report, run.setup.environment.models, path, start, run.rounds)
    faults.stops_when_asked(run.report, live)
    faults.no_crash_in_logs(run.report, live)


def soak_phases(run: Run) -> None:
    report, prompts = run.report, Prompts(seed=2029)
    prefill, decode = run.start("s1", "prefill", caching=False), run.start("s-d", "decode", caching=False)
    run.ready(prefill, decode)

    def restart(prefill: Instance) -> Instance:
        prefill.kill()
        again = run.start("s2", "prefill", caching=False, like=prefill)
        run.ready(again)
        return again

    prefill = soak.soak(report, prefill, decode, prompts, 500, restart)
    faults.stops_when_asked(report, (prefill, decode))
    faults.no_crash_in_logs(report, [server for server in run.servers if isinstance(server, Instance)])


def _examples(run: Run, commands: Path, cluster: Cluster, prompts: Prompts) -> None:
    kinds: tuple[Kind, ...] = ("toy proxy", "mooncake proxy")
    for kind in kinds:
        if example(kind) is None:
            run.report.skip(f"{kind} of vLLM's examples", f"vllm-examples/{EXAMPLES[kind]} is not in the cache")
            continue
        router = run.route(kind, kind, commands, cluster)
        run.ready(router)
        connector.lengths(run.report, cluster, router, prompts, (1, 129, 1500))
        router.kill()


def mooncake_phases(run: Run, engine: str) -> None:
    """Starting an instance takes a minute. The faults need new instances in any case, so they run
    between the two big phases.
    """
    report, prompts = run.report, Prompts(seed=2024)
    prefill = run.start("prefill-1", "prefill", caching=False, env={"KVFERRY_LOG": "info"})
    near = run.start("decode-0", "decode", caching=False)
    run.ready(prefill, near)
    if engine == "kvferry":
        correctness.concurrent(report, Pair(prefill, near), prompts, ", within the host")
        correctness.bytes_were_copied(report, prefill)
    near.kill()
    decode = run.start("decode-1", "decode", caching=False, env=OVER_TCP)
    run.ready(decode)
    pair = Pair(prefill, decode)
    correctness.engines_are(report, pair, engine)
    correctness.one_by_one(report, pair, prompts)
    correctness.concurrent(report, pair, prompts)
    corruption.relay_alone(report, pair, prompts)
    corruption.damage_changes_tokens(report, pair, prompts)
    disconnects.run(report, pair, prompts)

    faults.decode_dies_while_written_to(report, pair, prompts)
    decode.kill()
    decode = run.start("decode-2", "decode", caching=True, like=decode, env=CHECKSUMS_ON)
    run.ready(decode)
    pair = Pair(prefill, decode)
    with report.check("restarted decode: right tokens"):
        pair.check_handoff(prompts.fresh(700))

    lost = faults.prefill_dies(report, pair, prompts)
    prefill.kill()
    prefill = run.start("prefill-2", "prefill", caching=True, like=prefill, env=CHECKSUMS_ON)
    run.ready(prefill)
    pair = Pair(prefill, decode)
    with report.check("restarted prefill: right tokens"):
        pair.check_handoff(prompts.fresh(700))
    lost.check(report)
    faults.decode_recovered(report, pair, prompts)

    correctness.engines_are(report, pair, engine)
    correctness.shared_prefixes(report, pair, prompts)
    correctness.shared_prefixes_concurrent(report, pair, prompts)
    correctness.whole_prompt_again(report, pair, prompts)
    if engine == "kvferry":
        corruption.damage_is_caught(report, pair, prompts)
    else:
        report.skip(
            "control: flipped bytes never used, checksums on",
            "Mooncake has no checksums",
        )
    faults.stops_when_asked(report, (pair.prefill, pair.decode))
    faults.no_crash_in_logs(report, [server for server in run.servers if isinstance(server, Instance)])


def nixl_phases(run: Run) -> None:
    """vLLM's NixlConnector on kvferry's `nixl`, within the host and over TCP."""
    report, prompts = run.report, Prompts(seed=2031)
    prefill, decode = run.start("prefill-1", "prefill", caching=False), run.start("decode", "decode", caching=False)
    run.ready(prefill, decode)
    cluster = Cluster([prefill], [decode])
    nixl.one_by_one(report, cluster, prompts)
    nixl.engine_is_kvferrys(report, cluster)
    nixl.together(report, cluster, prompts)
    nixl.prefill_dies(report, cluster, prompts)
    prefill = run.start("prefill-2", "prefill", caching=False, like=prefill, env=OVER_TCP)
    run.ready(prefill)
    nixl.restarted(report, prefill, decode, prompts)
    faults.stops_when_asked(report, (prefill, decode))
    faults.no_crash_in_logs(report, [server for server in run.servers if isinstance(server, Instance)])


# Parts that are not run by default take longer.
PARTS: dict[str, Callable[[Run], None]] = {
    "core": contract_phase,
    "core-v2": lambda run: contract_of(run, "1"),
    # The runners differ in what they tell a connector then.
    "core-v1-raises": lambda run: contract_of(run, "0", only="forward pass raises"),
    "routers": router_phases,
    "survival": survival_phases,
    "models": model_phases,
    "offload": offload_phases,
    "weights": weights_phases,
    "core-gpu": device_contract_phase,
    "soak": soak_phases,
    "sglang": sglang_phases,
}
DEFAULT_PARTS = ("core", "routers", "survival", "sglang")


@contextmanager
def _only_one_run(folder: Path) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit(f"another run uses {folder}")
        yield


@contextmanager
def _run(
    report: Report, venv: Environment, target: Path, wheel: Path | None, name: Connector, options: argparse.Namespace
) -> Iterator[Run]:
    folder = target / "run" / name
    folder.mkdir(parents=True)
    if options.engine == "mooncake":
        site, env = mooncake_overlay(venv, report.say), {}
    else:
        assert wheel is not None
        site, env = kvferry_overlay(venv, wheel, target / "site", report.say), dict(ON_BUSY_CORES)
        env |= SHIMS.get(name, {})
    with tempfile.TemporaryDirectory(prefix="kvferry-e2e-", ignore_cleanup_errors=True) as scratch:
        setup = Setup(venv, site, folder, Path(scratch), env)
        run = Run(report, setup, name, queue_s=options.queue_seconds, rounds=options.rounds)
        report.say(f"logs of the servers: {folder.relative_to(CHECKOUT)}")
        try:
            yield run
        finally:
            run.close()


def _interrupt(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)


def main() -> int:
    options = arguments()
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, _interrupt)
    report = Report()
    target = CHECKOUT / "target" / "e2e"
    with ExitStack() as stack:
        stack.enter_context(_only_one_run(target))
        venv = stack.enter_context(vllm_environment(report.say, options.vllm))
        if options.build_only:
            if "sglang" in options.parts:
                sglang_overlay(venv, report.say)
            return 0
        shutil.rmtree(target / "run", ignore_errors=True)
        if options.engine == "mooncake":
            options.connector = "mooncake"
        wheel = options.wheel or newest_wheel(CHECKOUT)
        if wheel is None and options.engine == "kvferry":
            sys.exit("no wheel in target/wheels: run `make build` first")
        asked = CONNECTORS if options.connector is None else (options.connector,)
        for name in (CONNECTORS[connector] for connector in asked):
            with (
                _run(report, venv, target, wheel, name, options) as run,
                report.check(f"the run with {name} was completed"),
            ):
                if name == "KVFerryConnector":
                    for part in options.parts:
                        PARTS[part](run)
                elif name == "NixlConnector":
                    nixl_phases(run)
                else:
                    mooncake_phases(run, options.engine)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
