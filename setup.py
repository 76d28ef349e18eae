"""Where the packages lie. Everything else about the project is in pyproject.toml.

The top-level folders /kernels and /patches are packaged as ``hf_batchllm.kernels`` and ``hf_batchllm.patches``, never
as import packages of their own: ``kernels`` is the name of a Hugging Face package (see CONTRIBUTING.md).

What is in hf_batchllm/lm_eval/startup is installed beside the packages, in editable installs too: a .pth file, whose
line Python runs when it starts, and the module that it imports. No setting of setuptools puts a file there.
"""

from pathlib import Path

from setuptools import find_namespace_packages, setup
from setuptools.command.build_py import build_py

FOLDERS = {"hf_batchllm": "hf_batchllm", "hf_batchllm.kernels": "kernels", "hf_batchllm.patches": "patches"}
AT_START = [f"hf_batchllm/lm_eval/startup/{name}" for name in ("hf_batchllm_lm_eval.pth", "_hf_batchllm_lm_eval.py")]


def tree(package: str, folder: str) -> list[str]:
    """``package`` and one package for each folder below ``folder``."""
    below = find_namespace_packages(folder, exclude=["__pycache__", "*.__pycache__", "*.startup"])
    return [package, *(f"{package}.{name}" for name in below)]


class BuildWithStartup(build_py):
    def run(self) -> None:
        super().run()
        # An editable wheel holds what is in the folder from which an ordinary one is installed, and no more.
        target = self.get_finalized_command("install").install_lib if self.editable_mode else self.build_lib
        for file in AT_START:
            self.mkpath(target)
            self.copy_file(file, str(Path(target, Path(file).name)))

    def get_source_files(self) -> list[str]:  # a source distribution holds these
        return [*super().get_source_files(), *AT_START]

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        built = [] if self.editable_mode else [str(Path(self.build_lib, Path(file).name)) for file in AT_START]
        return [*super().get_outputs(include_bytecode), *built]


setup(
    packages=[name for package, folder in FOLDERS.items() for name in tree(package, folder)],
    package_dir=FOLDERS,
    package_data={"hf_batchllm": ["py.typed"]},  # type checkers read the annotations, those of kernels and patches too
    include_package_data=False,  # what is installed beside the packages need not lie in them, too
    cmdclass={"build_py": BuildWithStartup},
)
