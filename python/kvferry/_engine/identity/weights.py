"""A name for the weights at a path, from samples of them."""

from __future__ import annotations

import errno
import hashlib
import importlib
import json
import operator
import os
import re
import stat
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

# Pieces of each tensor of a file that lists its tensors, and of each file that does not: so many, and one for each
# `_SPACING` bytes, evenly from the first byte to the last.
_TENSOR_PIECES, _TENSOR_PIECE_BYTES = 3, 4 << 10
_FILE_PIECES, _FILE_PIECE_BYTES = 16, 64 << 10
_SPACING = 16 << 20
# A larger list of tensors is none. safetensors has the same bound.
_HEADER_MAX = 100_000_000
# Larger configurations are sampled like weights.
_CONFIGURATION_MAX = 16 << 20
# Files of folders within a model's folder that are looked at.
_NESTED_MAX = 10_000
# The kernel follows no more links for one path.
_LINKS_MAX = 40
# Devices answer many reads at once; each thread reads several pieces at a time.
_READERS, _BATCH = 16, 64

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".engine", ".tensors")
_CONFIGURATIONS = (
    "config.json",
    "params.json",
    "adapter_config.json",
    "hf_quant_config.json",
    "quant_config.json",
    "quantize_config.json",
)
# How the processor of a multimodal model prepares images, audio and video.
_PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def folder_of(name: str | None, revision: str | None = None, cache: str | None = None) -> Path | None:
    """Where the files of a model are: its folder or, of a hub's name, that of its snapshot in the hub's cache, whose
    name is the commit.
    """
    if not name:
        return None
    if Path(name).exists():
        return Path(name)
    with suppress(Exception):
        hub = importlib.import_module("huggingface_hub")
        for file in ("config.json", "adapter_config.json"):
            found = hub.try_to_load_from_cache(name, file, revision=revision, cache_dir=cache)
            if isinstance(found, str):
                return Path(found).parent
    return None


class Sample(NamedTuple):
    digest: str
    # If not, `digest` says nothing of the weights.
    has_weights: bool
    # When the path, one of the files, or what leads to them was changed or put there last, in seconds since the epoch.
    changed: float
    # Names what was changed then.
    what: str


def sample_of(path: str | Path | None, *, code: bool = False) -> Sample | None:
    """A hash of the configuration and of samples of the weights, which other weights of one shape do not have.

    `path`: of a directory or a file; None if there is neither. `code`: the model's Python files are run, so they count.
    Only regular files are opened. Raises OSError if a file can't be read.
    """
    if path is None or not Path(path).exists():
        return None
    path = Path(path)
    found = hashlib.sha256()
    named, weights = _files(path, code=code)
    changed = (0.0, "")
    for files, are_weights in ((named, False), (weights, True)):
        for name, file in sorted(files):
            changed = max(changed, (_add(found, name, file, is_weights=are_weights), str(file)))
    # After the files were read, so that a change meanwhile is seen.
    of_files = [file for _, file in named + weights]
    # An entry that was taken out of a folder changes the folder.
    folders = {file.parent for file in of_files} if path.is_dir() else set()
    for it in {path, *of_files, *folders}:
        changed = max(changed, (max(it.lstat().st_ctime, it.stat().st_ctime), str(it)))
    return Sample(found.hexdigest()[:32], bool(weights), *max(changed, _led([path, *of_files])))


def _led(paths: Iterable[Path]) -> tuple[float, str]:
    """When the paths were made to lead where they lead, at the latest: by a rename or a new link somewhere on the way.
    And where that was.

    Either changes both the entry and the folder that has it. A folder alone changes also with each entry that is made
    in it, of another model for example. Entries that are made in a folder and in the one above it look like a rename:
    the times of files do not tell them apart. Only where a file system is mounted they can't be one: the kernel renames
    no mount point.
    """
    led = (0.0, "")
    seen: set[str] = set()
    mounted = _mount_points()
    for path in paths:
        for folder, entry in _way(path):
            if entry not in seen and entry not in mounted:
                seen.add(entry)
                at = min(os.lstat(folder).st_ctime, os.lstat(entry).st_ctime)
                led = max(led, (at, f"{entry}, or something beside it and something in it"))
    return led


# Where file systems are mounted, as this process sees it.
_MOUNTS = Path("/proc/self/mountinfo")


def _mount_points() -> set[str]:
    """Empty if the kernel does not tell."""
    try:
        lines = _MOUNTS.read_bytes().splitlines()
    except OSError:
        return set()
    # The kernel writes spaces and the like as octal numbers.
    points = (line.split(b" ")[4] for line in lines if line.count(b" ") > 4)
    return {os.fsdecode(re.sub(rb"\\([0-7]{3})", lambda it: bytes([int(it[1], 8)]), point)) for point in points}


def _way(path: Path) -> Iterator[tuple[str, str]]:
    """The entries that the kernel looks up for a path, each after the folder that has it: links lead to others."""
    folder, names = "/", deque((path if path.is_absolute() else Path.cwd() / path).parts)
    links = 0
    while names:
        name = names.popleft()
        if name == "/":
            folder = "/"
        elif name == "..":
            folder = os.path.dirname(folder)
        else:
            entry = os.path.join(folder, name)
            yield folder, entry
            if not os.path.islink(entry):
                folder = entry
                continue
            links += 1
            if links > _LINKS_MAX:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
            names.extendleft(reversed(Path(os.readlink(entry)).parts))


