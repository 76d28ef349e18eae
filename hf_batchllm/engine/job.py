"""What a call is asked for: everything that can be said before any work is said here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import GenerationConfig

from ..errors import OptionValueError, PromptError
from ..inputs.adapters import AS_IT_IS, adapter_of_each
from ..inputs.base_model import base_model
from ..inputs.option_checks import _check_on_error
from ..inputs.option_conflicts import check_beams, check_guidance
from ..inputs.options import Options, inferred_mask, resolve_each
from ..inputs.padded_batch import PaddedBatch
from ..inputs.prompts import Prompt, check_prompts
from ..inputs.seeds import Seeds, checked_seeds
from ..inputs.tokenizer import TokenizerLoader
from ..model.architecture import Architecture
from ..notices import Notices
from ..sampling.device_sampler import penalised_by
from ..sampling.stop_rules import StopRules, rules_of_each
from ..sampling.stop_strings import PreparedStopStrings
from .scoring.score_inputs import Reading, ScoreInputs, check_scores
from .streamer import Feed, feed_for


@dataclass(frozen=True)
class Job:
    """What a call is asked for, checked."""

    prompts: list[Prompt]  # those that can be run
    places: list[int]  # where each of them stands in the list that was passed in
    problems: dict[int, str]  # why the others cannot
    options: list[Options]  # of each prompt of that list, those that cannot be run included; many have the same
    max_new_tokens: list[int]
    seed: Seeds | None  # of the sampling noise
    rules: list[StopRules]  # what ends the sequences, as ``options``
    feed: Feed | None = None  # where somebody is told of the tokens as they come
    rows: np.ndarray | None = None  # [prompts, tokens] as they were passed, padding included; None for a list
    adapters: list[str | None] | None = None  # as ``options``; None: whatever is active, for all of them

    @property
    def samples(self) -> list[int]:
        """How many sequences each of the prompts gets."""
        return [self.options[place].num_return_sequences for place in self.places]

    @property
    def widths(self) -> list[int] | None:
        """How many beams each of them has; None where there is no beam search."""
        widths = [self.options[place].num_beams for place in self.places]
        return widths if any(width > 1 for width in widths) else None

    @property
    def runs(self) -> list[int]:
        """How many sequences begin at the end of each of them: of a beam search one, which parts later."""
        return self.samples if self.widths is None else [1] * len(self.places)

    @property
    def sequences(self) -> int:
        return sum(self.samples)

    @property
    def penalised(self) -> int:
        """How many of them have a repetition penalty."""
        penalised = {options for options in self.kinds if penalised_by(options)}
        return sum(
            count for place, count in zip(self.places, self.samples, strict=True) if self.options[place] in penalised
        )

    @property
    def kinds(self) -> list[Options]:
        """The different options that there are."""
        return list(dict.fromkeys(self.options[place] for place in self.places))


class JobChecks:
    def __init__(self, model: nn.Module, tokenizer: TokenizerLoader, notices: Notices) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._notices = notices
        self._known_strings = PreparedStopStrings()

    def job(
        self,
        architecture: Architecture,
        prompts: Any,
        generation_config: GenerationConfig | Sequence[GenerationConfig] | None,
        seed: Any,
        on_error: str,
        generate_kwargs: dict[str, Any],
    ) -> Job:
        """Everything that can be said before any work."""
        _check_on_error(on_error)
        padded = prompts if isinstance(prompts, PaddedBatch) else None
        if padded is not None and on_error == "record":
            raise OptionValueError("on_error", 'is "record", and a tensor has no place for an error: pass a list')
        adapter = generate_kwargs.pop("adapter", AS_IT_IS)
        resolved = resolve_each(self._model, generation_config, generate_kwargs, padded, self._notices)
        self._warn_of_dropout()
        if padded is None:
            checked, problems = self.prompts(prompts, architecture)
        else:
            inferred = inferred_mask(self._model, resolved[0], padded) if padded.mask is None else None
            checked, problems = padded.unpadded(inferred, architecture.vocab_size)
        if isinstance(generation_config, list | tuple):
            if len(resolved) != len(checked):
                raise OptionValueError(
                    "generation_config",
                    f"is a list of {len(resolved):,} and there are {len(checked):,} prompts: it must have one for each",
                )
        else:
            resolved *= len(checked)
        seeds = None if seed is None else checked_seeds(seed, len(checked))
        adapters = adapter_of_each(self._model, adapter, len(checked), self._notices)
        check_guidance(resolved, self._notices)
        check_beams(resolved, self._notices)
        rules = rules_of_each(
            self._model, resolved, self._tokenizer.required, padded is not None, self._notices, self._known_strings
        )
        feed = feed_for(resolved, checked, padded)
        rows = None if padded is None else padded.ids.cpu().numpy()
        good: list[Prompt] = []
        places: list[int] = []
        limits: list[int] = []
        for index, (prompt, options) in enumerate(zip(checked, resolved, strict=True)):
            if prompt is None:
                continue
            width = len(prompt.ids) if padded is None else padded.width
            limit = options.max_new_tokens(len(prompt.ids), self._default_limit())
            limit = rules[index].limit(width, limit)
            why = self._length_problem(len(prompt.ids), limit, options, architecture)
            if why is not None:
                problems[index] = why
                continue
            good.append(prompt)
            places.append(index)
            limits.append(limit)
        if problems and on_error == "raise":
            raise PromptError(problems)
        if not any(options.do_sample for options in resolved):
            seeds = None
        elif seeds is None:
            seeds = int(torch.randint(2**63 - 1, ()).item())
        return Job(good, places, problems, resolved, limits, seeds, rules, feed, rows, adapters)

    def scores(
        self, architecture: Architecture, contexts: Any, continuations: Any, choices: Any, on_error: str, adapter: Any
    ) -> ScoreInputs:
        """The same for a call of ``score``."""
        _check_on_error(on_error)
        self._warn_of_dropout()
        read = Reading(self._tokenizer.required, architecture.vocab_size)
        adapters = partial(adapter_of_each, self._model, adapter, notices=self._notices)
        inputs = check_scores(contexts, continuations, choices, read, architecture, adapters)
        if inputs.problems and on_error == "raise":
            raise inputs.error()
        return inputs

    def _warn_of_dropout(self) -> None:
        if not self._model.training:
            return
        # Lists: what interrupts a generator while it closes is lost.
        drops = [module.p for module in self._model.modules() if isinstance(module, nn.Dropout)]
        config = base_model(self._model).config.get_text_config(decoder=True)
        if any(drops) or getattr(config, "attention_dropout", 0):
            self._notices(
                "dropout",
                "the model is in training mode and has dropout: results are random in a way that no seed governs "
                "(and dropout inside attention is left out). Call model.eval() first",
            )

    def prompts(self, prompts: Any, architecture: Architecture) -> tuple[list[Prompt | None], dict[int, str]]:
        return check_prompts(
            prompts,
            tokenizer=self._tokenizer.required,
            vocab_size=architecture.vocab_size,
            notices=self._notices,
        )

    def _default_limit(self) -> int | None:
        return getattr(base_model(self._model).config, "max_position_embeddings", None)

    def _length_problem(self, tokens: int, new_tokens: int, options: Options, architecture: Architecture) -> str | None:
        if new_tokens <= 0 and options.has_default_length:
            return f"has {tokens:,} tokens, and {architecture.name} has {self._default_limit():,} positions"
        if new_tokens <= 0:
            return (
                f"has {tokens:,} tokens already and `max_length` is {options.config.max_length:,}: "
                "increase `max_length` or, better, set `max_new_tokens`"
            )
        positions = tokens + new_tokens - 1  # the last token is never run
        limit = architecture.max_positions
        if limit is not None and positions > limit:
            return (
                f"has {tokens:,} tokens and may grow by {new_tokens:,}, but {architecture.name} has learned "
                f"{limit:,} positions: shorten it, or lower `max_new_tokens`"
            )
        limit = architecture.rope_limit
        if limit is not None and positions > limit:
            return (
                f"has {tokens:,} tokens and may grow by {new_tokens:,}: beyond {limit:,} {architecture.name} "
                "scales its rotary embedding by the length, which is not supported yet"
            )
        return None
