"""One call of a pipeline with all its inputs at once.

The steps before and after the model are the pipeline's own: ``preprocess`` and ``postprocess`` are called for each
input. The options for ``generate`` come from ``_forward``, once for the call.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import torch
from torch import nn
from transformers import Pipeline
from transformers.pipelines.text_generation import ReturnType
from transformers.utils.chat_template_utils import Chat

from ..config import BatchConfig
from ..engine.call import Call
from ..engine.extra_outputs import ExtraOutputs
from ..engine.unfinished import attach, note_of, part_of
from ..errors import GenerationInterrupted, PromptError, UnsupportedOptionError
from ..generator import BatchGenerator
from ..inputs.base_model import base_model
from ..inputs.images.processed_images import ProcessedImages
from ..planning.requests_and_prefixes import Request
from ..results.generations import BatchResult, Generation
from ..sampling import processor_chains, stop_rules
from .pipeline_inputs import BadInput, as_text_input, why_not_encoded
from .pipeline_options import Parameters, options_for_generate

AROUND_THE_MODEL = ("forward", "_forward", "get_inference_context")  # methods of a pipeline that run for each batch
CHAT_OPTIONS = "chat_template_kwargs"
_ENCODING = "tokenizer_encode_kwargs"
_EXTRA_OUTPUTS = ("output_scores", "output_logits")  # come with ``return_dict_in_generate``; a list cannot hold them


class TokenGenerator(BatchGenerator):
    """Gives token ids without texts: the pipeline decodes them with its own options."""

    _at_hand = False

    def __init__(self, model: nn.Module, tokenizer: Any, config: BatchConfig) -> None:
        super().__init__(model, tokenizer, config)
        self.given_tokenizer = tokenizer

    def _generation(self, request: Request, call: Call, outputs: ExtraOutputs, decode: bool = True) -> Generation:
        return super()._generation(request, call, outputs, decode=False)

    def processed_images(self) -> ProcessedImages:
        return self._checks.processed_images()

    def with_texts(self, result: BatchResult) -> BatchResult:
        texts = (None if each.error else self._tokenizer.decode(each.token_ids) for each in result)
        return BatchResult([replace(each, text=text) for each, text in zip(result, texts, strict=True)], result.report)


@dataclass(frozen=True)
class EncodedInput:
    """An input as the pipeline's ``preprocess`` made it."""

    text: Any  # a string, or transformers' Chat; a list of strings where an input has several rows
    ids: torch.Tensor | None  # [rows, width], padding included; None for an empty input, which begins from BOS
    before: torch.Tensor  # [rows, tokens]: the first part of a ``generated_sequence``, before the new tokens

    def row(self, place: int) -> EncodedInput:
        if self.ids is None or len(self.ids) == 1:
            return self
        part = slice(place, place + 1)
        return EncodedInput(self.text[place], self.ids[part], self.before[part])


@dataclass
class PreparedInputs:
    """All inputs of a call, encoded by the pipeline; or the reason where one cannot be run."""

    encoded: list[EncodedInput | None] = field(default_factory=list)  # None where an input cannot be run
    prompts: list[Any] = field(default_factory=list)  # of all rows, for the engine; no ids where one cannot be run
    owners: list[int] = field(default_factory=list)  # of each prompt, the place of its input
    rows: list[int] = field(default_factory=list)  # prompts of each input
    problems: dict[int, str] = field(default_factory=dict)  # by the inputs' places
    cause: Exception | None = None  # the error behind the first problem
    padded: bool = False  # whether any input has padding
    padded_right: bool = False

    def refuse(self, why: str, cause: Exception | None = None) -> None:
        self.problems[len(self.encoded)] = why
        self.cause = self.cause or cause
        self.add(None, [[]])

    def add(self, encoded: EncodedInput | None, prompts: Sequence[Any]) -> None:
        self.owners += [len(self.encoded)] * len(prompts)
        self.rows.append(len(prompts))
        self.encoded.append(encoded)
        self.prompts += prompts

    @contextmanager
    def all_problems(self) -> Iterator[None]:
        """Adds the problems found here to a PromptError of the engine."""
        try:
            yield
        except PromptError as error:
            if not self.problems and len(self.prompts) == len(self.encoded):
                raise
            found = {self.owners[place]: why for place, why in error.problems.items()}
            raise PromptError({**found, **self.problems}) from self.cause


