"""What is missing, or of a version without tests, is said in one sentence, with the command that mends it."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from support_families import build

from hf_batchllm import BatchGenerator, installed_versions

ROOT = Path(__file__).resolve().parents[1]
# Run before the rest: nothing finds the package of this name.
HIDE = """
import importlib.util, sys
class Hides:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {name!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hides())
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == {name!r} else find_spec(name, package)
"""


def test_the_bounds_are_those_of_the_installation() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    asked = {each.name: each.specifier for each in map(Requirement, project["dependencies"])}
    assert asked == {name: SpecifierSet(bounds) for name, bounds in installed_versions.REQUIRED.items()}


@pytest.mark.parametrize(
    ("missing", "code"),
    [
        ("torch", "from hf_batchllm import BatchGenerator"),
        ("numpy", "from hf_batchllm import plan_prompts"),
        ("torch", "import hf_batchllm.cli as cli; sys.exit(cli.main('run in.jsonl out.jsonl --model m'.split()))"),
        ("torch", "import hf_batchllm.cli as cli; sys.exit(cli.main(['bench']))"),
    ],
)
def test_a_missing_package_is_named_with_what_to_do(missing: str, code: str) -> None:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    code = HIDE.format(name=missing) + code
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    bounds = installed_versions.REQUIRED[missing]
    said = f"hf-batchllm needs {missing}{bounds}, which is not installed here: pip install '{missing}{bounds}'"
    assert done.returncode and said in done.stderr.splitlines()[-1]
    assert "During handling" not in done.stderr
    assert "cli" not in code or len(done.stderr.splitlines()) == 1


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Versions that are found in place of the installed ones; nothing has been warned of."""
    found: dict[str, str] = {}
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: found.get(name) or version(name))
    monkeypatch.setattr(installed_versions, "_warned", set())
    return found


@pytest.mark.parametrize(
    ("version", "said"),
    [
        (
            "2.8.0+cpu",
            r"needs torch>=2\.11, and 2\.8\.0\+cpu is installed here: pip install 'torch>=2\.11'\..*not tested",
        ),
        ("9.1.0", r"is tested with torch<[\d.]+, and 9\.1\.0 is installed here\..*not tested"),
    ],
)
def test_another_version_is_warned_of_once(version: str, said: str, versions: dict[str, str]) -> None:
    versions["torch"] = version
    with pytest.warns(UserWarning, match=said) as caught:
        BatchGenerator(build("llama"))
    assert [Path(warning.filename) for warning in caught] == [Path(__file__)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        BatchGenerator(build("llama"))


def pinned(name: str) -> list[str]:
    """The versions of a package that `make` installs."""
    lines = [line for path in ROOT.glob("constraints*.txt") for line in path.read_text(encoding="utf-8").splitlines()]
    return [line.partition("==")[2] for line in lines if line.startswith(f"{name}==")]


@pytest.mark.parametrize("name", installed_versions.TESTED)
def test_what_make_installs_is_what_is_tested(name: str) -> None:
    newest = max(map(Version, pinned(name)))
    assert installed_versions.TESTED[name] == f"<{newest.major}.{newest.minor + 1}"
    assert all(each in SpecifierSet(installed_versions.REQUIRED[name]) for each in pinned(name))


@pytest.mark.parametrize("version", ["2.11.0", "2.13.1+cu130", "2.13.0.dev20260401", "2.11.0a0+nv25.12", "2.14.1"])
def test_builds_of_a_tested_version_are_not_warned_of(version: str, versions: dict[str, str]) -> None:
    versions["torch"] = version
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        installed_versions.warn_of_versions()


def test_an_import_that_fails_by_another_version_says_so(versions: dict[str, str]) -> None:
    failed = ImportError("cannot import name 'AttentionInterface' from 'transformers'", name="transformers")
    assert installed_versions.in_words(failed) is None
    versions["transformers"] = "4.57.1"
    said = installed_versions.in_words(failed)
    assert "needs transformers>=5.17,<6, and 4.57.1 is installed here" in str(said)
    assert said is not None and said.__cause__ is failed
    versions["transformers"] = "5.99.0"
    assert "is tested with transformers<" in str(installed_versions.in_words(failed))
