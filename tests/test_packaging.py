"""The package imports the same way however it was installed and wherever Python was started.

The top-level folders /kernels and /patches are imported as ``hf_batchllm.kernels`` and ``hf_batchllm.patches``.
``kernels`` is also the name of a Hugging Face package that transformers imports when it finds one, so our folder must
never be taken for it: neither folder has an ``__init__.py`` of its own.
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable
from email.parser import HeaderParser
from pathlib import Path

import pytest

import hf_batchllm

pytestmark = pytest.mark.xdist_group("packaging")  # the environments below are made once, by one worker

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"hf_batchllm": "hf_batchllm", "hf_batchllm.kernels": "kernels", "hf_batchllm.patches": "patches"}
TYPED = "hf_batchllm/py.typed"


def source_files() -> dict[str, Path]:
    """Where each Python file of the tree goes in an installed package -> where it lies here."""
    return {
        "/".join([*package.split("."), *path.relative_to(ROOT / folder).parts]): path
        for package, folder in FOLDERS.items()
        for path in sorted((ROOT / folder).rglob("*.py"))
    }


def module_names() -> list[str]:
    """Every module of the library, as it is imported."""
    names = {file.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for file in source_files()}
    return sorted({*FOLDERS, *names} - {name for name in names if name.endswith("__main__")})


def run(*command: str | Path, cwd: Path, path: Path | None = None) -> str:
    """The output of a command in a clean environment; a failure shows all of it."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PYTEST_"))}
    env["PYTHONDONTWRITEBYTECODE"] = "1"
    if path is not None:
        env["PYTHONPATH"] = str(path)
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True, timeout=200)
    if done.returncode != 0:
        pytest.fail(f"{done.stdout}\n{done.stderr}\nexit status {done.returncode} in {cwd}", pytrace=False)
    return done.stdout


# --- the folders --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["kernels", "patches"])
def test_the_mapped_folders_are_not_import_packages(folder: str) -> None:
    assert (ROOT / folder).is_dir()
    assert not (ROOT / folder / "__init__.py").exists(), f"/{folder} must not have an __init__.py: see CONTRIBUTING.md"


def test_nothing_else_is_named_like_the_hugging_face_package() -> None:
    assert not (ROOT / "tests" / "kernels").exists(), "pytest puts tests/ on sys.path, where it would be found"
    assert not (ROOT / "hf_batchllm" / "kernels").exists()
    assert not (ROOT / "hf_batchllm" / "patches").exists()


# --- the public names ---------------------------------------------------------------------------------------------


def test_public_names_resolve() -> None:
    assert set(hf_batchllm.__all__) == {*hf_batchllm._HOME, "__version__"}
    assert set(hf_batchllm.__all__) <= set(dir(hf_batchllm))
    for name in hf_batchllm.__all__:
        value = getattr(hf_batchllm, name)
        if name != "__version__":
            assert value.__name__ == name
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = hf_batchllm.no_such_name


def test_type_checkers_see_the_names_that_python_finds() -> None:
    tree = ast.parse((ROOT / "hf_batchllm" / "__init__.py").read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level == 1]
    seen = {alias.name: node.module for node in imports for alias in node.names}
    assert seen == {**hf_batchllm._HOME, "__version__": "_version"}


def test_the_annotations_are_marked_as_the_librarys_own() -> None:
    """Without this empty file in the package, a type checker takes all names of the library for Any (PEP 561)."""
    assert (ROOT / TYPED).read_bytes() == b""
    assert '"hf_batchllm": ["py.typed"]' in (ROOT / "setup.py").read_text(), "setup.py must ship it"


def test_planning_needs_no_torch(tmp_path: Path) -> None:
    code = """
import sys
import hf_batchllm
assert not {"torch", "transformers", "numpy"} & set(sys.modules), "by the package alone"
from hf_batchllm import PromptError, SharingPlan, plan_prompts
assert not {"torch", "transformers"} & set(sys.modules), "by the import of plan_prompts"
plan_prompts([[1, 2, 3], [1, 2, 4]])
assert not {"torch", "transformers"} & set(sys.modules), "by a plan"
"""
    run(sys.executable, "-c", code, cwd=tmp_path, path=ROOT)


