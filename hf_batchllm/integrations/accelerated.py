"""``accelerated(model)``: code that calls ``model.generate`` (a harness, a trainer) runs faster without a change."""

from __future__ import annotations

import copy
import inspect
import sys
from contextlib import AbstractContextManager, ContextDecorator
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from transformers import GenerationMixin
from transformers.generation.continuous_batching import ContinuousMixin

from ..config import BatchConfig
from ..engine.job import Job
from ..engine.tensor_results import refuse_no_cache
from ..errors import GeneratorBusyError, UnsupportedModelError, UnsupportedOptionError
from ..generator import DoorGenerator
from ..inputs.call_arguments import CallArguments
from ..inputs.options import Options
from ..inputs.resolve_options import resolve_each
from ..notices import Notices, warn_user
from ..sampling import processor_chains
from .fallbacks import Block, ChecksAsGenerate, Way, refuse_other_meaning, refuse_what_sees_all_rows
from .generate_batch import generate_batch, without_own_defaults

Model = TypeVar("Model")  # a model, or a pipeline

_SIGNATURES = {
    "generate": inspect.signature(GenerationMixin.generate),
    "generate_batch": inspect.signature(ContinuousMixin.generate_batch),
}
_GENERATE = Way("the model's own generate runs instead", "row")
_BATCHING = Way("transformers' own continuous batching runs instead", "request")
_CALLED_WITH_ALL_ROWS = (
    "`generate` calls with all rows at once: pass one row at a time, or use BatchGenerator, which calls it for each row"
)


def accelerated(
    model: Model, tokenizer: Any = None, config: BatchConfig | None = None, **fields: Any
) -> AbstractContextManager[Model]:
    """While the block runs, a BatchGenerator serves ``model.generate``; afterwards the model is as it was.

        with accelerated(model):
            model.generate(**inputs, max_new_tokens=50)

        with accelerated(pipe):
            pipe(prompts, max_new_tokens=50)

    A call that cannot be served goes to the model's own ``generate``, with one warning that says why. Sampling draws
    other tokens than ``generate`` would, from the same distribution; it repeats after ``set_seed``. Prefixes are shared
    within a call; between calls only with ``keep_prefixes``. ``tokenizer``, ``config`` and ``fields`` are those of
    BatchGenerator.

    ``model.last_report`` (or ``pipe.last_report``) says how the last call went: a RunReport; None if the call was not
    served. It stays when the block has ended, if any call was served. An attribute of your own of that name comes back.

    ``model.generate_batch`` is served in the same way.

    A pipeline, for text-generation or image-text-to-text, computes all inputs of a call at once, whatever its
    ``batch_size``. Datasets and generators are read to their end first. A call that cannot be served goes the
    pipeline's usual way.
    """
    return _With(model, tokenizer, config, fields)


class _With(ContextDecorator, AbstractContextManager[Model], Generic[Model]):
    """What ``accelerated`` returns. It warns where it is thrown away and no block was ever run with it."""

    def __init__(self, model: Model, tokenizer: Any, config: BatchConfig | None, fields: dict[str, Any]) -> None:
        self._model, self._given = model, (tokenizer, config, fields)
        self._blocks: list[Block] = []
        self._used = False

    def __call__(self, function: Any) -> Any:  # as a decorator: each call of the function runs in a block
        self._used = True
        return super().__call__(function)

    def _recreate_cm(self) -> _With[Model]:
        """A block of its own for each call of a decorated function: they may come from several threads."""
        own = type(self)(self._model, *self._given)
        own._used = True
        return own

    def __enter__(self) -> Model:
        self._used = True
        tokenizer, config, fields = self._given
        block = _block(self._model, tokenizer, BatchConfig.of(config, fields))
        self._blocks.append(block)
        try:
            block.begin()
        except BaseException:
            self.__exit__()
            raise
        return self._model

    def __exit__(self, *error: object) -> None:
        self._blocks.pop().end()

    def __del__(self) -> None:
        if not self._used and not sys.is_finalizing():
            kind = "pipe" if "pipeline" in type(self._model).__name__.lower() else "model"
            warn_user(f"accelerated({kind}) does nothing by itself: write `with accelerated({kind}):` around the calls")


