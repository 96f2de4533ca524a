"""What operators see of `kvferry.vllm`: its metrics are the same in the code, in docs/vllm.md and on the dashboard, and so
are the versions of vLLM.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

from kvferry.vllm._of_vllm import TRIED

ROOT = Path(__file__).parents[2]


def in_code() -> set[str]:
    """The names given to Prometheus; the module needs vLLM, so it is read and not imported."""
    tree = ast.parse((ROOT / "python/kvferry/vllm/_stats.py").read_text())
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case (
                ast.AnnAssign(target=ast.Name(id="_REASONED" | "_PLAIN"), value=ast.Dict(keys=keys))
                | ast.Assign(targets=[ast.Name(id="_REASONED" | "_PLAIN")], value=ast.Dict(keys=keys))
            ):
                names |= {f"{key.value}_total" for key in keys if isinstance(key, ast.Constant)}
            case ast.Assign(targets=[ast.Name(id="_GAUGES")], value=ast.Dict(keys=keys)):
                names |= {str(key.value) for key in keys if isinstance(key, ast.Constant)}
            case ast.Call(func=ast.Name(id="histogram"), args=[ast.Constant(value=str(name)), *_]):
                names.add(name)
    return names


def test_the_page_and_the_dashboard_name_every_metric_and_no_other() -> None:
    code = in_code()
    assert len(code) == 15
    page = set(re.findall(r"vllm:kvferry_(\w+)", (ROOT / "docs/vllm.md").read_text()))
    assert page == code
    board = json.loads((ROOT / "deploy/grafana/kvferry-vllm.json").read_text())
    asked = " ".join(target["expr"] for panel in board["panels"] for target in panel.get("targets", ()))
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"vllm:kvferry_(\w+)", asked)}
    assert shown == code


def test_the_page_says_of_no_version_what_e2e_has_not_tried() -> None:
    page = (ROOT / "docs/vllm.md").read_text()
    _, _, section = page.partition("\n## Versions of vLLM\n")
    rows = re.findall(r"^\| (\S+) \|", section.partition("\n## ")[0], re.MULTILINE)
    assert rows == ["vLLM", *TRIED, "others"]
    environment = (ROOT / "e2e/kvferry_e2e/environment.py").read_text()
    (default,) = re.findall(r'^VLLM = "(\d+\.\d+)\.\d+"$', environment, re.MULTILINE)
    assert default in TRIED
