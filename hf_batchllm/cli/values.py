"""The command's parsed options -> the values that the library takes. All that needs no model is checked here."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from ..files.records import OPENAI, PromptRecord, RecordLayout, RecordReader
from ..files.settings import NO_SETTINGS, GenerationSettings, read_assignments, read_settings
from ..files.templates import Template
from ..inputs.chats import is_chat
from ..inputs.images.image_parts import has_images
from .arguments import option, settings_in
from .console import UsageError

_NOT_WITH_BATCHES = ("template", "prompt_field", "chat", "system", "keep", "token_ids")


@dataclass(frozen=True)
class FirstRecords:
    """What the first records hold, and so which tokenizer is needed."""

    have_texts: bool  # or chats: a tokenizer is needed
    only_chats: bool  # the tokenizer needs a chat template, or all of them are errors
    only_images: bool  # all are chats with images: the model must take these
    name_adapters: bool
    place: str  # of the first of them, as a person names it


def first_records(asked: argparse.Namespace, reader: RecordReader, records: Sequence[PromptRecord]) -> FirstRecords:
    """``records``: the first ones that can be run. UsageError for an option that does not go with them."""
    given = [option(name) for name in _NOT_WITH_BATCHES if getattr(asked, name, None)]
    if reader.dialect == OPENAI and given:
        raise UsageError(f"{given[0]} does not go with a file of OpenAI's requests, whose form is fixed: leave it out")
    chats = [record for record in records if is_chat(record.prompt)]
    only_chats = bool(records) and len(chats) == len(records)
    return FirstRecords(
        have_texts=bool(chats) or any(isinstance(record.prompt, str) for record in records),
        only_chats=only_chats and not any(record.settings.brings_template for record in records),
        only_images=only_chats and all(has_images(chat.prompt) for chat in chats),
        name_adapters=any(record.settings.adapter is not None for record in records),
        place=records[0].where if records else "",
    )


def layout_from(asked: argparse.Namespace) -> RecordLayout:
    return RecordLayout(
        prompt_field=asked.prompt_field,
        template=None if asked.template is None else Template(asked.template),
        chat=asked.chat,
        system=asked.system,
        line_settings=not asked.no_line_settings,
        keep=tuple(getattr(asked, "keep", ())),
    )


def settings_from(asked: argparse.Namespace) -> GenerationSettings:
    """The settings of the command line, over those of a --generation-config."""
    given, assigned = settings_in(asked), read_assignments(getattr(asked, "set", ()))
    for name in given.keys() & assigned:
        raise UsageError(f"{name} is given twice, with --set and with its own option: keep one of them")
    return read_settings(given | assigned).over(getattr(asked, "generation_config", NO_SETTINGS))
