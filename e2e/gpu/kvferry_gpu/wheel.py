"""The wheel that users get, in a folder of its own."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

from . import process
from .report import Part

#: Folders that this run has installed the wheel in.
_INSTALLED: set[Path] = set()


def installed(part: Part, options: argparse.Namespace, out: Path) -> Path | None:
    """The folder with kvferry for PYTHONPATH. None, with the reason in `part`, if something is missing or can't be
    installed.
    """
    missing = [name for name in ("pytest", "torch") if importlib.util.find_spec(name) is None]
    if missing:
        part.skip(f"{sys.executable} has no {' and no '.join(missing)}")
        return None
    wheels = sorted(options.packed.glob("kvferry-*.whl"))
    if not wheels:
        part.skip("there is no wheel beside the tests")
        return None
    site = out / "site"
    if site not in _INSTALLED:
        # Replaces the files of another wheel that an earlier run may have left.
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--upgrade"]
        ended = process.run([*install, "--target", str(site), str(wheels[-1])], out / "install.log", 120)
        if ended.status != 0:
            part.failed["installing the wheel"] = f"{ended.how}: {ended.output.strip()[-300:]}"
            return None
        _INSTALLED.add(site)
    return site
