"""The task "batch-text-generation" for ``transformers.pipeline``, known as soon as transformers' pipelines are loaded.

This package does not import transformers by itself, so it waits for that: nothing else here may import it either.
"""

from __future__ import annotations

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

TASK = "batch-text-generation"
LIKE = "text-generation"  # the task whose models, defaults and names are ours, too
_PIPELINES = "transformers.pipelines"
_MODULE = f"{__name__.rpartition('.')[0]}.pipeline"


def register_task(its_class: type | None = None) -> None:
    """Now if transformers' pipelines are loaded, else once they are. A second call does no harm.

    ``its_class``: the pipeline itself, which calls this when it is complete: it can be the first to load transformers'
    pipelines, and these may want a class.
    """
    for finder in [each for each in sys.meta_path if type(each).__qualname__ == _AfterPipelines.__qualname__]:
        sys.meta_path.remove(finder)  # of a package that is being reloaded
    pipelines = sys.modules.get(_PIPELINES)
    if pipelines is None:
        sys.meta_path.insert(0, _AfterPipelines())
    else:
        _add_to(pipelines, its_class)


def _add_to(pipelines: Any, its_class: type | None = None) -> None:
    # Not by register_pipeline(): it marks the class as somebody's own code, which save_pretrained() would then copy
    # next to the model and enter in its config.
    tasks = pipelines.PIPELINE_REGISTRY.supported_tasks
    if isinstance(tasks[LIKE]["impl"], str):  # resolved when it is used
        tasks[TASK] = {**tasks[LIKE], "impl": f"{_MODULE}.BatchTextGenerationPipeline"}
    elif its_class is not None:
        tasks[TASK] = {**tasks[LIKE], "impl": its_class}
    elif _MODULE in sys.modules and hasattr(sys.modules[_MODULE], "BatchTextGenerationPipeline"):
        tasks[TASK] = {**tasks[LIKE], "impl": sys.modules[_MODULE].BatchTextGenerationPipeline}
    elif _MODULE not in sys.modules:
        importlib.import_module(_MODULE)  # by name: it imports this module, and calls `register_task` at its end


class _AfterPipelines(MetaPathFinder):
    """Finds transformers' pipelines as the other finders do, and has the task added after they were run."""

    def __init__(self) -> None:
        self._asking = False

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != _PIPELINES or self._asking:  # by another finder that asks all others, as this one does
            return None
        self._asking = True
        try:
            found = (find(name, path, target) for find in self._others())
            spec = next((each for each in found if each is not None), None)
        finally:
            self._asking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _AndThen(spec.loader, self)
        return spec

    def _others(self) -> list[Any]:
        others = [each for each in sys.meta_path if each is not self]
        return [each.find_spec for each in others if hasattr(each, "find_spec")]


class _AndThen(Loader):
    def __init__(self, loader: Any, finder: _AfterPipelines) -> None:
        self._loader = loader
        self._finder = finder

    def create_module(self, spec: ModuleSpec) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        module.__spec__.loader = module.__loader__ = self._loader  # as if we had not been there
        self._loader.exec_module(module)
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        _add_to(module)
