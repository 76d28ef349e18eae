"""The rooms of the library, one way down: each imports only rooms below it, and no import leads back in a circle.

``python tests/test_rooms.py`` prints the rooms in their order.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import FrameType

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"hf_batchllm": "hf_batchllm", "hf_batchllm.kernels": "kernels", "hf_batchllm.patches": "patches"}
ROOMS = (  # from the top down
    "cli",
    "bench",
    "ray",
    "datatrove",
    "files",
    "lm_eval",
    "rollouts",
    "integrations",
    "pool",
    "generator",
    "parallel",
    "engine",
    "sampling",
    "model",
    "planning",
    "inputs",
    "patches",
    "kernel_check",
    "kernels",
    "results",
    "ground",
)
# Loose modules that every room may import.
GROUND = ("config", "errors", "installed_versions", "interrupts", "notices", "python_child", "wording", "_version")
ALONE = ("kernels",)  # import nothing of the library
WITHOUT_TORCH = ("planning", "results", "ground")
# A file imports 20 of the library's modules at most. These import more: their numbers may only fall.
MOST_IMPORTS = 20
MORE_IMPORTS = {
    "hf_batchllm.ray": 25,
}
# What happens to a job from the beginning of its call to the first step: these numbers, too, may only fall.
MOST_STAYS, MOST_CLIMBS = 20, 2
# Lines of all modules that a reader of the loop comes to: this number, too, may only fall.
MOST_LINES_BELOW_THE_LOOP = 7_000


@dataclass(frozen=True)
class Import:
    importer: str
    imported: str
    line: int
    runs: bool  # as soon as the importer is imported: neither for types alone nor inside a function

    def __str__(self) -> str:
        return f"{self.importer}, line {self.line}, imports {self.imported}"


def modules(root: Path = ROOT) -> dict[str, Path]:
    """Every module of the library by its name; a package by its own, without ``__init__``."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root / folder).with_suffix("").parts
            found[".".join((package, *parts)).removesuffix(".__init__")] = path
    return found


@cache
def imports(root: Path = ROOT) -> list[Import]:
    """Every import of one of the library's modules by another; those for types and inside functions, too."""
    known, found = modules(root), []
    for name, path in known.items():
        home = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
        tree = ast.parse(path.read_text("utf-8"))
        at_once = set(_at_once(tree))
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                above = home[: len(home) - node.level + 1] if node.level else []
                base = ".".join([*above, *([node.module] if node.module else [])])
                targets = [full if (full := f"{base}.{alias.name}") in known else base for alias in node.names]
            else:
                continue
            for target in dict.fromkeys(targets):
                found.append(Import(name, target, node.lineno, node in at_once))
    return found


def _at_once(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if not for_types and not isinstance(node, ast.FunctionDef | ast.Lambda):
            yield node
            yield from _at_once(node)


def room(module: str) -> str:
    """The room that a module is in; "" for ``hf_batchllm`` itself, which is above all of them."""
    first = module.split(".")[1] if "." in module else ""
    if first == "__main__":  # `python -m hf_batchllm`
        return ""
    return "ground" if first in GROUND else first


def upward(root: Path = ROOT) -> list[Import]:
    place = {name: number for number, name in enumerate(ROOMS)}
    wrong = []
    for each in imports(root):
        if each.imported.partition(".")[0] != "hf_batchllm" or not room(each.importer):
            continue
        importer, imported = room(each.importer), room(each.imported)
        if not imported or place[imported] < place[importer] or (importer in ALONE and imported != importer):
            wrong.append(each)
    return wrong


def circles(root: Path = ROOT) -> list[list[str]]:
    """Groups of modules each of which is reached from every other one by imports."""
    below = _below(root)
    reached = {name: _reached(name, below) for name in below}
    tied = [sorted(other for other in reached[name] if name in reached[other]) for name in below]
    return [list(group) for group in sorted({tuple(group) for group in tied if group})]


def test_no_file_imports_ever_more_of_the_others() -> None:
    found = {name: len(others) for name, others in _below().items() if len(others) > MOST_IMPORTS}
    assert found == MORE_IMPORTS, "use fewer modules; a number that fell belongs into the table"


def test_what_a_reader_of_the_loop_comes_to_does_not_grow() -> None:
    known, loop = modules(), "hf_batchllm.engine.loop"
    lines = sum(known[name].read_text("utf-8").count("\n") for name in _reached(loop, _below()) | {loop})
    assert lines <= MOST_LINES_BELOW_THE_LOOP


def test_the_walk_of_a_job_to_the_first_step_is_straight() -> None:
    """A small greedy call on a CPU, whose prompts share a prefix, as a reader follows it with the job in hand.

    The walk has an entry for each function of the library that is called with the job, from ``Call.begin`` until the
    first batch is built. An object with the job in a field counts as the job, be it ``self``. The job's own methods do
    not count. A *stay* is a run of entries in one file. A *climb* is a move to a file that imports, directly or through
    others, the one that the walk is in. Where a file goes on with a function of its own, the walk has returned to it.
    """
    walk = _walk()
    below = _below()
    moves = [(here, there, caller) for (here, _), (there, caller) in pairwise(walk) if here != there]
    climbs = [
        f"{here} -> {there}" for here, there, caller in moves if caller != there and here in _reached(there, below)
    ]
    assert walk
    assert 1 + len(moves) <= MOST_STAYS, "\n".join(f"{here} -> {there}" for here, there, _ in moves)
    assert len(climbs) <= MOST_CLIMBS, "\n".join(climbs)


def _walk() -> list[tuple[str, str]]:
    """For each entry of the walk its module, and the module of ours that calls it."""
    from support_families import build  # the rooms are printed without torch

    from hf_batchllm import BatchGenerator
    from hf_batchllm.engine.call import Call
    from hf_batchllm.engine.job import Job
    from hf_batchllm.model.batch_builder import BatchBuilder

    named = {str(path): name for name, path in modules().items()}
    found: list[tuple[str, str]] = []
    ended = False

    def holds_job(value: object) -> bool:
        return isinstance(value, Job) or any(isinstance(each, Job) for each in getattr(value, "__dict__", {}).values())

    def enter(frame: FrameType, event: str, arg: object) -> None:
        nonlocal ended
        code, above = frame.f_code, frame.f_back
        ended = ended or code is BatchBuilder.build.__code__
        if event != "call" or ended or code.co_filename not in named or not (found or code is Call.begin.__code__):
            return
        given = [frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]]
        if isinstance(frame.f_locals.get("self"), Job) or not any(map(holds_job, given)):
            return
        while above is not None and above.f_code.co_filename not in named:
            above = above.f_back
        assert above is not None
        found.append((named[code.co_filename], named[above.f_code.co_filename]))

    generator, before = BatchGenerator(build("llama")), sys.getprofile()
    sys.setprofile(enter)
    try:
        generator.generate([[*range(5, 45), last] for last in range(50, 54)], max_new_tokens=2, do_sample=False)
    finally:
        sys.setprofile(before)
    return found


