"""The command's parsed options -> the values that the library takes. All that needs no model is checked here."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from ..files.records import ALL_FIELDS, OPENAI, PromptRecord, RecordLayout, RecordReader
from ..files.settings import NO_SETTINGS, GenerationSettings, read_assignments, read_settings
from ..files.templates import Template
from ..inputs.chats import is_chat
from ..inputs.images.image_parts import has_images
from ..inputs.images.image_sources import ImageSources
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
    chats = [is_chat(each.prompt) for each in records]
    return FirstRecords(
        have_texts=any(chats) or any(isinstance(each.prompt, str) for each in records),
        only_chats=bool(records) and all(chats) and not any(each.settings.brings_template for each in records),
        only_images=bool(records) and all(chats) and all(has_images(each.prompt) for each in records),
        name_adapters=any(each.settings.adapter is not None for each in records),
        place=records[0].where if records else "",
    )


def layout_from(asked: argparse.Namespace) -> RecordLayout:
    keep = tuple(getattr(asked, "keep", ()))
    return RecordLayout(
        prompt_field=asked.prompt_field,
        template=None if asked.template is None else Template(asked.template),
        chat=asked.chat,
        system=asked.system,
        line_settings=not asked.no_line_settings,
        keep=ALL_FIELDS if keep == ("all",) else keep,
    )


def images_from(asked: argparse.Namespace) -> ImageSources | None:
    """Which images lines may show; None where chats are text alone."""
    if not asked.gpus:
        return ImageSources(asked.image_folder, asked.image_urls)
    if asked.image_folder or asked.image_urls:
        raise UsageError(
            "images are not supported with --gpus so far: leave out --image-folder and --image-urls, or run a part of "
            "the file on each GPU, with --shard"
        )
    return None


def settings_from(asked: argparse.Namespace) -> GenerationSettings:
    """The settings of the command line, over those of a --generation-config."""
    given, assigned = settings_in(asked), read_assignments(getattr(asked, "set", ()))
    for name in given.keys() & assigned:
        raise UsageError(f"{name} is given twice, with --set and with its own option: keep one of them")
    return read_settings(given | assigned).over(getattr(asked, "generation_config", NO_SETTINGS))
