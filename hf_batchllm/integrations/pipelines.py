"""``accelerated(pipe)``: a pipeline for text or for images gives all inputs of a call to a BatchGenerator.

The steps before and after the model are the pipeline's own: ``preprocess`` and ``postprocess`` are called for each
input. What ``generate`` would be asked is found out by calling ``_forward`` once, with a model that only listens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterator, Sequence, Sized
from contextlib import closing
from itertools import chain, groupby
from typing import Any

import torch
from torch.utils.data import IterableDataset
from transformers import ImageTextToTextPipeline, Pipeline, TextGenerationPipeline

from ..config import BatchConfig
from ..engine.job import Job
from ..engine.unfinished import attach, note_of
from ..errors import GeneratorBusyError, PromptError, UnsupportedModelError, UnsupportedOptionError
from ..generator import DoorGenerator
from ..inputs.base_model import base_model
from ..inputs.option_table import TABLE
from ..inputs.padded_batch import PaddedBatch
from ..inputs.prompts import read_all
from ..inputs.token_ids import BadPrompt
from ..results.generations import Generation
from .fallbacks import (
    Block,
    ChecksAsGenerate,
    StandIn,
    Way,
    refuse_other_meaning,
    refuse_what_sees_all_rows,
    right_padding,
)
from .remembered_images import with_remembered_images

Parameters = dict[str, Any]

_SERVED = (TextGenerationPipeline, ImageTextToTextPipeline)
_WAY = Way("the pipeline runs as it does without", "prompt")
# If the user changes one of these methods, which run around the model, one run over all inputs would pass over that.
_MUST_BE_STOCK = ("forward", "_forward", "get_inference_context", "get_iterator", "run_single")
_TOO_LATE = "accelerated() ended before these results were read: read them in its block"
# Options that count the padding before a prompt, or see it; and those with which they do not.
_WITH_PADDING = {
    **{"max_length": "max_new_tokens", "min_length": "min_new_tokens"},
    **dict.fromkeys(("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn")),
}


def changed_method(pipe: Pipeline) -> str | None:
    """A method around the model that the pipeline, or its class, has changed: "a `forward`"; None if there is none."""
    stock = next((each for each in _SERVED if isinstance(pipe, each)), None)
    if stock is None:
        raise UnsupportedModelError(
            "accelerated(pipe) takes a pipeline for text-generation or image-text-to-text, not one for "
            f"{pipe.task or type(pipe).__name__}: pass the model in it, accelerated(pipe.model)"
        )
    for name in _MUST_BE_STOCK:
        method = getattr(pipe, name)
        if not isinstance(method, StandIn) and getattr(method, "__func__", None) is not getattr(stock, name):
            return f"a `{name}`"
    return None


class _ChecksOfPrompts(ChecksAsGenerate):
    """Refuses callables that a pipeline would call for one prompt after the other: they might keep state."""

    def job(self, architecture: Any, prompts: Any, generation_config: Any, *given: Any) -> Job:
        job = super().job(architecture, prompts, generation_config, *given)
        if job.sequences > 1:
            why = "a pipeline calls for one batch after the other: use BatchGenerator, which calls it for each row"
            refuse_what_sees_all_rows(job.options[0].arguments, why)
            if job.options[0].arguments.prefix_allowed_tokens_fn is not None:
                raise UnsupportedOptionError("prefix_allowed_tokens_fn", f"is a function that {why}")
        return job


class PipelineBlock(Block):
    """Serves the two methods that every call of a pipeline goes through."""

    kind_of_checks = _ChecksOfPrompts

    def __init__(self, pipe: Pipeline, tokenizer: Any, config: BatchConfig) -> None:
        super().__init__(pipe.model, tokenizer, config)
        self._pipe = pipe

    def begin(self) -> None:
        self.replace(self._pipe, get_iterator=self._iterator, run_single=self._single)

    def _single(self, original: Callable[..., Any], given: Any, *parameters: Parameters) -> Any:
        return self._served([given], parameters, _Call.results, lambda: [original(given, *parameters)])[0]

    def _iterator(
        self, original: Callable[..., Any], inputs: Any, workers: int, batch_size: int, *parameters: Parameters
    ) -> Any:
        def again(inputs: Any) -> Any:
            return original(inputs, workers, batch_size, *parameters)

        batched = batch_size > 1
        if isinstance(inputs, list):
            return self._served(inputs, parameters, _Call.results, lambda: list(again(inputs)), batched)
        return _Results(lambda: self._stream(inputs, parameters, again, batched), inputs)

    def _stream(
        self, inputs: Any, parameters: tuple[Parameters, ...], again: Callable[[Any], Any], batched: bool
    ) -> Generator[Any, None, None]:
        if self.has_ended:
            self.warn(_WAY, GeneratorBusyError("accelerated() had ended when the first result was asked for"))
            yield from again(inputs)
            return
        given = _read(inputs)

        def begun(call: _Call, generator: DoorGenerator) -> Iterator[Any]:
            stream: Any = generator.stream(call.prompts, **call.options)
            self.open_streams.add(stream)
            results = call.in_order(stream)
            return chain([next(results)], results) if given else results  # refused in the first step, or not at all

        results = self._served(given, parameters, begun, lambda: iter(again(given)), batched)
        try:
            while True:
                with self.turn():  # for each result: the reader may call the pipeline in between
                    if self.has_ended:
                        raise GeneratorBusyError(_TOO_LATE)
                    try:
                        result = next(results)
                    except StopIteration:
                        return
                yield result
        finally:
            del results  # ends the engine's call where results are left
            self.leave_report(self.last_report)

    def _served(
        self,
        inputs: list[Any],
        parameters: tuple[Parameters, ...],
        serve: Callable[[_Call, DoorGenerator], Any],
        original: Callable[[], Any],
        batched: bool = False,
    ) -> Any:
        """``batched``: the original would pad inputs to run several together."""
        reason, call = self.refusal or self._changed(), None
        if reason is None and self.generator is not None:
            try:
                call = _Call(self._pipe, self.generator, inputs, *parameters)
            except BaseException:  # of the pipeline's own `preprocess`
                self.leave_report(None)
                raise

        def attempt(generator: DoorGenerator) -> Any:
            if reason is not None:
                raise reason
            assert call is not None
            call.refuse(batched and len(inputs) > 1)
            return serve(call, generator)

        return self.call(_WAY, attempt, original)

    def _changed(self) -> UnsupportedModelError | None:
        changed = "another model" if self._pipe.model is not self.model else changed_method(self._pipe)
        if changed is None:
            return None
        return UnsupportedModelError(f"the pipeline was given {changed} since accelerated(pipe) began")


class _Results(Iterator[Any]):
    """The results for a Dataset or a generator, in the order of its inputs. Work begins when the first is asked for.

    As in transformers, each ``for`` loop starts anew if the inputs have a length. ``close()`` ends the work early.
    """

    def __init__(self, begin: Callable[[], Generator[Any, None, None]], inputs: Any) -> None:
        self._begin, self._inputs = begin, inputs
        self._running: Generator[Any, None, None] | None = None

    def __len__(self) -> int:
        return len(self._inputs)

    def __iter__(self) -> _Results:
        if isinstance(self._inputs, Sized):
            self.close()
            self._running = None
        return self

    def __next__(self) -> Any:
        if self._running is None:
            self._running = self._begin()
        return next(self._running)

    def close(self) -> None:
        if self._running is not None:
            self._running.close()


class _Call:
    """All inputs of one call, encoded by the pipeline; and its results for them."""

    def __init__(
        self,
        pipe: Pipeline,
        generator: DoorGenerator,
        inputs: Sequence[Any],
        preprocess: Parameters,
        forward: Parameters,
        postprocess: Parameters,
    ) -> None:
        self._pipe, self._postprocess = pipe, postprocess
        self._pictured = isinstance(pipe, ImageTextToTextPipeline)
        self.options = _options_for_generate(pipe, forward)
        self.prompts: list[Any] = []  # of all inputs: one for text is a list of texts, each of them a prompt
        self._owners: list[int] = []  # [prompts]  the place of its input
        self._inputs: list[Parameters] = []  # for `postprocess`
        self._before: list[torch.Tensor] = []  # [inputs]  [rows, tokens]: what stands before the new tokens
        self._rows: list[int] = []  # [inputs]
        self._padded = self._padded_right = False
        self._problems: dict[int, str] = {}
        self._processed, encoder = generator.checks.reader.processed_images(), with_remembered_images(pipe)
        for given in inputs:
            self._take(dict(encoder.preprocess(given, **preprocess)))
        del self._processed  # it holds pixels

    def _take(self, made: Parameters) -> None:
        text, ids, mask = made.pop(_text_of(self._pipe)), made["input_ids"], made.get("attention_mask")
        if not self._pictured:  # a pipeline for text uses the first row alone
            ids, mask = ids[:1], None if mask is None else mask[:1]
            made = {"input_ids": ids, "attention_mask": mask}
        before, shown, pad = ids, ids, self._option("pad_token_id")
        if ids.shape[-1] == 0:
            bos = None if self._pictured else self._option("bos_token_id")
            before, shown = torch.tensor([[0 if bos is None else bos]], device=ids.device), None
            made = {"input_ids": before}
            if bos is None:
                self._problems[len(self._inputs)] = "is an empty string, of which no tokens are made"
        elif mask is None and pad is not None and bool((ids == pad).any()):
            self._problems[len(self._inputs)] = "has pad tokens, and no `attention_mask` that tells what they are"
        elif mask is not None:
            self._padded |= not mask.all()
            self._padded_right |= not mask[:, -1].all()
        prompts = self._processed.prompts(made)
        if isinstance(prompts, BadPrompt):
            self._problems[len(self._inputs)], prompts = prompts.why, []
        self._owners += [len(self._inputs)] * len(prompts)
        self._inputs.append({"input_ids": shown, "prompt_text": text})
        self._before.append(before)
        self._rows.append(len(prompts))
        self.prompts += prompts

    def refuse(self, batched: bool) -> None:
        """Refuse what cannot be served, or would have other results. ``batched``: the pipeline would pad."""
        refuse_other_meaning(self.options)
        if self._problems:
            raise PromptError(self._problems)
        if self._option("return_dict_in_generate"):
            for name in ("output_scores", "output_logits"):
                if self._option(name):
                    raise UnsupportedOptionError(name, "is not supported for a list: call the model's own `generate`")
            self.options["return_dict_in_generate"] = False  # without these the pipeline's results are the same
        if self._padded_right or (batched and getattr(self._pipe.tokenizer, "padding_side", None) == "right"):
            raise right_padding()
        for name, better in _WITH_PADDING.items() if self._padded else ():
            if self._option(name) and (better is None or self._option(better) is None):
                hint = f"set `{better}`" if better else "leave the padding out"
                raise UnsupportedOptionError(name, f"would count the padding before prompts, or see it: {hint}")
        several = (self._option("num_return_sequences") or 1) * max(self._rows, default=1) > 1
        ending = next((name for name in ("stop_strings", "stopping_criteria", "max_time") if self._option(name)), None)
        if several and ending is not None and self._filling() is None:
            why = "ends rows one by one, and there is neither a pad token nor EOS to fill them up with"
            raise UnsupportedOptionError(ending, why)
        self.options["progress"] = False

    def _option(self, name: str) -> Any:
        """The value of an option in this call; None where it is not set."""
        config = self.options.get("generation_config")
        own = getattr(base_model(self._pipe.model).generation_config, name, None)
        values = (self.options.get(name), getattr(config, name, None), own)
        return next((value for value in values if value is not None), None)

    def _filling(self) -> int | None:
        """What shorter rows of an input are filled up with."""
        pad, eos = self._option("pad_token_id"), self._option("eos_token_id")
        ends = [] if eos is None else torch.as_tensor(eos, device="cpu").flatten().tolist()
        return next(iter(ends), None) if pad is None else pad

    # -- results -----------------------------------------------------------------------------------------------

    def results(self, generator: DoorGenerator) -> list[Any]:
        """The pipeline's result for each input."""
        result = generator.generate(self.prompts, **self.options)
        try:
            rows = groupby(result, key=lambda generation: self._owners[generation.index])
            return [self._result(place, list(some)) for place, some in rows]
        except BaseException as error:  # of the pipeline's own `postprocess`: what was computed is not lost
            attach(error, generator.decoded(result), note_of(len(result), len(result), at_hand=False))
            raise

    def in_order(self, stream: Any) -> Generator[Any, None, None]:
        """The same one by one: each as soon as it and all before it are ready."""
        samples = self._option("num_return_sequences") or 1
        waiting: dict[int, list[Generation]] = {}
        place = 0
        with closing(stream):
            for generation in stream:
                waiting.setdefault(self._owners[generation.index], []).append(generation)
                while place in waiting and len(waiting[place]) == samples * self._rows[place]:
                    yield self._result(place, sorted(waiting.pop(place), key=lambda row: (row.index, row.sample)))
                    place += 1

    def _result(self, place: int, rows: Sequence[Generation]) -> Any:
        sequences = PaddedBatch(self._before[place], None).continued([row.token_ids for row in rows], self._filling())
        outputs: Any = {
            "generated_sequence": sequences if self._pictured else sequences[None],
            **self._inputs[place],
        }
        return self._pipe.postprocess(outputs, **self._postprocess)


