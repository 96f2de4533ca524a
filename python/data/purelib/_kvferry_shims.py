"""Makes unchanged programs that import another transfer library use kvferry, if ``KVFERRY_SHIMS`` names the library.

With ``KVFERRY_SHIMS`` set, ``kvferry_shims.pth`` imports this module at the start of every interpreter. So it lies
beside the package, is cheap, does not load kvferry, and must not fail. It changes nothing on disk: a finder answers for
``mooncake.engine`` before an installed Mooncake is looked for; the rest of Mooncake stays reachable.
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
else:
    # Any class with the methods is a loader; importing the base class would cost time.
    Loader = object

_ENGINE = "mooncake.engine"
_PARENT = "mooncake"


def wanted() -> set[str]:
    """The libraries that ``KVFERRY_SHIMS`` names."""
    return {name.strip() for name in os.environ.get("KVFERRY_SHIMS", "").split(",")}


def install() -> None:
    """Installs the finder in the first place, once, if it is wanted. Has no effect on an engine imported before."""
    if "mooncake" in wanted() and not any(isinstance(finder, MooncakeFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, MooncakeFinder())


class MooncakeFinder:
    """Finds kvferry's ``mooncake.engine``, and an empty ``mooncake`` package if none is installed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == _ENGINE:
            return importlib.machinery.ModuleSpec(fullname, _EngineLoader(), origin="kvferry.mooncake")
        if fullname == _PARENT and not _is_installed(fullname, path):
            return importlib.machinery.ModuleSpec(fullname, _ParentLoader(), origin="kvferry", is_package=True)
        return None


def _is_installed(fullname: str, path: Sequence[str] | None) -> bool:
    for finder in sys.meta_path:
        find_spec = getattr(finder, "find_spec", None)
        if isinstance(finder, MooncakeFinder) or find_spec is None:
            continue
        if find_spec(fullname, path) is not None:
            return True
    return False


class _EngineLoader(Loader):
    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        engine = importlib.import_module("kvferry.mooncake")
        module.__doc__ = engine.__doc__
        module.__file__ = engine.__file__
        module.__all__ = list(engine.__all__)  # type: ignore[attr-defined]
        for name in engine.__all__:
            setattr(module, name, getattr(engine, name))


class _ParentLoader(Loader):
    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__doc__ = "A stand-in for Mooncake, which is not installed; kvferry provides mooncake.engine only."
