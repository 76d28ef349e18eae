"""The name under which the evaluation harness knows this library."""

from __future__ import annotations

NAME = "hf-batchllm"
_MODEL_CLASS = f"{__name__.rpartition('.')[0]}.model:BatchLM"


def register() -> None:
    try:
        import lm_eval.models  # noqa: F401 -- loaded first, as the harness would otherwise never register its own models
        from lm_eval.api.registry import model_registry
    except ModuleNotFoundError as error:
        if error.name not in ("lm_eval", "lm_eval.models"):
            raise
        why = "the evaluation harness is not installed, or too old: pip install 'hf-batchllm[lm-eval]'"
        raise ModuleNotFoundError(why, name="lm_eval") from None
    if NAME not in model_registry:
        model_registry.register(NAME, target=_MODEL_CLASS)
