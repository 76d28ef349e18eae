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
def asked(tmp_path: Path) -> Callable[..., str]:
    """Runs make in a checkout with an environment that installs nothing: what its Python was asked to do."""
    for name in ("Makefile", "pyproject.toml", "setup.py", "constraints.txt", "constraints-oldest.txt"):
        shutil.copy(ROOT / name, tmp_path)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(STAND_IN)
    python.chmod(0o755)

    def run(*arguments: str) -> str:
        (python.parent / "asked").unlink(missing_ok=True)
        own = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # not of `make test`
        subprocess.run(["make", *arguments], cwd=tmp_path, env=own, check=True, capture_output=True)
        return (python.parent / "asked").read_text()

    return run


def test_the_demonstration_installs_what_it_needs_and_nothing_again(asked: Callable[..., str]) -> None:
    first = asked("demo", "TORCH_INDEX=")
    assert "-e .[demo] -c constraints.txt" in first and "quickstart.py" in first
    assert asked("demo", "TORCH_INDEX=").split() == ["examples/quickstart.py"]


def test_the_tests_install_the_rest_which_does_for_the_demonstration(asked: Callable[..., str]) -> None:
    asked("demo", "TORCH_INDEX=")
    then = asked("test", "TORCH_INDEX=")
    assert "-e .[test,demo,json,notebook,lm-eval] -c constraints.txt" in then and "-m pytest" in then
    assert asked("demo", "TORCH_INDEX=").split() == ["examples/quickstart.py"]


def test_pytorch_comes_from_its_own_index_if_that_answers(asked: Callable[..., str], tmp_path: Path) -> None:
    there, gone = (tmp_path / "Makefile").as_uri(), (tmp_path / "nowhere").as_uri()
    assert f"--extra-index-url {there}" in asked(".venv/.installed-demo", f"TORCH_INDEX={there}")
    assert "--extra-index-url" not in asked(".venv/.installed-demo", "-B", f"TORCH_INDEX={gone}")
