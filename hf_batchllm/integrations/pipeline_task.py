"""Adds the batch pipelines' tasks to ``transformers.pipeline``, once transformers' pipelines are loaded.

Importing the package must not import transformers, so this module waits for the user's own import of it.
"""

from __future__ import annotations

import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any, NamedTuple


class Task(NamedTuple):
    like: str  # the task with the same models, defaults and names
    module: str
    name: str  # of the class


_HERE = __name__.rpartition(".")[0]
TASK, IMAGE_TASK = "batch-text-generation", "batch-image-text-to-text"
TASKS = {
    TASK: Task("text-generation", f"{_HERE}.pipeline", "BatchTextGenerationPipeline"),
    IMAGE_TASK: Task("image-text-to-text", f"{_HERE}.image_pipeline", "BatchImageTextToTextPipeline"),
}
_PIPELINES = "transformers.pipelines"


def register_task(its_class: type | None = None) -> None:
    """Add the tasks now if transformers' pipelines are loaded, else once they are. A second call does no harm.

    ``its_class``: the class of one. Its own module passes it, as that module may be the first to load transformers'
    pipelines, some versions of which take a class and not its name.
    """
    for finder in [each for each in sys.meta_path if type(each).__qualname__ == _AfterPipelines.__qualname__]:
        sys.meta_path.remove(finder)  # left by an earlier import of this package
    pipelines = sys.modules.get(_PIPELINES)
    if pipelines is None:
        sys.meta_path.insert(0, _AfterPipelines())
    else:
        _add_to(pipelines, its_class)


def _add_to(pipelines: Any, its_class: type | None = None) -> None:
    # Not by register_pipeline(): it marks the class as custom code, which save_pretrained() would then copy next to the
    # model and enter in its config.
    tasks = pipelines.PIPELINE_REGISTRY.supported_tasks
    for task, (like, module, name) in TASKS.items():
        if isinstance(tasks[like]["impl"], str):  # this version takes names, and imports a class when it is used
            tasks[task] = {**tasks[like], "impl": f"{module}.{name}"}
        elif its_class is not None and its_class.__module__ == module:
            tasks[task] = {**tasks[like], "impl": its_class}
        elif module in sys.modules and hasattr(sys.modules[module], name):
            tasks[task] = {**tasks[like], "impl": getattr(sys.modules[module], name)}
        elif module not in sys.modules:
            importlib.import_module(module)  # by name: it imports this module, and calls `register_task` at its end


class _AfterPipelines(MetaPathFinder):
    """Finds transformers' pipelines by asking the other finders, and adds the tasks after their module has run."""

    def __init__(self) -> None:
        self._asking = False

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != _PIPELINES or self._asking:  # a finder that asks all others, as this one does, may ask this one
            return None
        self._asking = True
        try:
            found = (find(name, path, target) for find in self._others())
            spec = next((each for each in found if each is not None), None)
        finally:
            self._asking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _LoaderThatAddsTask(spec.loader, self)
        return spec

    def _others(self) -> list[Any]:
        others = [each for each in sys.meta_path if each is not self]
        return [each.find_spec for each in others if hasattr(each, "find_spec")]


class _LoaderThatAddsTask(Loader):
    def __init__(self, loader: Any, finder: _AfterPipelines) -> None:
        self._loader = loader
        self._finder = finder

    def create_module(self, spec: ModuleSpec) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        module.__spec__.loader = module.__loader__ = self._loader  # as if this loader had never been there
        self._loader.exec_module(module)
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        _add_to(module)
