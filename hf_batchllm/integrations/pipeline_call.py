"""One call of a text-generation pipeline with all its inputs at once.

What comes before and after the model is the pipeline's own: ``preprocess`` and ``postprocess`` are called for each
input, and what ``generate`` is asked is found out from ``_forward``, once for the call.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset
from transformers import TextGenerationPipeline
from transformers.pipelines.text_generation import ReturnType

from ..config import BatchConfig
from ..engine.extra_outputs import ExtraOutputs
from ..errors import GenerationInterrupted, PromptError, UnsupportedOptionError
from ..generator import BatchGenerator
from ..inputs.base_model import base_model
from ..inputs.option_table import TABLE
from ..inputs.prompts import read_all
from ..planning.units import Request
from ..results.generations import BatchResult, Generation
from ..sampling import processor_chains, stop_rules
from .pipeline_inputs import Refused, as_input, why_not_encoded

Parameters = dict[str, Any]

AROUND_THE_MODEL = ("forward", "_forward", "get_inference_context")  # of a pipeline's methods
_IN_RECORDS = ("output_scores", "output_logits")  # with ``return_dict_in_generate``, and a list has no place for them


class TokenGenerator(BatchGenerator):
    """Leaves the text to the pipeline, which makes it as its own options say."""

    def __init__(self, model: nn.Module, tokenizer: Any, config: BatchConfig) -> None:
        super().__init__(model, tokenizer, config)
        self.given_tokenizer = tokenizer

    def _generation(self, request: Request, recording: ExtraOutputs, decode: bool = True) -> Generation:
        return super()._generation(request, recording, decode=False)

    def with_texts(self, result: BatchResult) -> BatchResult:
        texts = (None if each.error else self._tokenizer.decode(each.token_ids) for each in result)
        return BatchResult([replace(each, text=text) for each, text in zip(result, texts, strict=True)], result.report)


@dataclass(frozen=True)
class Encoded:
    """An input as the pipeline's ``preprocess`` made it."""

    text: Any  # a string, or transformers' Chat
    ids: torch.Tensor | None  # [1, width], padding included; None where there are none, and the model begins from BOS
    before: torch.Tensor  # [1, tokens] that stand before the new ones in a ``generated_sequence``


@dataclass
class Prepared:
    encoded: list[Encoded | None] = field(default_factory=list)  # None where an input cannot be run
    prompts: list[Any] = field(default_factory=list)  # token ids for the engine; nothing, where it cannot be run
    problems: dict[int, str] = field(default_factory=dict)
    cause: Exception | None = None  # of the first of them
    padded: bool = False  # whether there is padding in any

    def refuse(self, why: str, cause: Exception | None = None) -> None:
        self.problems[len(self.prompts)] = why
        self.cause = self.cause or cause
        self.add(None, [])

    def add(self, encoded: Encoded | None, prompt: Any) -> None:
        self.encoded.append(encoded)
        self.prompts.append(prompt)

    @contextmanager
    def naming(self) -> Iterator[None]:
        """What the engine says of the prompts, with what was found out before it."""
        try:
            yield
        except PromptError as error:
            if not self.problems:
                raise
            raise PromptError({**error.problems, **self.problems}) from self.cause


