"""``pipeline("batch-image-text-to-text", ...)``: transformers' pipeline for images, over the whole list at once."""

from __future__ import annotations

from typing import Any

from transformers import ImageTextToTextPipeline, Pipeline

from ..errors import UnsupportedOptionError
from ..inputs.option_row import OptionKind
from ..inputs.option_table import TABLE, names
from ..results.sharing_plan import SharingPlan
from .batch_pipeline import BatchPipeline, check_one_config
from .image_pipeline_call import ImagePipelineCall
from .image_pipeline_inputs import as_image_inputs
from .pipeline_options import IN_ONE, Parameters

# Names that the template or the processor has, too. Of all others it is certain that ``generate`` is meant.
_AMBIGUOUS = {
    *("chat_template_kwargs", "continue_final_message", "max_length", "max_new_tokens", "prompts", "tokenizer"),
    *("tools", "truncation_side"),
}
_OURS = names(kind=OptionKind.ADDED) - _AMBIGUOUS
_THEIRS = frozenset(TABLE) - _OURS - _AMBIGUOUS


class BatchImageTextToTextPipeline(BatchPipeline, ImageTextToTextPipeline):
    """The pipeline of ``pipeline("image-text-to-text", ...)``, with all prompts of a call computed at once.

        from hf_batchllm.integrations.pipeline_task import register_tasks
        from transformers import pipeline

        register_tasks()
        pipe = pipeline("batch-image-text-to-text", model=model, processor=processor)
        pipe(chats, max_new_tokens=50, return_full_text=False)

    It takes the same arguments and gives the same results: chats with images; or ``images=`` beside ``text=``, with
    placeholders; or ``{"images": ..., "text": ...}``, and lists, generators and Datasets of them. Options of
    ``generate`` go into ``generate_kwargs``. ``batch_size`` and ``num_workers`` have no effect: the batch is as large
    as memory allows. An image is read by the vision tower once, however many prompts show it. Further arguments:

    when it is made, the fields of a BatchConfig (``kv_memory="20GiB"``), or a BatchConfig as ``batch_config``;
    in a call, ``seed``, ``progress``, ``on_error`` and ``chat_template_kwargs`` as for ``BatchGenerator.generate``.
    With ``on_error="record"`` a prompt that cannot be run gives ``[{"generated_text": None, "error": why}]``.

    Iterators, ``last_report``, ``plan(prompts)`` and ``close()`` are as in BatchTextGenerationPipeline.
    """

    own_task, stock_task = "batch-image-text-to-text", "image-text-to-text"
    _stock = ImageTextToTextPipeline
    _kind_of_call = ImagePipelineCall

    def __call__(self, images: Any = None, text: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        """Complete the prompt or prompts, as ``pipeline("image-text-to-text", ...)`` does."""
        self._refuse_overridden_methods()
        inputs = as_image_inputs(images, text)
        if isinstance(inputs, list) and not inputs:
            self._sanitize_parameters(**kwargs)
            return []
        return Pipeline.__call__(self, inputs, **kwargs)

    def plan(self, images: Any = None, text: Any = None, **kwargs: Any) -> SharingPlan:
        """What sharing these prompts would save. Runs no model."""
        return self._plan(as_image_inputs(images, text), kwargs)

    def _sanitize_parameters(self, *args: Any, **kwargs: Any) -> tuple[Parameters, Parameters, Parameters]:
        ours = {name: kwargs.pop(name) for name in _OURS if name in kwargs}
        for name in kwargs:
            if name in _THEIRS:  # transformers would hand it to the processor, which passes over it
                raise UnsupportedOptionError(name, f"goes to `generate`: pass {IN_ONE}={{{name!r}: ...}}")
        if kwargs.get(IN_ONE) is not None:
            kwargs[IN_ONE] = dict(kwargs[IN_ONE])  # transformers writes into it
            check_one_config(kwargs[IN_ONE].get("generation_config"))
        preprocess, forward, postprocess = super()._sanitize_parameters(*args, **kwargs)
        return preprocess, {**forward, **ours}, postprocess
