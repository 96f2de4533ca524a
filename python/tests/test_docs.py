"""The documents: their links lead somewhere, and docs/python.md is what is made of the stub and the installed package."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("adapters/*/*.md"), *ROOT.glob("*/README.md")]


def anchors(page: Path) -> set[str]:
    """What headings are called in links, as GitHub makes it of them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_link_of_a_page_leads_to_a_file_and_a_heading(page: Path):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith(("http://", "https://")):
            continue
        name, _, heading = link.partition("#")
        to = (page.parent / name).resolve() if name else page
        assert to.exists(), link
        assert not heading or heading in anchors(to), link


def test_the_page_of_the_python_api_is_what_is_made_of_the_package():
    command = [sys.executable, ROOT / "crates/kvferry-python/reference", "--check"]
    made = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert made.returncode == 0, made.stderr