class PipelineCall:
    """``lenient``: an input that cannot be encoded is a problem of its own, and does not end the call."""

    def __init__(
        self,
        pipe: TextGenerationPipeline,
        preprocess: Parameters,
        forward: Parameters,
        postprocess: Parameters,
        lenient: bool = True,
    ) -> None:
        self._pipe = pipe
        self._preprocess = preprocess
        self._postprocess = postprocess
        self._lenient = lenient
        self.asked = asked_of_generate(pipe, forward)

    def results(self, generator: TokenGenerator, prepared: Prepared) -> list[Any]:
        """What the pipeline gives for each input."""
        self._settle_options(prepared)
        result: BatchResult | None = None
        try:
            with prepared.naming():
                result = generator.generate(prepared.prompts, **self.asked)
            rows = groupby(result, key=lambda generation: generation.index)
            return [self._finished(prepared, index, list(samples)) for index, samples in rows]
        except GenerationInterrupted as interrupt:
            interrupt.result = generator.with_texts(interrupt.result)
            interrupt.of_a_generator = False
            raise
        except KeyboardInterrupt:
            if result is None:
                raise
            late = GenerationInterrupted(generator.with_texts(result), len(result), len(result))
            late.of_a_generator = False
            raise late from None

    def stream(self, generator: TokenGenerator, prepared: Prepared) -> Iterator[Any]:
        """The same, each as soon as it and those before it are there. Inputs and options are checked at once."""
        self._settle_options(prepared)
        with prepared.naming():
            generations = generator.stream(prepared.prompts, **self.asked)
        return self._in_order(prepared, generations)

    def _in_order(self, prepared: Prepared, generations: Iterator[Generation]) -> Iterator[Any]:
        samples = self._set("num_return_sequences") or 1
        waiting: dict[int, list[Generation]] = {}
        index = 0
        with closing(generations):  # type: ignore[type-var]
            for generation in generations:
                waiting.setdefault(generation.index, []).append(generation)
                while len(waiting.get(index, ())) == samples:
                    rows = sorted(waiting.pop(index), key=lambda each: each.sample)
                    yield self._finished(prepared, index, rows)
                    index += 1

    # -- before ------------------------------------------------------------------------------------------------

    def prepare(self, inputs: Iterable[Any]) -> Prepared:
        prepared = Prepared()
        for each in inputs:
            given = as_input(each) if self._lenient else each
            if isinstance(given, Refused):
                prepared.refuse(given.why)
                continue
            try:
                encoded = self._pipe.preprocess(given, **self._preprocess)
            except Exception as error:
                if not self._lenient:
                    raise
                prepared.refuse(why_not_encoded(given, self._pipe.tokenizer, error), error)
            else:
                self._add(prepared, given, encoded)
        return prepared

    def _add(self, prepared: Prepared, given: Any, encoded: Any) -> None:
        ids = encoded["input_ids"][:1]  # a pipeline looks at the first row alone
        if ids.shape[1] == 0:
            bos = self._set("bos_token_id")
            if bos is None:
                prepared.refuse(
                    "is an empty string, of which the tokenizer makes no tokens, and the model has no BOS token to "
                    "begin from: set `bos_token_id`"
                )
            else:
                prepared.add(Encoded(encoded["prompt_text"], None, torch.tensor([[bos]])), [bos])
            return
        mask = self._mask(ids, encoded.get("attention_mask"))
        columns = mask[0].nonzero()[:, 0] if mask is not None and not mask.all() else None
        if columns is None:
            prompt = ids[0]
        elif not len(columns):
            prepared.refuse("is padding from end to end: it has no token to begin from")
            return
        elif len(columns) != (stretch := columns[-1] + 1 - columns[0]):
            prepared.refuse(f"is masked in its middle: {len(columns)} of {stretch} tokens are to be attended to")
            return
        else:
            prepared.padded = True
            prompt = ids[0, columns[0] : columns[-1] + 1]
        prepared.add(Encoded(encoded["prompt_text"], ids, ids), prompt)

    def _mask(self, ids: torch.Tensor, given: torch.Tensor | None) -> torch.Tensor | None:
        """Of a tokenizer that makes none ``generate`` takes pad tokens for padding, unless they are EOS, too."""
        if given is not None:
            return given[:1] != 0
        pad = self._set("pad_token_id")
        return None if pad is None or pad in _as_list(self._set("eos_token_id")) else ids != pad

    # -- the options -------------------------------------------------------------------------------------------

    def _set(self, name: str) -> Any:
        """An option as this call has it; None where nobody set it."""
        config = self.asked.get("generation_config")
        own = getattr(base_model(self._pipe.model).generation_config, name, None)
        found = (self.asked.get(name), getattr(config, name, None), own)
        return next((value for value in found if value is not None), None)

    def _settle_options(self, prepared: Prepared) -> None:
        """Refuses what would be lost in silence, or come out otherwise."""
        for name in ("logprobs", "prompt_logprobs"):
            if self.asked.get(name) is not None:
                why = "has no place in what a pipeline gives: call BatchGenerator(model, tokenizer).generate(prompts)"
                raise UnsupportedOptionError(name, why)
        for name in _IN_RECORDS if self._set("return_dict_in_generate") else ():
            if self._set(name):
                why = "is not supported for a list: call the model's own `generate`, or gen.generate(input_ids=...)"
                raise UnsupportedOptionError(name, why)
        if self._set("return_dict_in_generate"):  # else it holds nothing that a pipeline gives
            self.asked["return_dict_in_generate"] = False
        lengths = (("max_length", "max_new_tokens"), ("min_length", "min_new_tokens"))
        for name, better in lengths if prepared.padded else ():
            if self._set(name) and self._set(better) is None:
                why = f"counts the padding that the tokenizer was told to put into the prompts: set `{better}`"
                raise UnsupportedOptionError(name, why)
        looks = _what_looks_at_padding(self.asked) if prepared.padded else None
        if looks is not None:
            why = "sees the padding that the tokenizer was told to put into the prompts: leave the padding out"
            raise UnsupportedOptionError(looks, why)

    # -- after -------------------------------------------------------------------------------------------------

    def _finished(self, prepared: Prepared, index: int, rows: Sequence[Generation]) -> Any:
        encoded = prepared.encoded[index]
        if encoded is None or rows[0].error is not None:
            wanted = self._postprocess.get("return_type") == ReturnType.TENSORS
            name = "generated_token_ids" if wanted else "generated_text"
            return [{name: None, "error": prepared.problems.get(index, row.error)} for row in rows]
        longest = max(len(row.token_ids) for row in rows)
        if all(len(row.token_ids) == longest for row in rows):
            return self._records(encoded, [row.token_ids for row in rows])
        pad = self._set("pad_token_id")
        if pad is None:
            pad = next(iter(_as_list(self._set("eos_token_id"))), None)
        if pad is None:  # they were ended by something else than EOS, and nothing is there to fill them up
            return [record for row in rows for record in self._records(encoded, [row.token_ids])]
        return self._records(encoded, [row.token_ids + [pad] * (longest - len(row.token_ids)) for row in rows])

    def _records(self, encoded: Encoded, new_tokens: list[list[int]]) -> list[Any]:
        new = torch.tensor(new_tokens, dtype=torch.long)  # [samples, tokens]
        sequences = torch.cat([encoded.before.expand(len(new), -1), new], dim=1)
        outputs = {"generated_sequence": sequences[None], "input_ids": encoded.ids, "prompt_text": encoded.text}
        return self._pipe.postprocess(outputs, **self._postprocess)


