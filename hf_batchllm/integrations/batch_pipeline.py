"""What the batch pipelines have in common: a pipeline of transformers', over the whole list at once."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
from typing import Any, ClassVar, Self

from transformers import Pipeline
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
from .pipeline_inputs import BadInput, read_inputs
from .pipeline_options import Parameters, options_for_generate
from .pipeline_results import ResultIterator

_BEYOND_ITS_SIGNATURE = ("add_special_tokens", "padding", "batch_size", "num_workers")
_FIELDS = [field.name for field in dataclasses.fields(BatchConfig)]


class BatchPipeline(Pipeline):
    """Comes before transformers' own class among the bases. What differs from it is set beside the class's name."""

    own_task: ClassVar[str]
    stock_task: ClassVar[str]  # the task with the same models, defaults and names
    _stock: ClassVar[type[Pipeline]]
    _kind_of_call: ClassVar[type[PipelineCall]]

    def __init__(self, *args: Any, task: str = "", batch_config: BatchConfig | None = None, **kwargs: Any) -> None:
        fields = {name: kwargs.pop(name) for name in _FIELDS if name in kwargs}
        self._batch_config = BatchConfig.of(batch_config, fields, "batch_config")
        self._refuse_overridden_methods()
        check_one_config(kwargs.get("generation_config"))
        stock: Any = super()
        stock.__init__(*args, task=self.stock_task, **kwargs)  # transformers looks up defaults and checks by it
        self.task = task or self.own_task
        self._refuse_unknown_options(options_for_generate(self, dict(self._forward_params)))
        self._closed = False
        self._generator: TokenGenerator | None = self._new_generator()

    def _plan(self, inputs: Any, kwargs: Parameters) -> SharingPlan:
        preprocess, forward, _ = self._sanitize_parameters(**kwargs)
        call = self._call({**self._preprocess_params, **preprocess}, {**self._forward_params, **forward}, {})
        is_one = isinstance(inputs, str | Chat | BadInput | dict)
        generator = self._ready()
        prepared = call.prepare([inputs] if is_one else read_inputs(inputs), generator)
        with prepared.all_problems():
            return generator.plan(prepared.prompts)

    @property
    def last_report(self) -> RunReport | None:
        return None if self._generator is None else self._generator.last_report

    def close(self) -> None:
        """Free the memory that is kept between calls. The pipeline cannot be used afterwards; its model can."""
        if self._generator is not None:
            self._generator.close()
        self._closed = True

    def __enter__(self) -> Self:
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
                made = f"pipeline({self.own_task!r}, ..., {name}=...)"
                raise ConfigError(f"`{name}` is set when the pipeline is made: {made}")
        check_one_config(kwargs.get("generation_config"))
        template = kwargs.pop(CHAT_OPTIONS, None)
        stock: Any = super()
        parameters: tuple[Parameters, Parameters, Parameters] = stock._sanitize_parameters(*args, **kwargs)
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

        def ready(inputs: Any) -> Any:
            generator = self._ready()
            return generator, call.prepare(inputs, generator)

        if isinstance(inputs, list):
            return call.results(*ready(inputs))
        return ResultIterator(lambda: call.stream(*ready(read_inputs(inputs))), inputs)

    def run_single(
        self, inputs: Any, preprocess_params: Parameters, forward_params: Parameters, postprocess_params: Parameters
    ) -> Any:
        call = self._call(preprocess_params, forward_params, postprocess_params)
        generator = self._ready()
        (result,) = call.results(generator, call.prepare([inputs], generator))
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
            if name in vars(self) or getattr(type(self), name) is not getattr(self._stock, name):
                raise UnsupportedModelError(
                    f"{type(self).__name__} has a `{name}` of its own, which would not run for each prompt: change "
                    f"`_sanitize_parameters`, `preprocess` or `postprocess`, or leave it to a pipeline for "
                    f"{self.stock_task}"
                )

    def _call(self, preprocess: Parameters, forward: Parameters, postprocess: Parameters) -> PipelineCall:
        call = self._kind_of_call(self, preprocess, forward, postprocess)
        self._refuse_unknown_options(call.options)
        return call

    def _refuse_unknown_options(self, options: Parameters) -> None:
        """Refuse names that neither ``generate`` nor a pipeline nor BatchConfig knows."""
        for name, value in options.items():
            if value is None or name in TABLE or name == "generation_config":
                continue
            of_a_pipeline = self._options_of_a_pipeline()
            near = difflib.get_close_matches(name, [*_FIELDS, *of_a_pipeline, *TABLE], n=1)
            if near and near[0] in _FIELDS:
                raise ConfigError(f"`{name}` is not a field of BatchConfig; did you mean `{near[0]}`?")
            if near and near[0] in of_a_pipeline:
                raise UnsupportedOptionError(name, f"is not an option of a pipeline; did you mean `{near[0]}`?")
            raise unknown_option(name, base_model(self.model))

    def _options_of_a_pipeline(self) -> list[str]:
        """Besides those of ``generate``."""
        named = (*inspect.signature(self._stock._sanitize_parameters).parameters, *_BEYOND_ITS_SIGNATURE)
        return [name for name in named if name not in ("self", "kwargs", "generate_kwargs", *TABLE)]


def check_one_config(given: Any) -> None:
    if isinstance(given, list | tuple):
        why = "is a list: a pipeline takes one for all prompts; BatchGenerator(model, tokenizer).generate takes a list"
        raise UnsupportedOptionError("generation_config", why)
    check_generation_config(given)
