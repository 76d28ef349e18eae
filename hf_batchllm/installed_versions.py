"""What this library needs to be installed: a sentence where a package is missing or of a version without tests.

pip sees to that, unless it was told not to (``--no-deps``), or another version was installed later. Nothing is imported
here that may be missing.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util

# As in pyproject.toml, whose bounds are those of an installation; a test holds the two together.
REQUIRED = {
    "accelerate": ">=1.10",
    "numpy": ">=1.26",
    "psutil": ">=5.9",
    "safetensors": ">=0.8",
    "torch": ">=2.11",
    "tqdm": ">=4.60",
    "transformers": ">=5.17,<6",
}
# This library relies on more of these two than their public names. No installation is held to these bounds.
TESTED = {"torch": "<2.16", "transformers": "<5.25"}
_warned: set[str] = set()  # of the process, so that each generator does not warn anew


def missing_package() -> str:
    """A sentence on the first package that is not installed, "" if all are. Nothing is imported."""
    return next((_missing(name) for name in REQUIRED if importlib.util.find_spec(name) is None), "")


def in_words(error: ImportError) -> ImportError | None:
    """The error that says what to install, if a missing package or its version explains this one."""
    name = error.name or ""
    if name in REQUIRED and importlib.util.find_spec(name) is None:
        return ModuleNotFoundError(_missing(name), name=name)
    for problem in filter(None, map(_other_version, TESTED)):
        better = ImportError(problem, name=error.name, path=error.path)
        better.__cause__ = error
        return better
    return None


def warn_of_versions() -> None:
    """Warn once of each package whose version is not among those that this library is tested with."""
    from .notices import warn_user

    for name in TESTED:
        if name not in _warned and (problem := _other_version(name)):
            warn_user(f"{problem}. Other versions are not tested: errors and wrong results are possible")
        _warned.add(name)  # after the warning, which may be an error


def _missing(name: str) -> str:
    return f"hf-batchllm needs {name}{REQUIRED[name]}, which is not installed here: {_install(name)}"


def _other_version(name: str) -> str:
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
    from packaging.specifiers import SpecifierSet  # comes with transformers
    from packaging.version import Version

    version = Version(Version(found).base_version)  # a nightly build of 2.13 is 2.13, and so is 2.13.0+cpu
    if version not in SpecifierSet(REQUIRED[name]):
        return f"hf-batchllm needs {name}{REQUIRED[name]}, and {found} is installed here: {_install(name)}"
    if version not in SpecifierSet(TESTED[name]):
        return f"hf-batchllm is tested with {name}{TESTED[name]}, and {found} is installed here"
    return ""


def _install(name: str) -> str:
    return f"pip install '{name}{REQUIRED[name]}'"
