"""Fast offline generation over a long list of prompts with the transformers model you already hold.

The public names load on first use, so importing this package, or planning with ``plan_prompts``, does not import torch.
"""

import os as _os

_here = _os.path.dirname(_os.path.abspath(__file__))
_root = _os.path.dirname(_here)
if _os.path.isfile(_os.path.join(_root, "pyproject.toml")) and not _os.path.isdir(_os.path.join(_here, "kernels")):
    __path__.append(_root)  # a source checkout: /kernels and /patches are hf_batchllm.kernels and hf_batchllm.patches

import importlib as _importlib
import sys as _sys
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .config import BatchConfig
    from .drop_in import accelerated
    from .errors import (
        BatchLLMError,
        CacheMemoryError,
        ConfigError,
        FilesError,
        GenerationInterrupted,
        GeneratorBusyError,
        OptionValueError,
        PromptError,
        PromptsTypeError,
        TokenizerError,
        UnsupportedModelError,
        UnsupportedOptionError,
    )
    from .files.file_report import FileReport
    from .files.run_file import run_file
    from .generator import BatchGenerator
    from .results import BatchResult, Generation, RunReport
    from .scores import Score, ScoreResult
    from .sharing import SharingPlan, plan_prompts

_HOME = {  # public name -> the module that holds it
    "BatchConfig": "config",
    "BatchGenerator": "generator",
    "BatchLLMError": "errors",
    "BatchResult": "results",
    "CacheMemoryError": "errors",
    "ConfigError": "errors",
    "FileReport": "files.file_report",
    "FilesError": "errors",
    "Generation": "results",
    "GenerationInterrupted": "errors",
    "GeneratorBusyError": "errors",
    "OptionValueError": "errors",
    "PromptError": "errors",
    "PromptsTypeError": "errors",
    "RunReport": "results",
    "Score": "scores",
    "ScoreResult": "scores",
    "SharingPlan": "sharing",
    "TokenizerError": "errors",
    "UnsupportedModelError": "errors",
    "UnsupportedOptionError": "errors",
    "accelerated": "drop_in",
    "plan_prompts": "sharing",
    "run_file": "files.run_file",
}

__all__ = [
    "BatchConfig",
    "BatchGenerator",
    "BatchLLMError",
    "BatchResult",
    "CacheMemoryError",
    "ConfigError",
    "FileReport",
    "FilesError",
    "Generation",
    "GenerationInterrupted",
    "GeneratorBusyError",
    "OptionValueError",
    "PromptError",
    "PromptsTypeError",
    "RunReport",
    "Score",
    "ScoreResult",
    "SharingPlan",
    "TokenizerError",
    "UnsupportedModelError",
    "UnsupportedOptionError",
    "__version__",
    "accelerated",
    "plan_prompts",
    "run_file",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if "IPython" in _sys.modules:
        _importlib.import_module(f"{__name__}.notebook")
    value = getattr(_importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value  # found at once from now on
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_importlib.import_module(f"{__name__}.pipeline_import").register_task()  # pipeline("batch-text-generation", ...)