class PipelineCall:
    """``lenient``: an input that cannot be encoded is reported as a problem, and does not end the call."""

    _instead_of_a_cut = "pass tokenizer_encode_kwargs={'truncation': True, 'max_length': ...}"

    def __init__(
        self,
        pipe: Pipeline,
        preprocess: Parameters,
        forward: Parameters,
        postprocess: Parameters,
        lenient: bool = True,
    ) -> None:
        self._pipe = self._encoder = pipe
        self._preprocess = {name: value for name, value in preprocess.items() if name != CHAT_OPTIONS}
        self._chat_options: Parameters = preprocess.get(CHAT_OPTIONS) or {}
        self._postprocess = postprocess
        self._lenient = lenient
        self.options = options_for_generate(pipe, forward)

    def results(self, generator: TokenGenerator, prepared: PreparedInputs) -> list[Any]:
        """The pipeline's result for each input."""
        self._check_options(prepared)
        result: BatchResult | None = None
        try:
            with prepared.all_problems():
                result = generator.generate(prepared.prompts, **self.options)
            rows = groupby(result, key=lambda generation: prepared.owners[generation.index])
            return [self._finished(prepared, index, list(samples)) for index, samples in rows]
        except GenerationInterrupted as interrupt:
            interrupt.result = generator.with_texts(interrupt.result)
            interrupt.caller_has_generator = False
            raise
        except KeyboardInterrupt:
            if result is None:
                raise
            late = GenerationInterrupted(generator.with_texts(result), len(result), len(result))
            late.caller_has_generator = False
            raise late from None
        except Exception as error:
            part = part_of(error)  # what had finished when the error came, in this call or in one within it
            kept = part if result is None and part is generator.interrupted else result
            if isinstance(kept, BatchResult):
                self._keep(error, generator, kept, prepared)
            raise

    def _keep(self, error: Exception, generator: TokenGenerator, result: BatchResult, prepared: PreparedInputs) -> None:
        """The results that an error leaves, with their texts: the error may be that of ``postprocess`` itself."""
        with suppress(Exception):
            result = generator.with_texts(result)
        expected = len(prepared.prompts) * (self._option("num_return_sequences") or 1)
        attach(error, result, note_of(len(result), expected, at_hand=False))

    def stream(self, generator: TokenGenerator, prepared: PreparedInputs) -> Generator[Any, None, None]:
        """The same one by one: each as soon as it and all before it are ready. Options are checked at once."""
        self._check_options(prepared)
        with prepared.all_problems():
            generations: Any = generator.stream(prepared.prompts, **self.options)  # a generator, which has close()
        return self._in_order(prepared, generations)

    def _in_order(self, prepared: PreparedInputs, generations: Any) -> Generator[Any, None, None]:
        samples = self._option("num_return_sequences") or 1
        waiting: dict[int, list[Generation]] = {}
        index = 0
        with closing(generations):
            for generation in generations:
                waiting.setdefault(prepared.owners[generation.index], []).append(generation)
                while index in waiting and len(waiting[index]) == samples * prepared.rows[index]:
                    rows = sorted(waiting.pop(index), key=lambda each: (each.index, each.sample))
                    yield self._finished(prepared, index, rows)
                    index += 1

    # -- inputs ------------------------------------------------------------------------------------------------

    def prepare(self, inputs: Iterable[Any], generator: TokenGenerator) -> PreparedInputs:
        """``generator``: which will run them."""
        prepared = PreparedInputs()
        for each in inputs:
            given = self._as_input(each) if self._lenient else each
            if isinstance(given, BadInput):
                prepared.refuse(given.why)
                continue
            try:
                encoded = self._encoder.preprocess(given, **self._options_of(given))
            except Exception as error:
                if not self._lenient:
                    raise
                prepared.refuse(self._why_not_encoded(given, error), error)
            else:
                self._add(prepared, given, encoded)
        return prepared

    def _as_input(self, given: Any) -> Any:
        return as_text_input(given)

    def _why_not_encoded(self, given: Any, error: Exception) -> str:
        return why_not_encoded(given, self._pipe.tokenizer, error)

    def _options_of(self, given: Any) -> Parameters:
        """``preprocess`` passes these to the tokenizer or to the chat template, whichever encodes the input."""
        if not self._chat_options or not isinstance(given, Chat):
            return self._preprocess
        encoding = {**(self._preprocess.get(_ENCODING) or {}), **self._chat_options}
        return {**self._preprocess, _ENCODING: encoding}

    def _add(self, prepared: PreparedInputs, given: Any, encoded: Any) -> None:
        ids = encoded["input_ids"][:1]  # a pipeline uses the first row alone
        if ids.shape[1] == 0:
            bos = self._option("bos_token_id")
            if bos is None:
                prepared.refuse(
                    "is an empty string, of which the tokenizer makes no tokens, and the model has no BOS token to "
                    "begin from: set `bos_token_id`"
                )
            else:
                prepared.add(
                    EncodedInput(encoded["prompt_text"], None, torch.tensor([[bos]], device=ids.device)), [[bos]]
                )
            return
        mask = self._mask(ids, encoded.get("attention_mask"))
        columns = mask[0].nonzero()[:, 0] if mask is not None and not mask.all() else None
        if columns is None:
            prompt = ids[0]
        elif not len(columns):
            prepared.refuse("is all padding: it has no token to begin from")
            return
        elif len(columns) != (stretch := columns[-1] + 1 - columns[0]):
            prepared.refuse(
                f"is masked in its middle: {len(columns)} of {stretch} tokens are marked in its `attention_mask`"
            )
            return
        else:
            prepared.padded = True
            prepared.padded_right |= bool(columns[-1] + 1 < ids.shape[1])
            prompt = ids[0, columns[0] : columns[-1] + 1]
        prepared.add(EncodedInput(encoded["prompt_text"], ids, ids), [prompt])

    def _mask(self, ids: torch.Tensor, given: torch.Tensor | None) -> torch.Tensor | None:
        """The tokenizer's mask; without one pad tokens are padding, unless they are EOS, too, as in ``generate``."""
        if given is not None:
            return given[:1] != 0
        pad = self._option("pad_token_id")
        return None if pad is None or pad in _as_list(self._option("eos_token_id")) else ids != pad

    # -- the options -------------------------------------------------------------------------------------------

    def _option(self, name: str) -> Any:
        """The value of an option in this call; None where it is not set."""
        config = self.options.get("generation_config")
        own = getattr(base_model(self._pipe.model).generation_config, name, None)
        values = (self.options.get(name), getattr(config, name, None), own)
        return next((value for value in values if value is not None), None)

    def _check_options(self, prepared: PreparedInputs) -> None:
        """Refuse options whose outputs would be lost, or whose results would differ from the pipeline's own."""
        for name in ("logprobs", "prompt_logprobs"):
            if self.options.get(name) is not None:
                why = "has no place in a pipeline's results: call BatchGenerator(model, tokenizer).generate(prompts)"
                raise UnsupportedOptionError(name, why)
        for name in ("max_prompt_tokens", "truncation_side"):
            if self.options.get(name) is not None:
                raise UnsupportedOptionError(name, f"is not an option of a pipeline: {self._instead_of_a_cut}")
        for name in _EXTRA_OUTPUTS if self._option("return_dict_in_generate") else ():
            if self._option(name):
                why = "is not supported for a list: call the model's own `generate`, or gen.generate(input_ids=...)"
                raise UnsupportedOptionError(name, why)
        if self._option("return_dict_in_generate"):  # without extra outputs the pipeline's result is the same
            self.options["return_dict_in_generate"] = False
        lengths = (("max_length", "max_new_tokens"), ("min_length", "min_new_tokens"))
        for name, better in lengths if prepared.padded else ():
            if self._option(name) and self._option(better) is None:
                why = f"counts the padding that the tokenizer was told to add: set `{better}`"
                raise UnsupportedOptionError(name, why)
        sees = _option_that_sees_padding(self.options) if prepared.padded else None
        if sees is not None:
            why = "sees the padding that the tokenizer was told to add: leave the padding out"
            raise UnsupportedOptionError(sees, why)

    # -- results -----------------------------------------------------------------------------------------------

    def _finished(self, prepared: PreparedInputs, index: int, rows: Sequence[Generation]) -> Any:
        encoded = prepared.encoded[index]
        error = next((row.error for row in rows if row.error is not None), None)
        if encoded is None or error is not None:
            # By its name: each kind of pipeline has types of its own.
            wanted = getattr(self._postprocess.get("return_type"), "name", None) == ReturnType.TENSORS.name
            name = "generated_token_ids" if wanted else "generated_text"
            return [{name: None, "error": prepared.problems.get(index, error)} for _ in rows]
        longest = max(len(row.token_ids) for row in rows)
        if all(len(row.token_ids) == longest for row in rows):
            return self._records(encoded, [row.token_ids for row in rows])
        pad = self._option("pad_token_id")
        if pad is None:
            pad = next(iter(_as_list(self._option("eos_token_id"))), None)
        if pad is None:  # there is no EOS either to fill the rows up with: each row is a tensor of its own
            one = [(encoded.row(row.index - rows[0].index), row.token_ids) for row in rows]
            return [record for each, new_tokens in one for record in self._records(each, [new_tokens])]
        return self._records(encoded, [row.token_ids + [pad] * (longest - len(row.token_ids)) for row in rows])

    def _records(self, encoded: EncodedInput, new_tokens: list[list[int]]) -> list[Any]:
        new = torch.tensor(new_tokens, dtype=torch.long, device=encoded.before.device)  # [rows * samples, tokens]
        sequences = torch.cat([encoded.before.repeat_interleave(len(new) // len(encoded.before), dim=0), new], dim=1)
        outputs: Any = {
            "generated_sequence": self._in_stock_form(sequences),
            "input_ids": encoded.ids,
            "prompt_text": encoded.text,
        }
        records: list[Any] = self._pipe.postprocess(outputs, **self._postprocess)
        return records

    def _in_stock_form(self, sequences: torch.Tensor) -> torch.Tensor:
        return sequences[None]


def _option_that_sees_padding(options: Parameters) -> str | None:
    """The option whose processors or criteria look at padding, with which ``generate`` would call them."""
    if options.get("prefix_allowed_tokens_fn") is not None:
        return "prefix_allowed_tokens_fn"
    blind = {
        "logits_processor": processor_chains.looks_at_no_padding,
        "stopping_criteria": stop_rules.looks_at_no_padding,
    }
    for name, is_blind in blind.items():
        given = options.get(name)
        if isinstance(given, list | tuple) and not all(map(is_blind, given)):  # a factory's never see padding
            return name
    return None


def _as_list(tokens: Any) -> list[int]:
    listed: list[int] = [] if tokens is None else torch.as_tensor(tokens, device="cpu").flatten().tolist()
    return listed
