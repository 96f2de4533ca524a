"""Makes unchanged programs that import another transfer library use kvferry, if ``KVFERRY_SHIMS`` names the library.

With ``KVFERRY_SHIMS`` set, ``kvferry_shims.pth`` imports this module at the start of every interpreter. So it lies
beside the package, is cheap, does not load kvferry, and must not fail. It changes nothing on disk: a finder answers for
the modules that kvferry implements before an installed library is looked for; the rest of that library stays reachable.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import ClassVar
else:
    # Any class with the methods is a loader; importing the base class would cost time.
    Loader = object

_NIXL_PACKAGES = ("nixl", "nixl_cu12", "nixl_cu13")
_NIXL_MODULES = ("_api", "_bindings", "_utils", "logging")


def wanted() -> set[str]:
    """The libraries that ``KVFERRY_SHIMS`` names."""
    return {name.strip() for name in os.environ.get("KVFERRY_SHIMS", "").split(",")}


def install() -> None:
    """Installs each finder in the first place, once, if it is wanted. Has no effect on modules imported before."""
    for library, finder in (("mooncake", MooncakeFinder), ("nixl", NixlFinder)):
        if library in wanted() and not any(isinstance(other, finder) for other in sys.meta_path):
            sys.meta_path.insert(0, finder())


class Finder:
    """Finds kvferry's modules of a library, and a stand-in for each of its packages that is not installed."""

    # What kvferry has for a name; the packages, and what a stand-in for one has.
    modules: ClassVar[dict[str, str]]
    packages: ClassVar[dict[str, str | None]]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        ours = self.modules.get(fullname)
        if ours is not None:
            return importlib.machinery.ModuleSpec(fullname, _Loader(ours), origin=ours)
        if fullname in self.packages and not _is_installed(fullname, path):
            loader = _Loader(self.packages[fullname])
            return importlib.machinery.ModuleSpec(fullname, loader, origin="kvferry", is_package=True)
        return None


class MooncakeFinder(Finder):
    modules: ClassVar[dict[str, str]] = {"mooncake.engine": "kvferry.mooncake"}
    packages: ClassVar[dict[str, str | None]] = {"mooncake": None}


class NixlFinder(Finder):
    """All names under which NIXL's Python API is installed."""

    modules: ClassVar[dict[str, str]] = {
        f"{package}.{name}": f"kvferry.nixl.{name}" for package in _NIXL_PACKAGES for name in _NIXL_MODULES
    }
    packages: ClassVar[dict[str, str | None]] = dict.fromkeys(_NIXL_PACKAGES, "kvferry.nixl")


def _is_installed(fullname: str, path: Sequence[str] | None) -> bool:
    for finder in sys.meta_path:
        find_spec = getattr(finder, "find_spec", None)
        if isinstance(finder, Finder) or find_spec is None:
            continue
        if find_spec(fullname, path) is not None:
            return True
    return False


class _Loader(Loader):
    """Fills a module with the public names of one of kvferry's; an empty stand-in if there is none."""

    def __init__(self, ours: str | None) -> None:
        self._ours = ours

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        if self._ours is None:
            module.__doc__ = "A stand-in for a package that is not installed; kvferry provides some of its modules."
            return
        ours = importlib.import_module(self._ours)
        module.__doc__ = ours.__doc__
        module.__file__ = ours.__file__
        module.__all__ = list(ours.__all__)  # type: ignore[attr-defined]
        for name in ours.__all__:
            setattr(module, name, getattr(ours, name))
