"""Where the packages lie. Everything else about the project is in pyproject.toml.

The top-level folders /kernels and /patches are packaged as ``hf_batchllm.kernels`` and ``hf_batchllm.patches``, never
as import packages of their own: ``kernels`` is the name of a Hugging Face package (see CONTRIBUTING.md).
"""

from setuptools import find_namespace_packages, setup

FOLDERS = {"hf_batchllm": "hf_batchllm", "hf_batchllm.kernels": "kernels", "hf_batchllm.patches": "patches"}


def tree(package: str, folder: str) -> list[str]:
    """``package`` and one package for each folder below ``folder``."""
    below = find_namespace_packages(folder, exclude=["__pycache__", "*.__pycache__"])
    return [package, *(f"{package}.{name}" for name in below)]


setup(
    packages=[name for package, folder in FOLDERS.items() for name in tree(package, folder)],
    package_dir=FOLDERS,
    package_data={"hf_batchllm": ["py.typed"]},  # type checkers read the annotations, those of kernels and patches too
)
