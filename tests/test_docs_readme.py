"""README.md: each of its blocks runs as it stands, and prints what it says.

Models go by the names that stand there: a tiny one lies in a folder of that name where the block is run. The first
example prints what a trained model answers, and runs over one.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from support_accelerated import word_tokenizer
from support_families import build
from support_real_model import ROOT, load_once, needs_real_model, small_model

from hf_batchllm.cli import main

PAGE = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS: list[tuple[str, str]] = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
PYTHON = [code for language, code in BLOCKS if language == "python"]
PLAIN = [text for language, text in BLOCKS if not language]
PRINTED, *SHELL = PLAIN
COMMANDS = [line.partition("  #")[0].rstrip() for block in SHELL for line in block.splitlines()]
MOST_LINES = 130


def test_it_is_short() -> None:
    assert len(PAGE.splitlines()) <= MOST_LINES, "move something to a page in docs/"


def test_each_block_is_run_by_a_test() -> None:
    assert {language for language, _ in BLOCKS} == {"python", ""}
    assert len(PYTHON) == 2 and COMMANDS
    known = ("make ", "pip install ", "hf-batchllm ")
    assert not [line for line in COMMANDS if not line.startswith(known)], "no test runs these lines"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to run in, but for a model of the name that the page has."""
    (name,) = set(re.findall(r"\bQwen/[\w.-]+", PAGE))
    build("qwen3").save_pretrained(tmp_path / name)
    word_tokenizer().save_pretrained(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@needs_real_model
@pytest.mark.filterwarnings("ignore:.*max_length")
def test_the_python_runs_and_prints_what_the_page_says(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not small_model.FOLDER.exists():
        load_once()  # unpacks the model of the first example
    (folder / ".models").symlink_to(ROOT / ".models")
    names: dict[str, Any] = {}
    for code in PYTHON:
        exec(compile(code, "README.md", "exec"), names)
    assert capsys.readouterr().out == PRINTED


@pytest.mark.parametrize("command", [line for line in COMMANDS if line.startswith("hf-batchllm ")])
def test_the_command_runs(folder: Path, command: str) -> None:
    chat = [{"role": "user", "content": "w7 w8"}]
    (folder / "in.jsonl").write_text(f"{json.dumps({'prompt': 'w5 w6'})}\n{json.dumps({'messages': chat})}\n")
    assert main(shlex.split(command)[1:]) == 0
    lines = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    assert [line["index"] for line in lines] == [0, 1] and all("error" not in line for line in lines)


@pytest.mark.parametrize("command", [line for line in COMMANDS if line.startswith("make ")])
def test_make_knows_the_target(command: str) -> None:
    """What `make demo` runs is in test_examples.py; this is `make test`."""
    if shutil.which("make") is None:
        pytest.skip("there is no make")
    done = subprocess.run([*shlex.split(command), "--dry-run"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", [line for line in COMMANDS if line.startswith("pip install ")])
def test_pip_is_told_what_there_is(command: str) -> None:
    """pip itself would look for other packages on the net; `make dist` has it install this one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (what,) = shlex.split(command)[2:]
    if what.startswith("."):
        what = project["name"] + what[1:]
    asked = Requirement(what.replace("git+URL", "git+https://example.org/hf-batchllm.git"))
    assert asked.name == project["name"]
    assert asked.extras <= set(project["optional-dependencies"])


def test_the_extras_are_all_named() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (sentence,) = re.findall(r"^Extras: (.*?)\n\n", PAGE, re.MULTILINE | re.DOTALL)
    assert set(re.findall(r"`([\w-]+)`", sentence)) == set(project["optional-dependencies"]) - {"test"}


def test_its_figures_of_speed_are_those_of_the_benchmarks() -> None:
    (table,) = re.findall(r"^## Beside the others\n(.*?)^`generate` runs", PAGE, re.MULTILINE | re.DOTALL)
    rows = [line for line in table.splitlines() if line.startswith("| ") and re.search(r"prompts/s|tokens/s", line)]
    assert len(rows) == 3
    measured = (ROOT / "BENCHMARKS.md").read_text(encoding="utf-8").replace("*", "").splitlines()
    for row in rows:
        figures = re.findall(r"\d[\d,.]*(?= (?:prompts/s|tokens/s|%))", row)
        assert len(figures) == 4
        assert [line for line in measured if set(figures) <= set(re.findall(r"\d[\d,.]*\d", line))], (
            f"no row of BENCHMARKS.md has all of {figures}"
        )
