"""docs/structures.md and docs/rooms/ name what there is: every room, every module, and nothing that has gone."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
from test_rooms import _WITHOUT_A_FILE, FOLDERS, ROOMS, ROOT, modules, room

DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", *DOCS.glob("*.md"), *DOCS.glob("rooms/*.md")])
WALKS = [DOCS / "structures.md", DOCS / "seams.md", *sorted(DOCS.glob("rooms/*.md"))]
FILE = re.compile(r"(?<![\w./*-])(?:[\w-]+/)*[\w-]+\.py\b")
NAME = re.compile(r"`([A-Za-z_][\w.]*)(?:\([^`]*\))?`")
SOURCES = ("hf_batchllm", "kernels", "patches", "tests", "examples", "docs")


@cache
def files() -> list[str]:
    found = [path for folder in SOURCES for path in (ROOT / folder).rglob("*.py")]
    return [f"/{path.relative_to(ROOT).as_posix()}" for path in [*found, *ROOT.glob("*.py")]]


@cache
def words() -> frozenset[str]:
    """Every word of the library's code."""
    paths = [path for folder in FOLDERS.values() for path in (ROOT / folder).rglob("*.py")]
    return frozenset(re.findall(r"\w+", "\n".join(path.read_text("utf-8") for path in [*paths, ROOT / "setup.py"])))


def modules_of(name: str) -> list[str]:
    """Every module of a room as its page names it: beams/loop.py."""
    if name == "ground":
        return sorted(path.name for module, path in modules().items() if room(module) == "ground")
    folder = ROOT / FOLDERS.get(f"hf_batchllm.{name}", f"hf_batchllm/{name}")
    if not folder.is_dir():
        return [f"{name}.py"]
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.py") if path.name != "__init__.py")


def first_line(name: str) -> str:
    """What a room is for, in the words of its ``__init__.py``, as Markdown has it."""
    path = modules().get(f"hf_batchllm.{name}")
    said = (ast.get_docstring(ast.parse(path.read_text("utf-8"))) if path else None) or _WITHOUT_A_FILE[name]
    return said.partition("\n")[0].replace("``", "`")


@pytest.mark.parametrize("name", ROOMS)
def test_each_room_has_its_page(name: str) -> None:
    page = DOCS / "rooms" / f"{name}.md"
    assert page.is_file(), f"the room {name} has no page: write docs/rooms/{name}.md, like the others"
    text = page.read_text("utf-8")
    assert text.startswith(f"# {name}\n\n{first_line(name)}\n"), (
        f"docs/rooms/{name}.md must begin with the room's name and the first line of its docstring:\n{first_line(name)}"
    )
    rows = re.findall(r"^\| `([^`]+)` \| .+ \|$", text, re.MULTILINE)
    missing, gone = sorted(set(modules_of(name)) - set(rows)), sorted(set(rows) - set(modules_of(name)))
    assert not missing, f"docs/rooms/{name}.md lacks a row for: {', '.join(missing)}"
    assert not gone, f"docs/rooms/{name}.md has a row for files that are not in the room: {', '.join(gone)}"


def test_each_page_is_of_a_room() -> None:
    left = sorted({path.stem for path in DOCS.glob("rooms/*.md")} - set(ROOMS))
    assert not left, f"docs/rooms/ has pages of rooms that there are not; move or remove them: {', '.join(left)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_file_that_a_page_names_is_there(page: Path) -> None:
    named = set(FILE.findall(page.read_text("utf-8")))
    gone = sorted(name for name in named if not any(path.endswith(f"/{name}") for path in files()))
    where = page.relative_to(ROOT)
    assert not gone, f"{where} names files that are not in the tree; give their new names: {', '.join(gone)}"


@pytest.mark.parametrize("page", WALKS, ids=lambda page: page.name)
def test_each_name_of_code_that_a_page_names_is_there(page: Path) -> None:
    """Classes and functions; a plain lower-case word may be anything."""
    gone = set()
    for name in NAME.findall(page.read_text("utf-8")):
        if ("_" in name or name.lower() != name) and not name.endswith((".py", ".md")):
            gone |= {f"`{name}`" for part in name.split(".") if part and part not in words()}
    where = page.relative_to(ROOT)
    assert not gone, f"{where} names code that there is not; give its new name: {', '.join(sorted(gone))}"


@pytest.mark.parametrize("name", ROOMS)
def test_the_list_of_rooms_says_what_each_is_for(name: str) -> None:
    row = f"| [{name}](rooms/{name}.md) | {first_line(name)} |"
    lines = (DOCS / "structures.md").read_text("utf-8").splitlines()
    assert row in lines, f"docs/structures.md, Where things are, needs:\n{row}"


@pytest.mark.parametrize(
    "page",
    [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "examples" / "README.md"],
    ids=lambda page: page.name,
)
def test_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#\s]+)", page.read_text("utf-8"))
    broken = sorted({link for link in links if not (page.parent / link).exists()})
    assert not broken, f"{page.relative_to(ROOT)} links to files that are not there: {', '.join(broken)}"
