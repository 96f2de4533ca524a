"""The documents: their links lead somewhere, what they name exists, and docs/python.md is what is made of the stub and the
installed package."""

import os
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


A_PATH = re.compile(r"[\w.-]+(?:/[\w.-]+)*(?:/|\.(?:c|h|json|md|py|pyi|rs|sh|toml|txt|yml))")


def named_paths(page: str) -> set[str]:
    """What stands between backticks and looks like a file, or like a folder, which ends with a slash."""
    text = re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)
    return {it for it in re.findall(r"`([^`\n]+)`", text) if A_PATH.fullmatch(it)}


def parts_of_the_tree() -> set[str]:
    """The files and folders of the sources, each with a slash before it, and folders with one after it."""
    found = set()
    for top in ("adapters", "bench", "crates", "docs", "python"):
        for folder, names, files in os.walk(ROOT / top):
            names[:] = [name for name in names if name not in ("__pycache__", "build", "node_modules", "target")]
            at = "/" + Path(folder).relative_to(ROOT).as_posix() + "/"
            found |= {at, *(at + name for name in files)}
    return found


def missing_paths(page: str) -> list[str]:
    """What a page names and the tree has not, in full or from a folder on, such as `session/connect.rs`."""
    tree = parts_of_the_tree()
    named = [it for it in named_paths(page) if not (ROOT / it).exists()]
    return sorted(it for it in named if not any(path.endswith("/" + it) for path in tree))


def test_each_path_that_architecture_names_exists():
    page = (ROOT / "ARCHITECTURE.md").read_text()
    assert len(named_paths(page)) >= 150
    assert missing_paths(page) == []


def test_a_path_that_does_not_exist_is_noticed_and_a_short_one_that_does_is_not():
    page = "See `session/connect.rs`, `session/connects.rs`, `ession/connect.rs`, `rank/`, `ranks/` and `Job.cutter`."
    assert missing_paths(page) == ["ession/connect.rs", "ranks/", "session/connects.rs"]


def layers(page: str) -> list[str]:
    """The crates that ARCHITECTURE.md lists in its layers, from above to below."""
    section = page.split("\n## Layers\n")[1].split("\n## ")[0]
    return re.findall(r"crates/([\w-]+)", section.split("```")[1])


def dependencies(crate: str) -> set[str]:
    """The crates of this repository that a crate's library or program uses."""
    manifest = (ROOT / "crates" / crate / "Cargo.toml").read_text() + "\n["
    found = re.search(r"^\[dependencies\]\n(.*?)^\[", manifest, re.MULTILINE | re.DOTALL)
    return set(re.findall(r"^(kvferry[\w-]*)", found[1], re.MULTILINE)) if found else set()


def test_the_layers_list_each_crate_once_above_the_crates_that_it_depends_on():
    listed = layers((ROOT / "ARCHITECTURE.md").read_text())
    assert sorted(listed) == sorted(folder.name for folder in (ROOT / "crates").iterdir())
    beside = set(listed[-5:])  # The page says so: they use what they test.
    assert beside == {f"kvferry-{name}" for name in ("refengine", "testkit", "fakecuda", "models", "ci-bench")}
    ordered = [crate for crate in listed if crate not in beside]
    for place, crate in enumerate(ordered):
        assert dependencies(crate) - beside <= set(ordered[place + 1 :]), crate
    users = {crate for crate in ordered if dependencies(crate) & beside}
    assert users == {"kvferry-cli", "kvferry-bench"}
    assert {name for crate in users for name in dependencies(crate) & beside} == {"kvferry-refengine"}


# What was run on a GPU, and what was not, is in these pages. Others link to them, so that a change is made in one place.
PAGES_OF_GPUS = [ROOT / "docs/gpu.md", ROOT / "docs/engines.md", ROOT / "CHANGELOG.md"]
STALE = re.compile(
    r"no gpu (?:was|here)|fake driver only|host memory only|(?:gpu|device memory)[^.|]*\b(?:yet|no gpu memory)\b", re.I
)
ONCE_STALE = [
    "the KV cache is in a GPU's memory, which kvferry does not take yet",
    "Memory of NVIDIA GPUs from Python, Rust and `kvferry.nixl`, so far tried with a fake driver only",
    "No GPU was used for any of them.",
    "## What no GPU here could show",
    "It moves host memory only; RTP-LLM's caches are in GPU memory, so it is not usable for serving yet.",
]


