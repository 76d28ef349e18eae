"""Validates a call: whatever can be refused is refused here, before any computation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig

from ..errors import OptionValueError, PromptError
from ..inputs.adapters import AS_IT_IS, adapter_of_each
from ..inputs.as_passed import as_passed
from ..inputs.base_model import base_model
from ..inputs.chats import warn_of_one_chat
from ..inputs.grammar_options import take_grammars
from ..inputs.images.image_reader import ImageReader
from ..inputs.images.processed_images import ProcessedImages
from ..inputs.long_prompts import Reach, context_of, warn_beyond_context
from ..inputs.option_checks import check_on_error
from ..inputs.option_conflicts import check_beams, check_guidance
from ..inputs.option_warnings import warn_of_greedy
from ..inputs.options import Options
from ..inputs.other_names import by_our_names
from ..inputs.padded_batch import PaddedBatch
from ..inputs.prompt_lengths import id_without_logits, length_problem
from ..inputs.prompt_options import prompt_options_alone, take_prompt_options
from ..inputs.prompts import Prompt, as_list, check_prompts
from ..inputs.resolve_options import resolve_each
from ..inputs.seeds import checked_seeds
from ..inputs.tokenizer import TokenizerLoader
from ..inputs.unknown_options import checked_score_names
from ..model.inspection.architecture import Architecture
from ..notices import Notices
from ..sampling.call_grammars import checked_grammars
from ..sampling.stop_rules import rules_of_each
from ..sampling.stop_strings import PreparedStopStrings
from .job import Job
from .scoring.score_inputs import Reading, ScoreInputs, check_scores
from .streamer import feed_for


class JobChecks:
    takes_images = True

    def __init__(self, model: nn.Module, tokenizer: TokenizerLoader, notices: Notices) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._notices = notices
        self._images = ImageReader(model) if self.takes_images else None
        self.known_strings = PreparedStopStrings()

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
        padded = prompts if isinstance(prompts, PaddedBatch) else None
        if padded is not None and on_error == "record":
            raise OptionValueError("on_error", 'is "record", and a tensor has no place for an error: pass a list')
        if prompts is None and generate_kwargs.get("inputs_embeds") is None:
            as_list(prompts)  # its error comes before warnings of options
        adapter = generate_kwargs.pop("adapter", AS_IT_IS)
        prompt_options = take_prompt_options(generate_kwargs, tensors=padded is not None)
        given_grammars = take_grammars(generate_kwargs)
        resolved = self._resolved(generation_config, generate_kwargs, padded)
        if not any(options.do_sample or options.num_beams > 1 for options in resolved):
            self._warn_of_greedy(generate_kwargs, seed, generation_config)
        self._warn_of_random_parts()
        passed = None
        if padded is None:
            listed = as_list(prompts)
            warn_of_one_chat(prompts, listed, self._notices)
            passed = as_passed(listed)
            checked, problems = self._prompts(listed, architecture, prompt_options)
        else:
            mask = padded.mask_for(self._model, resolved[0].config)
            checked, problems = padded.unpadded(mask, architecture.vocab_size)
            if not problems and not mask[:, -1].all():
                self._see_right_padding()
            if padded.beside and not problems:
                checked = self._showing(padded, [prompt for prompt in checked if prompt is not None])
        if isinstance(generation_config, list | tuple):
            if len(resolved) != len(checked):
                raise OptionValueError(
                    "generation_config",
                    f"is a list of {len(resolved):,} and there are {len(checked):,} prompts: it must have one for each",
                )
        else:
            resolved *= len(checked)
        seeds = None if seed is None else checked_seeds(seed, len(checked))
        wrong: dict[int, str] = {}  # adapters that the model does not have
        recorded = wrong if on_error == "record" else None
        adapters = adapter_of_each(self._model, adapter, len(checked), self._notices, recorded)
        for index, unknown in wrong.items():
            problems.setdefault(index, unknown)
            checked[index] = None
        grammars = None
        if given_grammars is not None:
            vocabulary = architecture.vocab_size
            grammars, ungrammatical = checked_grammars(
                given_grammars, resolved, self._tokenizer.required, vocabulary, self._notices
            )
            for index, unusable in ungrammatical.items():
                problems.setdefault(index, unusable)
                checked[index] = None
        check_guidance(resolved, self._notices)
        check_beams(resolved)
        rules = rules_of_each(
            self._model, resolved, self._tokenizer.required, padded is not None, self._notices, self.known_strings
        )
        feed = feed_for(resolved, checked, padded)
        rows = None if padded is None else padded.ids.cpu().numpy()
        good: list[Prompt] = []
        places: list[int] = []
        limits: list[int] = []
        beyond: list[Reach] = []
        context, default_limit = context_of(base_model(self._model).config), self._default_limit()
        for index, (prompt, options) in enumerate(zip(checked, resolved, strict=True)):
            if prompt is None:
                continue
            width = len(prompt.ids) if padded is None else padded.width
            limit = options.max_new_tokens(len(prompt.ids), default_limit)
            limit = rules[index].limit(width, limit)
            why = length_problem(len(prompt.ids), limit, options, architecture, default_limit)
            if why is None and options.arguments.prompt_logprobs is not None:
                why = id_without_logits(prompt.ids[1:], architecture)
            if why is not None:
                problems[index] = why
                continue
            good.append(prompt)
            places.append(index)
            limits.append(limit)
            if context is not None and len(prompt.ids) + limit - 1 > context:  # the last token is never run
                beyond.append(Reach(index, len(prompt.ids), limit))
        if problems and on_error == "raise":
            raise PromptError(problems)
        if context is not None:
            warn_beyond_context(beyond, len(checked), context, architecture.name, self._notices)
        if not any(options.do_sample for options in resolved):
            seeds = None
        elif seeds is None:
            seeds = self._drawn_seed(architecture)
        can_stop = [rules[place].can_stop for place in places]
        return Job(
            good, places, problems, resolved, limits, can_stop, seeds, rules, feed, rows, adapters, passed, grammars
        )

    def _resolved(self, generation_config: Any, generate_kwargs: dict[str, Any], padded: Any) -> list[Options]:
        """The options of each prompt where there is a list of configs; else a list of one."""
        return resolve_each(self._model, generation_config, generate_kwargs, padded, self._notices)

    def _drawn_seed(self, architecture: Architecture) -> int:
        """Where a call samples and was given no seed. All ranks have the same."""
        return architecture.ranks.of_first("a seed", int(torch.randint(2**63 - 1, (), device="cpu").item()))

    def _showing(self, batch: PaddedBatch, prompts: list[Prompt]) -> list[Prompt | None]:
        """The rows of a batch with the images that they show."""
        shown = self.processed_images().of_batch(batch.ids, [prompt.ids for prompt in prompts], batch.beside)
        return [replace(prompt, images=images) for prompt, images in zip(prompts, shown, strict=True)]

    def processed_images(self) -> ProcessedImages:
        """Takes in what a processor makes of prompts with images."""
        assert self._images is not None
        return self._images.processed()

    def scores(
        self,
        architecture: Architecture,
        contexts: Any,
        continuations: Any,
        choices: Any,
        on_error: str,
        adapter: Any,
        chat_options: dict[str, Any],
    ) -> ScoreInputs:
        """The checked call of ``score``."""
        chat_options = checked_score_names(contexts, chat_options)
        check_on_error(on_error)
        self._warn_of_random_parts()
        read = Reading(self._tokenizer.required, architecture.vocab_size, chat_options, self._notices, self._images)
        wrong: dict[int, str] = {}  # adapters that the model does not have
        recorded = wrong if on_error == "record" else None
        adapters = partial(adapter_of_each, self._model, adapter, notices=self._notices, wrong=recorded)
        inputs = check_scores(contexts, continuations, choices, read, architecture, adapters, wrong)
        if inputs.problems and on_error == "raise":
            raise inputs.error()
        context = context_of(base_model(self._model).config)
        if context is not None:
            beyond = [Reach(*each, 0) for each in sorted(inputs.longest.items()) if each[1] - 1 > context]
            warn_beyond_context(beyond, len(inputs.longest), context, architecture.name, self._notices, inputs.what)
        return inputs

    def prompts_to_plan(
        self, architecture: Architecture, prompts: Any, adapter: Any, options: dict[str, Any]
    ) -> list[Prompt]:
        """The checked prompts of ``plan``."""
        checked, problems = self._prompts(
            prompts, architecture, prompt_options_alone(options, "plan", ("prompts", "adapter"))
        )
        if problems:
            raise PromptError(problems)
        adapters = adapter_of_each(self._model, adapter, len(checked)) or [None] * len(checked)
        return [prompt.with_key(name) for prompt, name in zip(checked, adapters, strict=True) if prompt]

    def _warn_of_greedy(self, asked: dict[str, Any], seed: Any, generation_config: Any) -> None:
        if self._notices.has_names:  # lines of a file, each with a seed: its settings say whether it samples
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

    def _warn_of_random_parts(self) -> None:
        if not self._model.training:
            return
        # Lists, not generators: an interrupt that comes while a generator closes is lost.
        modules = list(self._model.modules())
        drops = [module.p for module in modules if isinstance(module, nn.Dropout)]
        config = base_model(self._model).config.get_text_config(decoder=True)
        in_attention: float = getattr(config, "attention_dropout", 0.0)
        if any(drops) or in_attention:
            self._notices(
                "dropout",
                "the model is in training mode and has dropout: results are random, and no seed repeats them "
                "(and dropout inside attention is left out). Call model.eval() first",
            )
        # Of routers and experts: Mixtral's `jitter_noise`, DBRX's `moe_jitter_eps`.
        noise = [name for module in modules for name, value in vars(module).items() if "jitter" in name and value]
        if noise:
            self._notices(
                "jitter",
                f"the model is in training mode and has noise in its routers (`{noise[0]}`): results are random, and "
                "no seed repeats them. Call model.eval() first",
            )

    def _prompts(
        self, prompts: Any, architecture: Architecture, options: dict[str, Any]
    ) -> tuple[list[Prompt | None], dict[int, str]]:
        return check_prompts(
            prompts,
            tokenizer=self._tokenizer.required,
            vocab_size=architecture.vocab_size,
            notices=self._notices,
            options=options,
            images=self._images,
        )

    def _default_limit(self) -> int | None:
        return getattr(base_model(self._model).config, "max_position_embeddings", None)
