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

from ._version import __version__

if TYPE_CHECKING:
    from .config import BatchConfig
    from .errors import (
        BatchLLMError,
        CacheMemoryError,
        ConfigError,
        FilesError,
        GenerationInterrupted,
        GeneratorBusyError,
        OptionValueError,
        PoolError,
        PromptError,
        PromptsTypeError,
        RanksError,
        TokenizerError,
        UnsupportedModelError,
        UnsupportedOptionError,
    )
    from .files.merge_shards import merge_shards
    from .files.report import FileReport
    from .files.run_file import run_file
    from .generator import BatchGenerator
    from .integrations.accelerated import accelerated
    from .planning.base_scheduler import BaseScheduler
    from .planning.sharing import plan_prompts
    from .pool.generator_pool import GeneratorPool
    from .pool.rank_generator import RankGenerator
    from .results.generations import BatchResult, Generation
    from .results.run_report import RunReport, WorkerReport
    from .results.scores import Score, ScoreResult
    from .results.sharing_plan import SharingPlan

_HOME = {  # public name -> the module that holds it
    "BaseScheduler": "planning.base_scheduler",
    "BatchConfig": "config",
    "BatchGenerator": "generator",
    "BatchLLMError": "errors",
    "BatchResult": "results.generations",
    "CacheMemoryError": "errors",
    "ConfigError": "errors",
    "FileReport": "files.report",
    "FilesError": "errors",
    "Generation": "results.generations",
    "GenerationInterrupted": "errors",
    "GeneratorBusyError": "errors",
    "GeneratorPool": "pool.generator_pool",
    "RankGenerator": "pool.rank_generator",
    "OptionValueError": "errors",
    "PoolError": "errors",
    "RanksError": "errors",
    "PromptError": "errors",
    "PromptsTypeError": "errors",
    "RunReport": "results.run_report",
    "Score": "results.scores",
    "ScoreResult": "results.scores",
    "SharingPlan": "results.sharing_plan",
    "TokenizerError": "errors",
    "UnsupportedModelError": "errors",
    "UnsupportedOptionError": "errors",
    "WorkerReport": "results.run_report",
    "accelerated": "integrations.accelerated",
    "merge_shards": "files.merge_shards",
    "plan_prompts": "planning.sharing",
    "run_file": "files.run_file",
}

__all__ = [
    "BaseScheduler",
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
    "GeneratorPool",
    "OptionValueError",
    "PoolError",
    "PromptError",
    "PromptsTypeError",
    "RankGenerator",
    "RanksError",
    "RunReport",
    "Score",
    "ScoreResult",
    "SharingPlan",
    "TokenizerError",
    "UnsupportedModelError",
    "UnsupportedOptionError",
    "WorkerReport",
    "__version__",
    "accelerated",
    "merge_shards",
    "plan_prompts",
    "run_file",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        hint = _importlib.import_module(f"{__name__}.results.missing_names").OF_THE_PACKAGE.get(name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{f': {hint}' if hint else ''}")
    if "IPython" in _sys.modules:
        _importlib.import_module(f"{__name__}.inputs.preparing")
    try:
        value = getattr(_importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    except ImportError as error:
        words = _importlib.import_module(f"{__name__}.installed_versions").in_words(error)
        if words is None:
            raise
        raise words from words.__cause__
    globals()[name] = value  # the next access finds it without this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
