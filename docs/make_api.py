"""Makes ``docs/api.md`` from the public names: ``.venv/bin/python docs/make_api.py > docs/api.md``.

This is a script beside the page, and no module of the library: it reads every room, so it belongs to none, and users
of the library have no use for it.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
import textwrap
import typing
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from types import FunctionType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the library of this checkout

import hf_batchllm

COMMAND = ".venv/bin/python docs/make_api.py > docs/api.md"
_INTRODUCTION = f"""\
# The public names

<!-- Made by `{COMMAND}`: change the docstrings instead. -->

All of these are imported from `hf_batchllm`. The other modules are private: their names and places may change from one
version to the next. The options of `generate` are in [generate.md](generate.md); the command `hf-batchllm` is in
[files.md](files.md).
"""
_CHAPTERS = {
    "Generating and scoring": [
        "BatchGenerator",
        "GeneratorPool",
        "RankGenerator",
        "BatchConfig",
        "accelerated",
        "plan_prompts",
        "run_file",
        "merge_shards",
    ],
    "Results": [
        *(
            "BatchResult",
            "Generation",
            "ScoreResult",
            "Score",
            "RunReport",
            "WorkerReport",
            "SharingPlan",
            "FileReport",
        ),
    ],
    "Schedulers": ["BaseScheduler"],
    "Errors": [
        "BatchLLMError",
        "CacheMemoryError",
        "ConfigError",
        "FilesError",
        "GenerationInterrupted",
        "GeneratorBusyError",
        "OptionValueError",
        "PoolError",
        "RanksError",
        "PromptError",
        "PromptsTypeError",
        "TokenizerError",
        "UnsupportedModelError",
        "UnsupportedOptionError",
    ],
    "Version": ["__version__"],
}
_LINE = 100  # characters of a signature on one line
# "name: ..." or "name, other: ..." at the beginning of a line says what a parameter or a field is.
_ENTRY = re.compile(r"([a-z_]+(?:(?:, | and )[a-z_ ]+)*): (.*)")


def page() -> str:
    placed = [name for names in _CHAPTERS.values() for name in names]
    missing = sorted(set(hf_batchllm.__all__) ^ set(placed))
    if missing:
        raise SystemExit(f"_CHAPTERS in docs/make_api.py must name each public name once: {', '.join(missing)}")
    lines = [_INTRODUCTION]
    for chapter, names in _CHAPTERS.items():
        lines.append(f"## {chapter}\n")
        for name in names:
            lines += _entry(name)
    return "\n".join(lines)


def _entry(name: str) -> Iterator[str]:
    value = getattr(hf_batchllm, name)
    yield f"### `{name}`\n"
    if isinstance(value, str):
        yield "The version of the library, a string.\n"
    elif not isinstance(value, type):
        yield from _function(name, value)
    elif issubclass(value, BaseException):
        bases = ", ".join(f"`{base.__name__}`" for base in value.__bases__)
        yield f"An error, derived from {bases}. {_text(value)}"
    else:
        yield from _class(name, value)


def _function(name: str, function: Callable[..., Any]) -> Iterator[str]:
    inner = inspect.unwrap(function)
    # Made by contextlib.contextmanager, or a block of its own kind.
    opens_block = str(inspect.signature(inner).return_annotation).startswith("AbstractContextManager")
    if opens_block or (inspect.isgeneratorfunction(inner) and inner is not function):
        yield f"```python\nwith {_signature(name, inner, returns=False)}:\n```\n"
    else:
        yield f"```python\n{_signature(name, function)}\n```\n"
    yield _text(function)


def _class(name: str, cls: type) -> Iterator[str]:
    # What a class inherits from Python says nothing about how to make an object of it.
    if "__init__" in vars(cls):
        yield f"```python\n{_signature(name, cls.__init__, returns=False)}\n```\n"
    yield _text(cls)
    attributes = list(_attributes(cls))
    if attributes:
        yield "\n".join(f"- **`{each}`**: {said}" for each, said in attributes) + "\n"
    # Those of a base class of our own, which is private, are members like others.
    ours = [base for base in cls.__mro__[1:] if base.__module__.startswith("hf_batchllm.")]
    private = [base for base in ours if base.__name__ not in hf_batchllm.__all__]
    members = {member: value for each in (cls, *private) for member, value in vars(each).items()}
    for member, value in members.items():
        if not member.startswith("_"):
            yield from _member(name, member, value)


def _member(name: str, member: str, value: Any) -> Iterator[str]:
    if isinstance(value, property | cached_property):
        getter = value.fget if isinstance(value, property) else value.func
        returns = inspect.signature(getter).return_annotation
        yield f"#### `{name}.{member}`: `{returns}`\n"
        if getter.__doc__:
            yield _text(getter)
    elif isinstance(value, FunctionType | classmethod | staticmethod):
        function = value if isinstance(value, FunctionType) else value.__func__
        yield f"#### `{name}.{member}`\n"
        forms = typing.get_overloads(function) or [function]
        signatures = "\n".join(_signature(member, form) for form in forms)
        yield f"```python\n{signatures}\n```\n"
        if function.__doc__:
            yield _text(function)


# -- signatures ------------------------------------------------------------------------------------------------


def _signature(name: str, function: Callable[..., Any], returns: bool = True) -> str:
    signature = inspect.signature(function, follow_wrapped=False)
    parameters = [each for each in signature.parameters.values() if each.name not in ("self", "cls")]
    parts: list[str] = []
    keyword_only = False
    for each in parameters:
        if each.kind is each.KEYWORD_ONLY and not keyword_only and not any(part.startswith("*") for part in parts):
            parts.append("*")
        keyword_only = keyword_only or each.kind is each.KEYWORD_ONLY
        parts.append(_parameter(each))
    end = ""
    if returns and signature.return_annotation is not signature.empty:
        end = f" -> {signature.return_annotation}"
    line = f"{name}({', '.join(parts)}){end}"
    if len(line) <= _LINE:
        return line
    return "\n".join([f"{name}(", *(f"    {part}," for part in parts), f"){end}"])


def _parameter(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    said = f"{stars}{parameter.name}"
    if parameter.annotation is not parameter.empty:
        said += f": {parameter.annotation}"
    if parameter.default is parameter.empty:
        return said
    default = parameter.default
    shown = json.dumps(default) if isinstance(default, str) else repr(default)
    if shown.startswith("<"):  # an object whose text would differ from run to run
        shown = "..."
    return f"{said} = {shown}" if ": " in said else f"{said}={shown}"


# -- docstrings ------------------------------------------------------------------------------------------------


def _text(documented: Any) -> str:
    """The docstring as Markdown."""
    doc = inspect.cleandoc(documented.__doc__ or "")
    if not doc:
        raise SystemExit(f"{documented} is public and has no docstring")
    return "\n\n".join(_paragraph(each) for each in doc.split("\n\n")) + "\n"


def _paragraph(text: str) -> str:
    lines = text.split("\n")
    if all(line.startswith("    ") or not line for line in lines):
        return f"```python\n{textwrap.dedent(text)}\n```"
    if not _ENTRY.fullmatch(lines[0]):
        return _inline("\n".join(line.strip() for line in lines))
    entries: list[str] = []
    for line in lines:
        entry = None if line.startswith(" ") else _ENTRY.fullmatch(line)
        if entry:
            names = re.sub(r"\b([a-z]\w*_\w+|[a-z]+)\b", r"`\1`", entry[1]) if " and " not in entry[1] else entry[1]
            entries.append(f"- **{names}**: {_inline(entry[2])}")
        else:
            entries.append(f"  {_inline(line.strip())}")
    return "\n".join(entries)


def _inline(text: str) -> str:
    return text.replace("``", "`")


def _attributes(cls: type) -> Iterator[tuple[str, str]]:
    """Public attributes that a comment behind them, or a string below them, explains."""
    source = textwrap.dedent(inspect.getsource(cls))
    lines, (tree,) = source.split("\n"), ast.parse(source).body
    assert isinstance(tree, ast.ClassDef)
    for node, following in zip(tree.body, [*tree.body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        name, comment = node.target.id, lines[node.lineno - 1].partition("  # ")[2]
        below = getattr(getattr(following, "value", None), "value", None)
        said = below if isinstance(following, ast.Expr) and isinstance(below, str) else comment
        if said and not name.startswith("_"):
            yield name, _inline(" ".join(inspect.cleandoc(said).split()))


if __name__ == "__main__":
    print(page(), end="")