def _block(given: Any, tokenizer: Any, config: BatchConfig) -> Block:
    pipelines = sys.modules.get("transformers.pipelines")  # not loaded: no pipeline; and importing it takes long
    if pipelines is not None and isinstance(given, pipelines.Pipeline):
        from .pipelines import PipelineBlock, changed_method

        tokenizer = given.tokenizer if tokenizer is None else tokenizer
        changed = changed_method(given)
        if changed is None:
            return PipelineBlock(given, tokenizer, config)
        warn_user(
            f"{type(given).__name__} has {changed} of its own, so its batches are accelerated one by one, and a prefix "
            "that batches share is computed for each of them: make batches large (`batch_size`)"
        )
        return ModelBlock(given.model, tokenizer, config, given)
    if not isinstance(given, nn.Module) or not callable(getattr(given, "generate", None)):
        inside = ": is the model in its `.model`?" if hasattr(given, "model") else ""
        raise UnsupportedModelError(
            f"accelerated(model) takes a model that has a `generate`, not {type(given).__name__}{inside}"
        )
    return ModelBlock(given, tokenizer, config)


class _EndTogether:
    """The evaluation harness's stop strings for a batch: its rows end together, once all of them have held a string.

    Copies of the harness's criteria look at each row by itself. A row goes on until the others have held the string,
    too, and may be longer by then: ``cut`` takes away what ``generate`` would not have computed.
    """

    def __init__(self, job: Job) -> None:
        assert job.rows is not None
        rules = job.rules[0]
        rows, self._width = job.rows.shape
        self._criteria, self._stop_tokens, self._padding = rules.others, rules.stop_tokens, job.options[0].pad_token_id
        # [criteria][rows]  the new tokens of each row when it first held the string; 0: never.
        self._found = [[0] * rows for _ in self._criteria]
        self._length: int | None = None  # new tokens of all rows in the end
        self.job = replace(job, rules=[replace(rules, others=(), factory=self._of_row)] * len(job.rules))

    @staticmethod
    def serves(job: Job) -> bool:
        assert job.rows is not None
        (rows, width), given = job.rows.shape, job.rules[0].others
        return (
            bool(given)
            and not job.options[0].config.return_dict_in_generate
            and all(type(each).__name__ == "MultiTokenEOSCriteria" for each in given)
            and all(type(each).__module__.startswith("lm_eval.") for each in given)
            and all(
                each.done_tracker == [False] * rows and each.initial_decoder_input_length == width for each in given
            )
        )

    def cut(self, sequences: torch.Tensor) -> torch.Tensor:
        return sequences if self._length is None else sequences[:, : self._width + self._length]

    def _of_row(self, index: int, prompt_token_ids: list[int]) -> list[Any]:
        own = [copy.copy(each) for each in self._criteria]
        for each in own:
            each.done_tracker = [False]

        def ends(ids: torch.Tensor, scores: Any) -> bool:
            # After a stop token `generate` goes on with padding, at which the harness looks, too.
            beyond = max(each.sequence_id_len for each in own) if int(ids[0, -1]) in self._stop_tokens else 0
            for more in range(beyond + 1):
                padded = nn.functional.pad(ids, (0, more), value=self._padding)
                for each, found in zip(own, self._found, strict=True):
                    if not found[index] and each(padded, scores):
                        found[index] = padded.shape[1] - self._width
            self._length = min((max(lengths) for lengths in self._found if all(lengths)), default=None)
            return self._length is not None and ids.shape[1] - self._width >= self._length

        return [ends]


