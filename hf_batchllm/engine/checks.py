"""Validates a call: whatever can be refused is refused here, before any computation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig

from ..errors import OptionValueError, PromptError
from ..inputs.base_model import base_model
from ..inputs.option_checks import check_on_error
from ..inputs.option_conflicts import check_beams, check_guidance
from ..inputs.option_warnings import warn_of_greedy
from ..inputs.options import Options
from ..inputs.other_names import by_our_names
from ..inputs.prompt_lengths import Reach, id_without_logits, length_problem, warn_beyond_context
from ..inputs.prompt_reader import GivenPrompts, PromptReader, ReadPrompts
from ..inputs.resolve_options import resolve_each
from ..inputs.seeds import checked_seeds
from ..inputs.tokenizer import TokenizerLoader
from ..model.inspection.architecture import Architecture
from ..model.inspection.user_warnings import warn_of_random_parts
from ..notices import Notices
from ..sampling.call_grammars import CallGrammars, checked_grammars
from ..sampling.stop_rules import RulesMaker, StopRules
from .job import Job
from .streamer import feed_for


class JobChecks:
    takes_images = True

    def __init__(self, model: nn.Module, tokenizer: TokenizerLoader, notices: Notices) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._notices = notices
        self.reader = PromptReader(model, tokenizer, notices, self.takes_images)
        self.rules = RulesMaker(model, tokenizer.required, notices)

    def job(
        self,
        architecture: Architecture,
        prompts: Any,
        generation_config: GenerationConfig | Sequence[GenerationConfig] | None,
        seed: Any,
        on_error: str,
        generate_kwargs: dict[str, Any],
    ) -> Job:
        """The checked call of ``generate``."""
        check_on_error(on_error)
        generate_kwargs = by_our_names(generate_kwargs, OptionValueError)
        given = GivenPrompts.take(prompts, generate_kwargs, on_error)
        padded = given.padded
        options = self._resolved(generation_config, generate_kwargs, padded)
        if not any(each.do_sample or each.num_beams > 1 for each in options):
            self._warn_of_greedy(generate_kwargs, seed, generation_config)
        warn_of_random_parts(self._model, self._notices)
        read = self.reader.read(given, options, architecture.vocab_size, self._see_right_padding)
        count = len(read.each)
        options = _for_each(options, generation_config, count)
        seeds = None if seed is None else checked_seeds(seed, count)
        adapters, unknown = self.reader.adapters(given.adapter, count, on_error)
        read.refuse(unknown)
        grammars = self._grammars(given, options, read, architecture)
        check_guidance(options, self._notices)
        check_beams(options)
        rules = self.rules.of_each(options, padded is not None)
        feed = feed_for(options, read.each, padded)
        limits = self._limits(read, options, rules, architecture)
        good = [prompt for prompt in read.each if prompt is not None]
        if read.problems and on_error == "raise":
            raise PromptError(read.problems)
        config, places = base_model(self._model).config, list(limits)
        reaches = (Reach(place, len(prompt), limits[place]) for place, prompt in zip(places, good, strict=True))
        warn_beyond_context(config, reaches, count, architecture.name, self._notices)
        drawn = False
        if not any(each.do_sample for each in options):
            seeds = None
        elif seeds is None:
            seeds, drawn = self._drawn_seed(), True
        return Job(
            prompts=good,
            places=places,
            problems=read.problems,
            options=options,
            max_new_tokens=list(limits.values()),
            can_stop=[rules[place].can_stop for place in places],
            seed=seeds,
            seed_is_drawn=drawn,
            rules=rules,
            feed=feed,
            rows=None if padded is None else padded.ids.cpu().numpy(),
            adapters=adapters,
            passed=read.passed,
            grammars=grammars,
        )

    def _resolved(self, generation_config: Any, generate_kwargs: dict[str, Any], padded: Any) -> list[Options]:
        """The options of each prompt where there is a list of configs; else a list of one."""
        return resolve_each(self._model, generation_config, generate_kwargs, padded, self._notices)

    def _drawn_seed(self) -> int:
        """Where a call samples and was given no seed."""
        return int(torch.randint(2**63 - 1, (), device="cpu").item())

    def _grammars(
        self, given: GivenPrompts, options: Sequence[Options], read: ReadPrompts, architecture: Architecture
    ) -> CallGrammars | None:
        """Prompts that cannot have theirs are refused."""
        if given.grammars is None:
            return None
        tokenizer, vocabulary = self._tokenizer.required, architecture.vocab_size
        grammars, problems = checked_grammars(given.grammars, options, tokenizer, vocabulary, self._notices)
        read.refuse(problems)
        return grammars

    def _limits(
        self, read: ReadPrompts, options: Sequence[Options], rules: Sequence[StopRules], architecture: Architecture
    ) -> dict[int, int]:
        """The most new tokens of each prompt that can run, by its index; one that is too long is refused."""
        limits: dict[int, int] = {}
        default_limit = getattr(base_model(self._model).config, "max_position_embeddings", None)
        for index, (prompt, own, ends) in enumerate(zip(read.each, options, rules, strict=True)):
            if prompt is None:
                continue
            tokens = len(prompt.ids)
            limit = ends.limit(tokens if read.width is None else read.width, own.max_new_tokens(tokens, default_limit))
            why = length_problem(tokens, limit, own, architecture, default_limit)
            if why is None and own.arguments.prompt_logprobs is not None:
                why = id_without_logits(prompt.ids[1:], architecture)
            if why is None:
                limits[index] = limit
            else:
                read.refuse({index: why})
        return limits

    def _warn_of_greedy(self, asked: dict[str, Any], seed: Any, generation_config: Any) -> None:
        if self._notices.names is not None:  # lines of a file, each with a seed: its settings say whether it samples
            return
        configs = generation_config if isinstance(generation_config, list | tuple) else [generation_config]
        warn_of_greedy(asked, seed, configs, base_model(self._model).generation_config, self._notices)

    def _see_right_padding(self) -> None:
        self._notices(
            "right padding",
            "rows are padded on the right. Here each of them goes on from its own last token, and its new tokens come "
            "after the padding; model.generate goes on from the padding, which gives other tokens. Pad on the left, "
            'with tokenizer.padding_side = "left"',
        )


def _for_each(options: list[Options], generation_config: Any, count: int) -> list[Options]:
    """The options of each prompt. ``options``: as ``resolve_each`` gives them."""
    if not isinstance(generation_config, list | tuple):
        return options * count
    if len(options) != count:
        raise OptionValueError(
            "generation_config",
            f"is a list of {len(options):,} and there are {count:,} prompts: it must have one for each",
        )
    return options