# --- every way to install, every place to start from --------------------------------------------------------------


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What git would check out, as far as the build needs it: building leaves its traces here, not in the real one."""
    target = tmp_path_factory.mktemp("checkout")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, target)
    for folder in FOLDERS.values():
        shutil.copytree(ROOT / folder, target / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return target


def new_environment(folder: Path) -> Path:
    """A fresh virtual environment that sees the packages of the running one, but none of its .pth files; its Python."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    paths = {"base": str(folder), "platbase": str(folder)}
    here = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    site_packages = Path(sysconfig.get_path("purelib", "venv", vars=paths))
    (site_packages / "packages_of_the_running_one.pth").write_text("\n".join(sorted(here)) + "\n")
    return Path(sysconfig.get_path("scripts", "venv", vars=paths)) / "python"


def pip_install(python: Path, *what: str | Path) -> None:
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed"]
    run(sys.executable, "-m", "pip", "--python", python, "install", *options, *what, cwd=python.parent)


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", out]
    run(sys.executable, "-m", "pip", "wheel", *options, checkout, cwd=out)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(checkout: Path, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The Python of an environment where the library is installed in a given way; each is made when first asked for."""
    made: dict[str, Path] = {}

    def python(how: str, keep: bool = True) -> Path:
        if how not in made:
            made[how] = new_environment(tmp_path_factory.mktemp(how) / "env")
            if how == "editable":
                pip_install(made[how], "--editable", checkout)
            elif how == "wheel":
                pip_install(made[how], wheel)
        return made[how] if keep else made.pop(how)

    return python


# Where each module would be imported from. The modules' parents are really imported, torch is not.
PROBE = """
import importlib.util, json, sys
import hf_batchllm, hf_batchllm.kernels, hf_batchllm.patches
def where(name):
    spec = importlib.util.find_spec(name)
    assert spec is not None, f"no module named {name}"
    return spec.origin if spec.has_location else list(spec.submodule_search_locations)[0]
def test_probe():
    with open(OUT, "w") as out:
        json.dump({name: where(name) for name in NAMES}, out)
    assert "kernels" not in sys.modules
    assert "patches" not in sys.modules
"""
PYTEST = ["-m", "pytest", "-q", *(f"-pno:{plugin}" for plugin in ("cacheprovider", "xdist", "hypothesispytest"))]
STARTS = {
    "python -c": lambda probe: ["-c", f"{probe.read_text()}\ntest_probe()"],
    "python -m pytest": lambda probe: [*PYTEST, probe],
    "pytest": lambda probe: ["-P", *PYTEST, probe],  # -P: without the working directory on sys.path
}


@pytest.mark.some_cases("how", "place")
@pytest.mark.parametrize(
    ("how", "place", "start"),
    [
        *(("wheel", "the root", start) for start in STARTS),  # two trees to choose from
        ("wheel", "elsewhere", "python -c"),
        ("wheel", "elsewhere", "pytest"),
        ("editable", "the root", "pytest"),
        ("editable", "elsewhere", "python -m pytest"),
        ("not installed", "the root", "python -c"),
        ("not installed", "elsewhere", "pytest"),
    ],
)
def test_every_module_is_found_in_one_tree(
    how: str, place: str, start: str, checkout: Path, installed: Callable[[str], Path], tmp_path: Path
) -> None:
    python = installed(how)
    cwd = checkout if place == "the root" else tmp_path / "elsewhere"
    (cwd / "tests").mkdir(parents=True, exist_ok=True)
    out = tmp_path / "found.json"
    probe = cwd / "tests" / "test_probe.py"
    probe.write_text(f"OUT = {str(out)!r}\nNAMES = {module_names()!r}\n{PROBE}")

    path = checkout if how == "not installed" and place == "elsewhere" else None
    run(python, *STARTS[start](probe), cwd=cwd, path=path)

    found = {name: Path(origin) for name, origin in json.loads(out.read_text()).items()}
    if how == "wheel" and place == "elsewhere":
        tree = python.parents[1]
        assert found["hf_batchllm.kernels"].parent.name == "hf_batchllm"
    else:
        tree = checkout  # from its own root a checkout comes before what is installed, and all of it does
        assert found["hf_batchllm.kernels"] == checkout / "kernels"
    strays = {name: origin for name, origin in found.items() if tree not in origin.parents}
    assert not strays


IMPORT_ALL = """
import importlib, sys
for name in NAMES:
    importlib.import_module(name)
"""


def test_every_module_imports_from_a_wheel(installed: Callable[[str], Path], tmp_path: Path) -> None:
    run(installed("wheel"), "-c", f"NAMES = {module_names()!r}\n{IMPORT_ALL}", cwd=tmp_path)


def test_the_command_is_installed(installed: Callable[[str], Path], tmp_path: Path) -> None:
    for how in ("editable", "wheel"):
        said = run(installed(how).parent / "hf-batchllm", "--version", cwd=tmp_path)
        assert said.strip() == f"hf-batchllm {hf_batchllm.__version__}"


def test_every_module_imports_from_the_root_beside_transformers() -> None:
    then = """
from transformers import LlamaForCausalLM
from transformers.utils import is_kernels_available
found = sys.modules.get("kernels")
if getattr(found, "__file__", None) is None:  # nothing, or our folder as a namespace: nothing in it was run
    assert not is_kernels_available()
    assert not [name for name in sys.modules if name.startswith("kernels.")]
"""
    run(sys.executable, "-c", f"NAMES = {module_names()!r}\n{IMPORT_ALL}{then}", cwd=ROOT)


def test_the_hugging_face_kernels_package_still_wins(tmp_path: Path) -> None:
    """With a distribution named ``kernels`` installed, transformers uses that one even when started in our root."""
    from transformers.utils import import_utils

    version = getattr(import_utils, "KERNELS_MIN_VERSION", None)
    if version is None:
        pytest.skip("this transformers does not say which version of kernels it wants")
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text(
        "class Everything(type):\n"
        "    def __getattr__(cls, name): return cls()\n"
        "class Anything(metaclass=Everything):\n"
        "    def __init__(self, *args, **kwargs): pass\n"
        "    def __call__(self, decorated, *args, **kwargs): return decorated\n"
        "def __getattr__(name):\n"
        "    if name.startswith('__'): raise AttributeError(name)\n"
        "    return Anything\n"
    )
    metadata = tmp_path / f"kernels-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {version}\n")
    code = """
import hf_batchllm.kernels, kernels
from transformers import LlamaForCausalLM
from transformers.utils import is_kernels_available
assert is_kernels_available()
print(kernels.__file__, *hf_batchllm.kernels.__path__, sep="\\n")
"""
    theirs, ours = run(sys.executable, "-c", code, cwd=ROOT, path=tmp_path).splitlines()[-2:]
    assert Path(theirs) == tmp_path / "kernels" / "__init__.py"
    assert Path(ours) == ROOT / "kernels"


# --- what runs when Python starts ---------------------------------------------------------------------------------


def test_nothing_runs_when_python_starts(wheel: Path, installed: Callable[[str], Path], tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".pth") or ".data/" in name]
    code = """
import sys
before = list(sys.meta_path)
assert not [name for name in sys.modules if "batchllm" in name]
assert not [each for each in before if "batchllm" in f"{each!r} {type(each).__module__}"]
import hf_batchllm
assert sys.meta_path == before
assert not {"torch", "transformers", "lm_eval"} & set(sys.modules)
"""
    run(installed("wheel"), "-c", code, cwd=tmp_path)


# --- the version --------------------------------------------------------------------------------------------------


def test_the_changelog_speaks_of_this_version_first() -> None:
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    released = hf_batchllm.__version__.removesuffix(".dev0")
    expected = "Unreleased" if released != hf_batchllm.__version__ else released
    assert headings[0] == expected, "see CONTRIBUTING.md, A release"


# --- the wheel ----------------------------------------------------------------------------------------------------


def test_the_wheel_holds_the_library_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (info,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
        assert archive.read(f"{info}/top_level.txt").decode().split() == ["hf_batchllm"]
        metadata = HeaderParser().parsestr(archive.read(f"{info}/METADATA").decode())
    assert {name for name in names if not name.startswith(f"{info}/")} == {*source_files(), TYPED}
    assert f"{info}/licenses/LICENSE" in names
    assert metadata["Name"] == "hf-batchllm"
    assert metadata["Version"] == hf_batchllm.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata["Author"] and metadata["Summary"] and metadata["Keywords"]


# --- the end ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["editable", "wheel"])
def test_what_is_uninstalled_leaves_nothing(how: str, installed: Callable[..., Path], tmp_path: Path) -> None:
    python = installed(how, keep=False)
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site_packages = Path(run(python, "-c", ask, cwd=tmp_path).strip())
    assert len(list(site_packages.iterdir())) > 1
    run(sys.executable, "-m", "pip", "--python", python, "uninstall", "--quiet", "--yes", "hf-batchllm", cwd=tmp_path)
    left = {each.name for each in site_packages.iterdir()} - {"__pycache__"}
    assert left == {"packages_of_the_running_one.pth"}
    assert not run(python, "-W", "error", "-c", "pass", cwd=tmp_path)