class Results(Iterator[Any]):
    """What a pipeline gives for inputs that are no list. Work begins when the first result is asked for.

    ``make``: begins it. As in transformers, inputs that have a length are begun anew by each ``for``; ``close()``
    ends the work early.
    """

    def __init__(self, make: Callable[[], Iterator[Any]], inputs: Any) -> None:
        self._make = make
        self._length = len(inputs) if isinstance(inputs, Sized) else None
        self._running: Iterator[Any] | None = None
        self._over: Exception | None = None  # what is raised in the place of further results

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("these results have no length: their inputs have none")
        return self._length

    def __iter__(self) -> Results:
        if self._length is not None:
            self.close()
            self._over = None
        return self

    def __next__(self) -> Any:
        if self._over is not None:
            raise self._over
        if self._running is None:
            self._running = self._make()
        try:
            return next(self._running)
        except BaseException:  # there is nothing after an error, either
            self.close()
            raise

    def close(self) -> None:
        running, self._running, self._over = self._running, None, StopIteration()
        if running is not None:
            running.close()  # type: ignore[attr-defined]

    def break_off(self, error: Exception) -> None:
        """End what has begun; whoever goes on reading gets the error."""
        if self._running is not None:
            self.close()
            self._over = error


def read(inputs: Any) -> list[Any]:
    """All of them, as transformers' DataLoader would ask for them."""
    if isinstance(inputs, list):
        return inputs
    if isinstance(inputs, Sized) and not isinstance(inputs, IterableDataset):
        return [inputs[place] for place in range(len(inputs))]  # type: ignore[index]
    return read_all(inputs)


class _Asked(BaseException):
    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options


class _Asking:
    """A model that tells what its ``generate`` is asked, and does nothing."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def generate(self, *, input_ids: Any, attention_mask: Any, **options: Any) -> None:
        raise _Asked(options)


def asked_of_generate(pipe: TextGenerationPipeline, forward: Parameters) -> dict[str, Any]:
    """What the pipeline's ``_forward`` passes to ``generate`` beside the prompt: it depends on no prompt."""
    asking = copy.copy(pipe)
    asking.model = _Asking(pipe.model)
    try:
        asking._forward({"input_ids": torch.ones(1, 1, dtype=torch.long), "prompt_text": ""}, **forward)
    except _Asked as asked:
        return _without_defaults(asked.options, pipe, forward)
    raise TypeError(f"{type(pipe).__name__}._forward does not call the model's `generate`")


def _without_defaults(asked: Parameters, pipe: TextGenerationPipeline, forward: Parameters) -> Parameters:
    """Without what nobody asked for: some versions of transformers pass a config in which every option is set.

    It comes to the same, and what has no effect is not warned of.
    """
    config = asked.get("generation_config")
    if config is None or config is not getattr(pipe, "generation_config", None):
        return asked
    own, config = base_model(pipe.model).generation_config, copy.copy(config)
    defaults, sampled = config._get_default_generation_params(), pipe._default_generation_config
    sampling = asked.get("do_sample", config.do_sample)
    if config.max_new_tokens is not None and "max_length" not in forward:
        asked.pop("max_length", None)
    for name, value in vars(config).items():
        default = defaults.get(name)
        idle = not sampling and name in TABLE and TABLE[name].sampling and value == getattr(sampled, name)
        if value is not None and getattr(own, name, None) is None and (value == default or idle):
            setattr(config, name, None)
    return {**asked, "generation_config": config}


def _what_looks_at_padding(asked: Parameters) -> str | None:
    """The option whose processors or criteria ``generate`` would call with it, and to whom it makes a difference."""
    if asked.get("prefix_allowed_tokens_fn") is not None:
        return "prefix_allowed_tokens_fn"
    blind = {
        "logits_processor": processor_chains.looks_at_no_padding,
        "stopping_criteria": stop_rules.looks_at_no_padding,
    }
    for name, is_blind in blind.items():
        given = asked.get(name)
        if isinstance(given, list | tuple) and not all(map(is_blind, given)):  # else a factory, which is ours
            return name
    return None


def _as_list(tokens: Any) -> list[int]:
    return [] if tokens is None else torch.as_tensor(tokens).flatten().tolist()
