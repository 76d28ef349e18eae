"""``lm_eval --model hf-batchllm``: run when Python starts, by the line of a .pth file installed beside this one.

The evaluation harness finds models by a list of its own, and asks nobody else. So its list gets a line when it is
loaded, if ever it is. Every program of the environment runs this first: nothing is imported here, nothing is raised,
and no other import is touched.
"""

import sys

_MODELS = "lm_eval.models"
_NAME = "hf-batchllm"
_HOME = "hf_batchllm.lm_eval.model:BatchLM"  # is imported when the model is asked for


class _BeforeModels:
    """Has the harness's list of models found by whoever finds it, and a line added once it was run."""

    def __init__(self):
        self._asking = False

    def find_spec(self, name, path=None, target=None):
        if name != _MODELS or self._asking:  # by another finder that asks all others, as this one does
            return None
        self._asking = True
        try:
            finders = [each for each in sys.meta_path if each is not self and hasattr(each, "find_spec")]
            found = (each.find_spec(name, path, target) for each in finders)
            spec = next((each for each in found if each is not None), None)
            if spec is not None:
                self._follow(spec.loader)
            return spec
        except Exception:  # as if nobody had been here: the others are asked once more
            return None
        finally:
            self._asking = False

    def _follow(self, loader):
        run = loader.exec_module

        def exec_module(module):
            if module.__name__ == _MODELS:
                loader.__dict__.pop("exec_module", None)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
            run(module)
            if module.__name__ == _MODELS:
                _add_to(module)

        loader.exec_module = exec_module


def _add_to(models):
    try:
        from lm_eval.api.registry import model_registry

        models.MODEL_MAPPING.setdefault(_NAME, _HOME)
        if _NAME not in model_registry:
            model_registry.register(_NAME, target=_HOME)
    except Exception:  # a harness that keeps its models otherwise; `import hf_batchllm.lm_eval` says what is wrong
        pass


if _MODELS not in sys.modules:
    sys.meta_path.insert(0, _BeforeModels())
