"""Reads the prompts of a call: a list or a padded batch, the images that they show, and the adapter of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ..errors import OptionValueError, PromptError
from ..notices import Notices
from .adapters import AS_IT_IS, adapter_of_each
from .as_passed import AsPassed, as_passed
from .chats import warn_of_one_chat
from .grammar_options import GivenGrammars, take_grammars
from .images.image_reader import ImageReader
from .images.processed_images import ProcessedImages
from .options import Options
from .padded_batch import PaddedBatch
from .prompt_options import prompt_options_alone, take_prompt_options
from .prompts import Prompt, as_list, check_prompts
from .tokenizer import TokenizerLoader


@dataclass(frozen=True)
class GivenPrompts:
    """The prompts of a call as the user wrote them, and those of its options that say something of each prompt."""

    prompts: Any
    padded: PaddedBatch | None  # the prompts, if they are one
    options: Mapping[str, Any]  # those of ``take_prompt_options``
    adapter: Any
    grammars: GivenGrammars | None

    @classmethod
    def take(cls, prompts: Any, options: dict[str, Any], on_error: str) -> GivenPrompts:
        """Removes from a call's ``options`` what belongs here."""
        padded = prompts if isinstance(prompts, PaddedBatch) else None
        if padded is not None and on_error == "record":
            raise OptionValueError("on_error", 'is "record", and a tensor has no place for an error: pass a list')
        if prompts is None and options.get("inputs_embeds") is None:
            as_list(prompts)  # its error comes before warnings of options
        adapter = options.pop("adapter", AS_IT_IS)
        return cls(prompts, padded, take_prompt_options(options, padded is not None), adapter, take_grammars(options))


@dataclass(frozen=True)
class ReadPrompts:
    """Each prompt of a call, or None and a problem where it cannot be run."""

    each: list[Prompt | None]
    problems: dict[int, str]
    passed: list[AsPassed] | None = None  # text and chats, for the results; None for a batch
    width: int | None = None  # of the rows of a batch, padding included

    def refuse(self, problems: Mapping[int, str]) -> None:
        """These prompts cannot be run, either. A problem that is known already stays."""
        for index, why in problems.items():
            self.problems.setdefault(index, why)
            self.each[index] = None


class PromptReader:
    """Reads for one model. Without ``takes_images`` only text is taken."""

    def __init__(self, model: nn.Module, tokenizer: TokenizerLoader, notices: Notices, takes_images: bool) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.notices = notices
        self.images = ImageReader(model) if takes_images else None

    def read(
        self, given: GivenPrompts, options: Sequence[Options], vocab_size: int, see_right_padding: Callable[[], None]
    ) -> ReadPrompts:
        """``options``: of the call. ``see_right_padding``: called where rows are padded on the right."""
        batch = given.padded
        if batch is None:
            return self.listed(given.prompts, given.options, vocab_size)
        mask = batch.mask_for(self.model, options[0].config)
        rows, problems = batch.unpadded(mask, vocab_size)
        if not problems and not mask[:, -1].all():
            see_right_padding()
        if batch.beside and not problems:
            prompts = [prompt for prompt in rows if prompt is not None]
            shown = self.processed_images().of_batch(batch.ids, [prompt.ids for prompt in prompts], batch.beside)
            rows = [replace(prompt, images=images) for prompt, images in zip(prompts, shown, strict=True)]
        return ReadPrompts(rows, problems, width=batch.width)

    def listed(self, prompts: Any, options: Mapping[str, Any], vocab_size: int) -> ReadPrompts:
        """``options``: those of ``take_prompt_options``."""
        listed = as_list(prompts)
        warn_of_one_chat(prompts, listed, self.notices)
        passed = as_passed(listed)
        each, problems = check_prompts(
            listed,
            tokenizer=self.tokenizer.required,
            vocab_size=vocab_size,
            notices=self.notices,
            options=options,
            images=self.images,
        )
        return ReadPrompts(each, problems, passed)

    def adapters(self, adapter: Any, count: int, on_error: str) -> tuple[list[str | None] | None, dict[int, str]]:
        """The adapter of each prompt, as ``adapter_of_each`` has it, and the problems that are recorded."""
        wrong: dict[int, str] = {}
        recorded = wrong if on_error == "record" else None
        return adapter_of_each(self.model, adapter, count, self.notices, recorded), wrong

    def to_plan(self, prompts: Any, adapter: Any, options: dict[str, Any], vocab_size: int) -> list[Prompt]:
        """The checked prompts of ``plan``."""
        read = self.listed(prompts, prompt_options_alone(options, "plan", ("prompts", "adapter")), vocab_size)
        if read.problems:
            raise PromptError(read.problems)
        adapters = adapter_of_each(self.model, adapter, len(read.each)) or [None] * len(read.each)
        return [prompt.with_key(name) for prompt, name in zip(read.each, adapters, strict=True) if prompt]

    def processed_images(self) -> ProcessedImages:
        """Takes in what a processor makes of prompts with images."""
        assert self.images is not None
        return self.images.processed()