class _ChecksOfRows(ChecksAsGenerate):
    """Refuses calls whose results would differ from a batch of ``generate``, which runs all rows in step."""

    together: _EndTogether | None = None  # the latest call's

    def job(self, architecture: Any, prompts: Any, generation_config: Any, *given: Any) -> Job:
        self.together = None
        job = super().job(architecture, prompts, generation_config, *given)
        if job.rows is None:  # of generate_batch, which runs each request by itself
            return job
        if job.options and any(len(prompt.ids) < job.rows.shape[1] for prompt in job.prompts):
            _refuse_callables_that_see_padding(job.options[0].arguments)
        # The beams of a prompt are passed together here, too.
        searching = bool(job.options) and job.options[0].num_beams > 1
        if (len(job.options) if searching else sum(options.num_return_sequences for options in job.options)) > 1:
            arguments = job.options[0].arguments
            if not searching and _EndTogether.serves(job):
                self.together = _EndTogether(job)
                job, arguments = self.together.job, replace(arguments, stopping_criteria=None)
            refuse_what_sees_all_rows(arguments, _CALLED_WITH_ALL_ROWS)
            rules = job.rules[0]
            if rules.looks_back and not rules.stop_tokens and not searching:
                ending = "stop_strings" if rules.strings else "stopping_criteria"
                why = "ends rows one by one, and without an EOS token `generate` goes on with all rows until all end"
                raise UnsupportedOptionError(ending, why)
        return job

    def _resolved(self, generation_config: Any, generate_kwargs: dict[str, Any], padded: Any) -> list[Options]:
        if not isinstance(generation_config, list):
            return super()._resolved(generation_config, generate_kwargs, padded)
        model = without_own_defaults(self._model, generation_config[0])
        return resolve_each(model, generation_config, generate_kwargs, None, self._notices)


class ModelBlock(Block):
    """Serves ``generate`` and ``generate_batch`` of a model. ``pipe`` runs on the model, batch by batch."""

    kind_of_checks = _ChecksOfRows

    def __init__(self, model: nn.Module, tokenizer: Any, config: BatchConfig, pipe: Any = None) -> None:
        super().__init__(model, tokenizer, config)
        self._pipe = pipe
        self._notices = Notices()
        self._managers: list[Any] = []  # transformers' own, made within the block

    def begin(self) -> None:
        methods = {"generate": self._generate}
        if callable(getattr(self.model, "generate_batch", None)):
            methods |= {"generate_batch": self._generate_batch, "init_continuous_batching": self._new_manager}
        self.replace(self.model, **methods)
        if self._pipe is not None:
            self.leave_reports_on(self._pipe)

    def _generate(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        named = _named("generate", self.model, args, kwargs)
        try:
            refuse_no_cache(named)
        except UnsupportedOptionError:
            self.leave_report(None)
            raise

        def serve(generator: DoorGenerator) -> Any:
            self._refuse_beside_a_manager()
            if all(named.get(name) is None for name in ("inputs", "input_ids", "inputs_embeds")):
                raise ValueError("there are no `input_ids`")
            refuse_other_meaning(named)
            result = generator.generate(progress=False, **named)
            together = generator.checks.together if isinstance(generator.checks, _ChecksOfRows) else None
            return result if together is None else together.cut(result)

        return self.call(_GENERATE, serve, lambda: original(*args, **kwargs))

    def _generate_batch(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        named = _named("generate_batch", self.model, args, kwargs)

        def serve(generator: DoorGenerator) -> Any:
            self._refuse_beside_a_manager()
            return generate_batch(generator, named, self._notices, self.work_had_begun)

        return self.call(_BATCHING, serve, lambda: original(*args, **kwargs))

    def _new_manager(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        why = "makes a manager of single requests: put all prompts into a list, and call model.generate_batch(prompts)"
        self.warn(_BATCHING, UnsupportedOptionError("init_continuous_batching", why))
        with self.turn():
            self._managers.append(original(*args, **kwargs))
        return self._managers[-1]

    def _refuse_beside_a_manager(self) -> None:
        if any(manager.is_running() for manager in self._managers):
            raise GeneratorBusyError("transformers' own manager runs on the model: stop() it first")


def _named(method: str, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by name; none if it is not a valid call, which the original refuses with its own error."""
    try:
        named = dict(_SIGNATURES[method].bind(model, *args, **kwargs).arguments)
    except TypeError:
        return {}
    named.pop("self")
    more: dict[str, Any] = named.pop("kwargs", {})
    return named | more


def _refuse_callables_that_see_padding(arguments: CallArguments) -> None:
    """Refuse what ``generate`` would call with padded ``input_ids``; criteria get padded rows here, too."""
    lookers = [each for each in arguments.logits_processor or () if not processor_chains.looks_at_no_padding(each)]
    name = "prefix_allowed_tokens_fn" if arguments.prefix_allowed_tokens_fn is not None else "logits_processor"
    if lookers or arguments.prefix_allowed_tokens_fn is not None:
        raise UnsupportedOptionError(
            name,
            "is called by `generate` with padded rows: pass rows without padding, or call BatchGenerator, which leaves "
            "the padding out",
        )
