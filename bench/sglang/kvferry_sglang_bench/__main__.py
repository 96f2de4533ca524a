"""KVFerryStorage beside kvferry.Store and SGLang's file back-end: GiB/s and ratios. Exit code 1 if short."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from kvferry_e2e.environment import vllm_environment
from kvferry_e2e.overlay import kvferry_overlay, newest_wheel
from kvferry_e2e.progress import Progress
from kvferry_e2e.sglang.environment import sglang_overlay
from kvferry_e2e.sglang.server import environment_of

CHECKOUT = Path(__file__).resolve().parents[3]


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench/sglang/run", description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk to measure [the working folder]")
    parser.add_argument("--rounds", type=int, default=9, help="7 or more to judge by [9]")
    parser.add_argument("--page-kib", type=int, nargs="+", default=[64, 256, 1024, 2048], choices=(64, 256, 1024, 2048))
    parser.add_argument("--layout", default="page_first", help="of SGLang's host pool [page_first]")
    parser.add_argument("--wheel", type=Path, help="the kvferry wheel [the newest in target/wheels]")
    options = parser.parse_args()
    progress = Progress()
    wheel = options.wheel or newest_wheel(CHECKOUT)
    if wheel is None:
        sys.exit("no wheel in target/wheels: run `make build` first")
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-sglang-") as scratch, vllm_environment(progress.say) as venv:
        site = kvferry_overlay(venv, wheel, Path(scratch) / "site", progress.say)
        overlay = sglang_overlay(venv, progress.say)
        env = environment_of(site, overlay, None, Path(scratch))
        del env["KVFERRY_LOG"]
        env["PYTHONPATH"] += f":{CHECKOUT / 'e2e'}:{CHECKOUT / 'bench' / 'sglang'}"
        command = [str(venv.python), "-m", "kvferry_sglang_bench.measure", str(options.folder.absolute())]
        words = [str(options.rounds), options.layout, *map(str, options.page_kib)]
        return subprocess.run([*command, *words], env=env, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