def _below(root: Path = ROOT) -> dict[str, set[str]]:
    """The modules that each one imports."""
    known = modules(root)
    below: dict[str, set[str]] = {name: set() for name in known}
    for each in imports(root):
        if each.imported in known and each.imported != each.importer:
            below[each.importer].add(each.imported)
    return below


def _reached(start: str, below: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        for name in below[waiting.pop()] - found:
            found.add(name)
            waiting.append(name)
    return found


def test_every_folder_and_file_at_the_top_is_a_room() -> None:
    found = {room(name) for name in modules()} - {""}
    assert found == set(ROOMS), "a new room belongs into ROOMS, and a loose module into a room"


def test_each_room_imports_only_rooms_below_it() -> None:
    assert not upward(), "\n".join(map(str, upward()))


def test_rooms_below_know_of_no_ranks() -> None:
    """But for what adds up the results of layers."""
    found = {
        name
        for name, path in modules().items()
        if room(name) in ("generator", "engine", "sampling", "model", "planning")
        if re.search(r"\branks\b|\bvotes?\b|torch\.distributed", path.read_text("utf-8"))
    }
    assert not found, "what several processes have to agree on belongs into parallel/"


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert not circles(), circles()


@pytest.mark.some_cases
@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("kernels/lists/sampling_recipes.py", "from ..config import BatchConfig"),
        ("hf_batchllm/planning/worthwhile_prefixes.py", "if TYPE_CHECKING:\n    from ..engine.call import Call"),
        ("hf_batchllm/wording.py", "def late():\n    from .results import run_report"),
        ("hf_batchllm/engine/loop.py", "from .. import run_file"),
        ("hf_batchllm/inputs/seeds.py", "import hf_batchllm.generator"),
    ],
)
def test_an_import_that_points_up_is_found(module: str, line: str, tmp_path: Path) -> None:
    for path in modules().values():
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text("utf-8"), "utf-8")
    changed = tmp_path / module
    changed.write_text(f"{changed.read_text('utf-8')}\n{line}\n", "utf-8")
    assert len(upward(tmp_path)) == 1


def test_a_circle_is_found(tmp_path: Path) -> None:
    (tmp_path / "hf_batchllm").mkdir()
    (tmp_path / "hf_batchllm/errors.py").write_text("def why():\n    from . import wording\n")
    (tmp_path / "hf_batchllm/wording.py").write_text("from .errors import why\n")
    assert circles(tmp_path) == [["hf_batchllm.errors", "hf_batchllm.wording"]]


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_some_rooms_never_import_torch(name: str) -> None:
    """Neither they nor what they import: a plan over a million prompts is made without it, and a view is shown."""
    heavy = {"torch", "transformers"}
    below: dict[str, set[str]] = {module: set() for module in [*modules(), *heavy]}
    for each in imports():
        first = each.imported.partition(".")[0]
        if each.runs and (first in heavy or each.imported in below):
            below[each.importer].add(first if first in heavy else each.imported)
    for module in modules():
        if room(module) == name:
            met = heavy & _reached(module, below)
            assert not met, f"{module} imports {met}"


def test_each_room_says_what_it_is_for() -> None:
    for name, path in modules().items():
        if path.name == "__init__.py":
            said = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
            assert said.partition("\n")[0].endswith((".", ":")), f"{name} needs a line that says what it is for"


def test_docstrings_have_a_subject() -> None:
    """None begins with "Of" or "As": such a line needs the name above it to be understood."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module
    found = [
        f"{name}: {said.partition(chr(10))[0]}"
        for name, path in modules().items()
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, kinds) and (said := ast.get_docstring(node) or "").startswith(("Of ", "As "))
    ]
    assert not found, "\n".join(found)


def main() -> None:
    files = modules()
    for number, name in enumerate(ROOMS):
        path = files.get(f"hf_batchllm.{name}")
        said = (ast.get_docstring(ast.parse(path.read_text("utf-8"))) if path else None) or _WITHOUT_A_FILE[name]
        print(f"{number + 1:3}  {name:13}{said.partition(chr(10))[0]}")


_WITHOUT_A_FILE = {
    "patches": "What transformers calls, and what is swapped in a model and put back.",
    "kernels": "Triton kernels, and a plain PyTorch reference beside each. Imports nothing of the library.",
    "ground": f"{', '.join(GROUND)}: a setting, an error, a warning, a value in words.",
}

if __name__ == "__main__":
    sys.exit(main())