@pytest.mark.parametrize("claim", ONCE_STALE)
def test_claims_that_became_wrong_with_memory_of_gpus_are_noticed(claim: str):
    assert STALE.search(claim)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page not in PAGES_OF_GPUS], ids=lambda page: str(page.relative_to(ROOT))
)
def test_pages_leave_what_ran_on_a_gpu_to_the_page_on_gpus(page: Path):
    paragraphs = [" ".join(it.split()) for it in page.read_text().split("\n\n")]
    assert [it for it in paragraphs if STALE.search(it)] == []


# Errors whose texts docs/gpu.md explains, by the file of their `Display`.
ERRORS_OF_GPUS = {
    "crates/kvferry-sys/src/cuda/error.rs": ("Unavailable", "DriverError", "Error"),
    "crates/kvferry-cuda/src/error.rs": ("Error",),
}


def literals(source: str) -> list[str]:
    """The string literals of Rust's text, with their lines joined."""
    found = re.findall(r'"((?:[^"\\]|\\.)*)"', source, re.DOTALL)
    return [re.sub(r"\\\n\s*", "", it) for it in found]


def texts(file: str, error: str) -> list[str]:
    """What an error's `Display` writes, piece by piece, without pieces that are hardly more than what is put in."""
    source = (ROOT / file).read_text()
    derived = re.findall(r"#\[error\((?!transparent)(.*?)\)\]\n", source, re.DOTALL)
    if derived:
        pieces = [piece for it in derived for piece in literals(it)]
    else:
        shown = re.search(rf"^impl fmt::Display for {error} {{\n(.*?)^}}", source, re.MULTILINE | re.DOTALL)
        assert shown, error
        pieces = literals(shown[1])
    without = [re.sub(r"\{[^}]*\}", "\0", piece) for piece in pieces]
    return [piece for piece in without if len(re.findall(r"\w", piece)) >= 10]


def symptoms() -> list[list[str]]:
    """The messages in the first column of the page's table of symptoms, each divided at what it leaves out."""
    table = (ROOT / "docs/gpu.md").read_text().split("\n## When something goes wrong\n")[1]
    columns = [line.split(" | ")[0] for line in table.splitlines() if line.startswith("| ")]
    spans = [span for column in columns for span in re.findall("`([^`]+)`", column)]
    divided = [[part.strip() for part in span.split("…")] for span in spans]
    return [[part for part in parts if part] for parts in divided]


def explains(parts: list[str], text: str) -> bool:
    """Whether the parts of a message stand in the text, in their order, and are more than a word."""
    at = 0
    for part in parts:
        at = text.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return sum(map(len, parts)) >= 10


@pytest.mark.parametrize(("file", "error"), [(file, it) for file, all_ in ERRORS_OF_GPUS.items() for it in all_])
def test_the_page_on_gpus_explains_each_message_of_an_error(file: str, error: str):
    listed, written = symptoms(), texts(file, error)
    assert written
    missing = [text for text in written if not any(explains(parts, text) for parts in listed)]
    assert missing == []


def test_what_the_page_on_gpus_must_explain_is_read_from_the_sources():
    shown = [text for file, errors in ERRORS_OF_GPUS.items() for it in errors for text in texts(file, it)]
    for known in ("the CUDA driver sees no device; check", "toolkit's stub", "is managed memory", " failed with "):
        assert any(known in text for text in shown), known
    assert len(shown) >= 25
    assert explains(["stream", "is in a graph capture"], "stream \0 is in a graph capture; use")
    assert not explains(["is in a graph capture", "stream"], "stream \0 is in a graph capture; use")
    assert not explains(["stream"], "stream \0 is in a graph capture; use")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_each_make_target_that_a_page_names_exists(page: Path):
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = re.findall(r"(?:^|`)make ([a-z][a-z0-9-]*)", page.read_text(), re.MULTILINE)
    assert set(named) - targets == set()


def test_the_page_of_the_python_api_is_what_is_made_of_the_package():
    command = [sys.executable, ROOT / "crates/kvferry-python/reference", "--check"]
    made = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert made.returncode == 0, made.stderr