def processors_of(path: str | Path | None) -> str | None:
    """A hash of the files by which inputs that are no text are prepared; None if there are none. Raises OSError."""
    found = hashlib.sha256()
    files = [Path(path) / name for name in _PROCESSORS] if path is not None else []
    files = [file for file in files if file.is_file()]
    for file in files:
        _add(found, file.name, file, is_weights=False)
    return found.hexdigest()[:32] if files else None


def has_weights(path: str | Path | None) -> bool:
    return path is not None and Path(path).exists() and bool(_files(Path(path), code=False)[1])


_Named = list[tuple[str, Path]]
# Where a file is read, and how many bytes there.
_Batch = list[tuple[int, int]]


def _files(path: Path, *, code: bool) -> tuple[_Named, _Named]:
    """What is hashed whole, and weights, each with its name below `path`."""
    if not path.is_dir():
        return [], [(path.name, path)] if path.is_file() else []
    here = [file for file in path.iterdir() if file.is_file()]
    suffixes = (".py",) if code else ()
    named = [(file.name, file) for file in here if file.name in _CONFIGURATIONS or file.suffix in suffixes]
    weights = [(file.name, file) for file in here if file.suffix in _WEIGHTS]
    # Other folders in a model's folder have other formats of the same weights, as a rule.
    return named, weights or [(str(it.relative_to(path)), it) for it in _nested(path) if it.suffix in _WEIGHTS]


def _nested(path: Path) -> Iterator[Path]:
    seen = 0
    for folder, folders, files in os.walk(path):
        folders[:] = [it for it in folders if not it.startswith(".")]
        for name in files:
            seen += 1
            if seen > _NESTED_MAX:
                return
            if (Path(folder) / name).is_file():
                yield Path(folder) / name


def _add(found: Any, name: str, path: Path, *, is_weights: bool) -> float:
    """When the file was changed last."""
    # The open of a pipe would wait for its writer.
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(number)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{path} is no regular file")
        nbytes = status.st_size
        found.update(f"{name} {nbytes} ".encode())
        if not is_weights and nbytes <= _CONFIGURATION_MAX:
            found.update(os.pread(number, nbytes, 0))
            return os.fstat(number).st_ctime
        header = _header(number, nbytes) if path.suffix == ".safetensors" else None
        if header is None:
            _add_pieces(found, number, _pieces(0, nbytes, _FILE_PIECES, _FILE_PIECE_BYTES))
            return os.fstat(number).st_ctime
        found.update(header[0])
        begin = 8 + len(header[0])
        tensors = (
            piece
            for first, end in header[1]
            for piece in _pieces(begin + first, end - first, _TENSOR_PIECES, _TENSOR_PIECE_BYTES)
        )
        _add_pieces(found, number, tensors)
        # After it was read, so that a change meanwhile is seen.
        return os.fstat(number).st_ctime
    finally:
        os.close(number)


def _header(number: int, nbytes: int) -> tuple[bytes, list[tuple[int, int]]] | None:
    """The list of tensors in a file of the format safetensors, and where each tensor is; None if it has none."""
    length = int.from_bytes(os.pread(number, 8, 0), "little")
    if not 2 <= length <= min(nbytes - 8, _HEADER_MAX):
        return None
    text = os.pread(number, length, 8)
    try:
        listed = [it["data_offsets"] for name, it in json.loads(text).items() if name != "__metadata__"]
        places = sorted((operator.index(first), operator.index(end)) for first, end in listed)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    if not all(0 <= first <= end <= nbytes - 8 - length for first, end in places):
        return None
    return text, places


def _pieces(begin: int, nbytes: int, least: int, size: int) -> Iterator[tuple[int, int]]:
    """Where a tensor or a file is read, and how many bytes there."""
    if nbytes <= least * size:
        yield begin, nbytes
        return
    count = least + nbytes // _SPACING
    for piece in range(count):
        yield begin + (nbytes - size) * piece // (count - 1), size


def _add_pieces(found: Any, number: int, pieces: Iterator[tuple[int, int]]) -> None:
    def read(batch: _Batch) -> bytes:
        return b"".join(os.pread(number, size, at) for at, size in batch)

    while True:
        # No more than these are in memory at once.
        batches = [list(islice(pieces, _BATCH)) for _ in range(2 * _READERS)]
        for data in _map(read, [batch for batch in batches if batch]):
            found.update(data)
        if not batches[-1]:
            return


def _map(read: Callable[[_Batch], bytes], batches: list[_Batch]) -> list[bytes]:
    """Reads on several threads, in order. The interpreter waits at its exit for a pool's threads, but not for these: a
    file system that does not answer keeps no process from ending.
    """
    found = [b""] * len(batches)
    failed: list[BaseException] = []
    left, lock = iter(range(len(batches))), threading.Lock()

    def run() -> None:
        while not failed:
            with lock:
                at = next(left, None)
            if at is None:
                return
            try:
                found[at] = read(batches[at])
            except BaseException as error:
                failed.append(error)

    threads = []
    for _ in range(min(len(batches), _READERS) - 1):
        thread = threading.Thread(target=run, name="kvferry-weights", daemon=True)
        # Without another thread, this one reads more.
        with suppress(RuntimeError):
            thread.start()
            threads.append(thread)
    run()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return found