def _read(inputs: Any) -> list[Any]:
    """All inputs as a list, read as transformers' DataLoader would read them."""
    is_sized = isinstance(inputs, Sized) and not isinstance(inputs, IterableDataset)
    return [inputs[place] for place in range(len(inputs))] if is_sized else read_all(inputs)


# -- the options for generate ----------------------------------------------------------------------------------


class _ListeningModel:
    """Takes the model's place: its ``generate`` notes the options that it is called with, and computes nothing."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def generate(self, *, input_ids: Any, attention_mask: Any = None, **options: Any) -> Any:
        self.asked = options
        return input_ids


def _text_of(pipe: Pipeline) -> str:
    """The name of what ``preprocess`` passes on to ``postprocess``."""
    return "text" if isinstance(pipe, ImageTextToTextPipeline) else "prompt_text"


def _options_for_generate(pipe: Pipeline, forward: Parameters) -> Parameters:
    """All that the pipeline's ``_forward`` passes to ``generate`` besides the prompt; the same for every prompt."""
    listening: Any = copy.copy(pipe)
    listening.model = _ListeningModel(pipe.model)
    given = {"input_ids": torch.ones(1, 1, dtype=torch.long, device="cpu"), _text_of(pipe): ""}
    # transformers writes into dicts of options.
    listening._forward(given, **{name: dict(it) if isinstance(it, dict) else it for name, it in forward.items()})
    options: Parameters = listening.model.asked
    own: Any = getattr(pipe, "generation_config", None)
    its_own = own is not None and options.get("generation_config") is own
    if not its_own:
        return options
    if own.max_new_tokens is not None and "max_length" not in forward:
        options.pop("max_length", None)  # grown by a prefix
    return {**options, "generation_config": _without_defaults(own, pipe, options)}


def _without_defaults(config: Any, pipe: Any, options: Parameters) -> Any:
    """Some versions of transformers pass a config with every option set. What nobody asked for is not warned of."""
    own, trimmed, defaults = pipe.model.generation_config, copy.copy(config), config._get_default_generation_params()
    sampling = options.get("do_sample", config.do_sample)
    for name, value in vars(config).items():
        idle = not sampling and name in TABLE and TABLE[name].sampling_only
        default = value == defaults.get(name) or (idle and value == getattr(pipe._default_generation_config, name))
        if value is not None and default and getattr(own, name, None) is None:
            setattr(trimmed, name, None)
    return trimmed
