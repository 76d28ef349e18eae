"""``pipeline("batch-text-generation", ...)``: transformers' text-generation pipeline, over the whole list at once."""

from __future__ import annotations

from typing import Any

from transformers import TextGenerationPipeline

from ..results.sharing_plan import SharingPlan
from .batch_pipeline import BatchPipeline
from .pipeline_call import PipelineCall
from .pipeline_inputs import as_inputs


class BatchTextGenerationPipeline(BatchPipeline, TextGenerationPipeline):
    """The pipeline of ``pipeline("text-generation", ...)``, with all prompts of a call computed at once.

        from hf_batchllm.integrations.pipeline_task import register_tasks
        from transformers import pipeline

        register_tasks()
        pipe = pipeline("batch-text-generation", model=model, tokenizer=tokenizer)
        pipe(prompts, max_new_tokens=50)

    It takes the same arguments and gives the same results. ``batch_size`` and ``num_workers`` have no effect: the batch
    is as large as memory allows. Further arguments:

    when it is made, the fields of a BatchConfig (``kv_memory="20GiB"``), or a BatchConfig as ``batch_config``;
    in a call, ``seed``, ``progress``, ``on_error`` and ``chat_template_kwargs`` (one dict for all chats) as for
    ``BatchGenerator.generate``. With ``on_error="record"`` a prompt that cannot be run gives
    ``[{"generated_text": None, "error": why}]``.

    Any iterable is taken for a list. For Datasets, generators and other iterators an iterator comes back. They are read
    to their end before the first prompt runs; results come in the order of the prompts, each as soon as it is ready.
    ``close()`` on that iterator, or dropping it, ends the work early.

    ``last_report`` says how the last call went, ``plan(prompts)`` what sharing would save. ``close()``, or ``with
    pipe:``, frees the memory that is kept between calls.
    """

    own_task, stock_task = "batch-text-generation", "text-generation"
    _stock = TextGenerationPipeline
    _kind_of_call = PipelineCall

    # The parameter is named as in transformers' text-generation pipeline, which overrides its base in the same way.
    def __call__(self, text_inputs: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Complete the prompt or prompts, as ``pipeline("text-generation", ...)`` does."""
        self._refuse_overridden_methods()
        inputs = as_inputs(text_inputs)
        if isinstance(inputs, list) and not inputs:
            self._sanitize_parameters(**kwargs)
            return []
        return super().__call__(inputs, **kwargs)

    def plan(self, text_inputs: Any, **kwargs: Any) -> SharingPlan:
        """What sharing these prompts would save. Runs no model."""
        return self._plan(as_inputs(text_inputs), kwargs)
