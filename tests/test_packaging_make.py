"""What the Makefile installs, where, and when: a stand-in for the environment's Python writes down what it is asked."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
STAND_IN = '#!/bin/sh\necho "$@" >> "$(dirname "$0")/asked"\n'

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")


@pytest.fixture
def printed() -> list[str]:
    """What each make of ``asked`` printed."""
    return []


@pytest.fixture
def asked(tmp_path: Path, printed: list[str]) -> Callable[..., str]:
    """Runs make in a checkout with an environment that installs nothing: what its Python was asked to do."""
    for name in ("Makefile", "pyproject.toml", "setup.py", "constraints.txt", "constraints-oldest.txt"):
        shutil.copy(ROOT / name, tmp_path)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(STAND_IN)
    python.chmod(0o755)

    def run(*arguments: str, fails: bool = False) -> str:
        (python.parent / "asked").unlink(missing_ok=True)
        own = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # not of `make test`
        done = subprocess.run(["make", *arguments], cwd=tmp_path, env=own, capture_output=True, text=True)
        printed.append(done.stdout + done.stderr)
        assert done.returncode == 0 or fails, printed[-1]
        return (python.parent / "asked").read_text() if (python.parent / "asked").exists() else ""

    return run


def test_the_demonstration_installs_what_it_needs_and_nothing_again(asked: Callable[..., str]) -> None:
    first = asked("demo", "TORCH_INDEX=")
    assert "-e .[demo] -c constraints.txt" in first and "quickstart.py" in first
    assert asked("demo", "TORCH_INDEX=").split() == ["examples/quickstart.py"]


def test_the_tests_install_the_rest_which_does_for_the_demonstration(asked: Callable[..., str]) -> None:
    asked("demo", "TORCH_INDEX=")
    then = asked("test", "TORCH_INDEX=")
    assert "-e .[test,demo,json,notebook,lm-eval,trl] -c constraints.txt" in then and "-m pytest" in then
    assert asked("demo", "TORCH_INDEX=").split() == ["examples/quickstart.py"]


def test_pytorch_comes_from_its_own_index_if_that_answers(
    asked: Callable[..., str], printed: list[str], tmp_path: Path
) -> None:
    there, gone = (tmp_path / "Makefile").as_uri(), (tmp_path / "nowhere").as_uri()
    assert f"--extra-index-url {there}" in asked(".venv/.installed-demo", f"TORCH_INDEX={there}")
    assert "5 GB" not in printed[-1]
    assert "--extra-index-url" not in asked(".venv/.installed-demo", "-B", f"TORCH_INDEX={gone}")
    assert f"{gone} does not answer" in printed[-1] and "5 GB" in printed[-1]
    asked(".venv/.installed-demo", "-B", "TORCH_INDEX=")
    assert "5 GB" not in printed[-1]  # it was asked for


def test_a_python_that_is_not_there_is_said_in_words(asked: Callable[..., str], printed: list[str]) -> None:
    asked("demo", "PYTHON=python9.99", fails=True)
    assert "there is no python9.99 here: hf-batchllm needs Python 3.11 or newer; try make PYTHON=" in printed[-1]


def test_an_environment_that_could_not_be_made_is_made_next_time(
    asked: Callable[..., str], printed: list[str], tmp_path: Path
) -> None:
    """As on a Debian without python3-venv, where a Python is left that has no pip."""
    bin, without_pip = tmp_path / ".venv" / "bin", tmp_path / "without-pip"
    (bin / "python").rename(tmp_path / "stand-in")
    without_pip.write_text(f'#!/bin/sh\ntest "$1" != -m || {{ cp stand-in "{bin}/python"; exit 1; }}\n')
    without_pip.chmod(0o755)
    for _ in range(2):
        asked("demo", "TORCH_INDEX=", "PYTHON=./without-pip", fails=True)
        assert "creating .venv" in printed[-1]


def test_a_path_with_spaces_is_type_checked(asked: Callable[..., str], tmp_path: Path) -> None:
    checkout = tmp_path / "my checkout"
    names = ("Makefile", "pyproject.toml", "setup.py", "constraints.txt", ".venv")
    checkout.mkdir()
    for name in names:
        (tmp_path / name).rename(checkout / name)
    for name in ("hf_batchllm/engine", "kernels", "patches"):
        (checkout / name).mkdir(parents=True)
    asked("-C", str(checkout), "types", "TORCH_INDEX=")
    links = checkout / "build" / "typed" / "hf_batchllm"
    assert sorted(link.name for link in links.iterdir() if link.is_dir()) == ["engine", "kernels", "patches"]
    assert f"--config-file {checkout}/pyproject.toml" in (checkout / ".venv" / "bin" / "asked").read_text()
