"""``pipeline("batch-text-generation", ...)``: transformers' text-generation pipeline, over the whole list at once."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from typing import Any

from transformers import TextGenerationPipeline
from transformers.utils.chat_template_utils import Chat

from ..config import BatchConfig
from ..errors import ConfigError, GeneratorBusyError, UnsupportedModelError, UnsupportedOptionError
from ..inputs.base_model import base_model
from ..inputs.option_checks import check_generation_config
from ..inputs.option_table import TABLE
from ..inputs.prompt_options import checked_prompt_option
from ..inputs.unknown_options import unknown_option
from ..results.run_report import RunReport
from ..results.sharing_plan import SharingPlan
from .pipeline_call import AROUND_THE_MODEL, CHAT_OPTIONS, PipelineCall, TokenGenerator
from .pipeline_inputs import BadInput, as_inputs, read_inputs
from .pipeline_options import Parameters, options_for_generate
from .pipeline_results import ResultIterator
from .pipeline_task import LIKE, TASK, register_task

_BEYOND_ITS_SIGNATURE = ("add_special_tokens", "padding", "batch_size", "num_workers")
_PIPELINE_OPTIONS = [  # besides those of ``generate``
    name
    for name in (*inspect.signature(TextGenerationPipeline._sanitize_parameters).parameters, *_BEYOND_ITS_SIGNATURE)
    if name not in ("self", "generate_kwargs", *TABLE)
]
_FIELDS = [field.name for field in dataclasses.fields(BatchConfig)]


class BatchTextGenerationPipeline(TextGenerationPipeline):
    """The pipeline of ``pipeline("text-generation", ...)``, with all prompts of a call computed at once.

        import hf_batchllm
        from transformers import pipeline

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

    def __init__(self, *args: Any, task: str = TASK, batch_config: BatchConfig | None = None, **kwargs: Any) -> None:
        fields = {name: kwargs.pop(name) for name in _FIELDS if name in kwargs}
        self._batch_config = BatchConfig.of(batch_config, fields, "batch_config")
        self._refuse_overridden_methods()
        _check_generation_config(kwargs.get("generation_config"))
        super().__init__(*args, task=LIKE, **kwargs)  # transformers looks up defaults and checks by it
        self.task = task or TASK
        self._refuse_unknown_options(options_for_generate(self, dict(self._forward_params)))
        self._closed = False
        self._generator: TokenGenerator | None = self._new_generator()

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
        inputs = as_inputs(text_inputs)
        preprocess, forward, _ = self._sanitize_parameters(**kwargs)
        call = self._call({**self._preprocess_params, **preprocess}, {**self._forward_params, **forward}, {})
        prepared = call.prepare([inputs] if isinstance(inputs, str | Chat | BadInput) else read_inputs(inputs))
        with prepared.all_problems():
            return self._ready().plan(prepared.prompts)

    @property
    def last_report(self) -> RunReport | None:
        return None if self._generator is None else self._generator.last_report

    def close(self) -> None:
        """Free the memory that is kept between calls. The pipeline cannot be used afterwards; its model can."""
        if self._generator is not None:
            self._generator.close()
        self._closed = True

    def __enter__(self) -> BatchTextGenerationPipeline:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            self.close()
        except GeneratorBusyError:
            if kind is None:  # else the error that ends the block says more
                raise

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: a copy makes its own generator, for its own model."""
        return {**vars(self), "_generator": None}

    # -- what transformers calls -------------------------------------------------------------------------------

    def _sanitize_parameters(self, *args: Any, **kwargs: Any) -> tuple[Parameters, Parameters, Parameters]:
        for name in _FIELDS:
            if name in kwargs:
                raise ConfigError(f"`{name}` is set when the pipeline is made: pipeline({TASK!r}, ..., {name}=...)")
        _check_generation_config(kwargs.get("generation_config"))
        template = kwargs.pop(CHAT_OPTIONS, None)
        parameters: tuple[Parameters, Parameters, Parameters] = super()._sanitize_parameters(*args, **kwargs)
        if template is not None:
            parameters[0][CHAT_OPTIONS] = checked_prompt_option(CHAT_OPTIONS, template)
        return parameters

    def get_iterator(
        self,
        inputs: Any,
        num_workers: int,
        batch_size: int,
        preprocess_params: Parameters,
        forward_params: Parameters,
        postprocess_params: Parameters,
    ) -> Any:
        call = self._call(preprocess_params, forward_params, postprocess_params)
        if isinstance(inputs, list):
            return call.results(self._ready(), call.prepare(inputs))
        return ResultIterator(lambda: call.stream(self._ready(), call.prepare(read_inputs(inputs))), inputs)

    def run_single(
        self, inputs: Any, preprocess_params: Parameters, forward_params: Parameters, postprocess_params: Parameters
    ) -> Any:
        call = self._call(preprocess_params, forward_params, postprocess_params)
        (result,) = call.results(self._ready(), call.prepare([inputs]))
        return result

    # -- the generator -----------------------------------------------------------------------------------------

    def _new_generator(self) -> TokenGenerator:
        return TokenGenerator(self.model, self.tokenizer, self._batch_config)

    def _ready(self) -> TokenGenerator:
        """A generator for the present model and tokenizer: both are attributes that the user may set."""
        if self._closed:
            raise GeneratorBusyError("this pipeline is closed: make a new one for the model")
        kept = self._generator
        if kept is not None and kept.model is self.model and kept.given_tokenizer is self.tokenizer:
            return kept
        if kept is not None:
            kept.close()
        self._generator = new = self._new_generator()
        return new

    def _refuse_overridden_methods(self) -> None:
        """Refuse subclasses that change a method which one run over all prompts does not call."""
        for name in AROUND_THE_MODEL:
            if name in vars(self) or getattr(type(self), name) is not getattr(TextGenerationPipeline, name):
                raise UnsupportedModelError(
                    f"{type(self).__name__} has a `{name}` of its own, which would not run for each prompt: change "
                    "`_sanitize_parameters`, `preprocess` or `postprocess`, or leave it to a text-generation pipeline"
                )

    def _call(self, preprocess: Parameters, forward: Parameters, postprocess: Parameters) -> PipelineCall:
        call = PipelineCall(self, preprocess, forward, postprocess)
        self._refuse_unknown_options(call.options)
        return call

    def _refuse_unknown_options(self, options: Parameters) -> None:
        """Refuse names that neither ``generate`` nor a pipeline nor BatchConfig knows."""
        for name, value in options.items():
            if value is None or name in TABLE or name == "generation_config":
                continue
            near = difflib.get_close_matches(name, [*_FIELDS, *_PIPELINE_OPTIONS, *TABLE], n=1)
            if near and near[0] in _FIELDS:
                raise ConfigError(f"`{name}` is not a field of BatchConfig; did you mean `{near[0]}`?")
            if near and near[0] in _PIPELINE_OPTIONS:
                raise UnsupportedOptionError(name, f"is not an option of a pipeline; did you mean `{near[0]}`?")
            raise unknown_option(name, base_model(self.model))


def _check_generation_config(given: Any) -> None:
    if isinstance(given, list | tuple):
        why = "is a list: a pipeline takes one for all prompts; BatchGenerator(model, tokenizer).generate takes a list"
        raise UnsupportedOptionError("generation_config", why)
    check_generation_config(given)


register_task(BatchTextGenerationPipeline)
