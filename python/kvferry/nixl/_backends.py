"""NIXL's backends, of which kvferry is two: "UCX" moves memory between agents, "POSIX" between memory and files."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from typing import Final

from kvferry._engine.log import logger_of
from kvferry.nixl._bindings import nixl_mem_t
from kvferry.nixl._errors import nixlBackendError, nixlInvalidParamError, nixlNotFoundError

_log = logger_of("nixl")

_MEMS: Final = {"UCX": ["DRAM", "VRAM"], "POSIX": ["DRAM", "VRAM", "FILE"]}
# Engines on the CPU call their memory VRAM, too.
_KINDS: Final = {
    nixl_mem_t.DRAM_SEG: ("UCX", "POSIX"),
    nixl_mem_t.VRAM_SEG: ("UCX", "POSIX"),
    nixl_mem_t.FILE_SEG: ("POSIX",),
}


class Backends:
    """The backends of an agent. Their parameters have no effect."""

    def __init__(self, wanted: Iterable[str] | None) -> None:
        self.plugin_list = list(_MEMS)
        self.backends: dict[str, int] = {}
        self.backend_mems: dict[str, list[str]] = {}
        self.backend_options: dict[str, dict[str, str]] = {}
        for name in self.plugin_list if wanted is None else wanted:
            if name in _MEMS:
                self.create_backend(name)
            else:
                _log.warning("kvferry has no backend %s; it has %s", name, ", ".join(_MEMS))

    def create_backend(self, backend: str, initParams: dict[str, str] | None = None) -> None:  # noqa: N803
        if backend not in _MEMS:
            raise nixlNotFoundError(f"kvferry has no backend {backend!r}; it has {', '.join(_MEMS)}")
        if backend in self.backends:
            raise nixlInvalidParamError(f"the backend {backend} was created before")
        self.backends[backend] = len(self.backends) + 1
        self.backend_mems[backend] = list(_MEMS[backend])
        self.backend_options[backend] = dict(initParams or {})

    def _remove_backend(self, backend: str) -> None:
        for table in (self.backends, self.backend_mems, self.backend_options):
            table.pop(backend)

    def get_plugin_list(self) -> list[str]:
        return self.plugin_list

    def get_plugin_mem_types(self, backend: str) -> list[str]:
        if backend not in _MEMS:
            _log.warning("kvferry has no backend %s", backend)
        return list(_MEMS.get(backend, ()))

    def get_plugin_params(self, backend: str) -> dict[str, str]:
        if backend not in _MEMS:
            _log.warning("kvferry has no backend %s", backend)
        return {}

    def get_backend_mem_types(self, backend: str) -> list[str]:
        if backend not in self.backends:
            _log.warning("no backend %s was created", backend)
        return self.backend_mems.get(backend, [])

    def get_backend_params(self, backend: str) -> dict[str, str]:
        if backend not in self.backends:
            _log.warning("no backend %s was created", backend)
        return self.backend_options.get(backend, {})

    def _handles(self, names: Iterable[str]) -> None:
        """KeyError for a backend that was not created."""
        for name in names:
            self.backends[name]

    def _must_have(self, kind: nixl_mem_t, names: Iterable[str]) -> None:
        """nixlBackendError unless a backend, or one of those named, takes this kind of memory."""
        self._handles(names)
        usable = set(names) or set(self.backends)
        if usable.isdisjoint(_KINDS.get(kind, ())):
            raise nixlBackendError(
                f"no backend takes {kind.name}: kvferry's nixl moves host memory (DRAM) and memory of GPUs (VRAM), "
                "with the backend POSIX also files (FILE)"
            )


def file_facts(meta: str) -> dict[str, str] | None:
    """What is known of a file, by its path or a registration's `meta`; None if there is none."""
    try:
        found = os.stat(meta.partition(":")[2] if meta.startswith(("ro:", "ro,", "rw:", "rw,")) else meta)
    except OSError:
        return None
    return {"size": str(found.st_size), "mode": str(stat.S_IMODE(found.st_mode)), "mtime": str(int(found.st_mtime))}
