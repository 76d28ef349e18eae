"""The command's parsed options -> the values that the library takes. All that needs no model is checked here."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..errors import BatchLLMError, FilesError
from ..files.first_records import check_first_records, make_reader
from ..files.records.prompt_records import ALL_FIELDS, OPENAI, RecordLayout
from ..files.records.record_reader import RecordReader
from ..files.records.settings import GenerationSettings, read_assignments, read_settings
from ..files.records.templates import Template, unescaped
from ..files.store.sources import Source
from ..inputs.chats import is_chat
from ..inputs.images.image_parts import has_images
from ..inputs.images.image_sources import ImageSources
from .flag_names import flag_of
from .grammar_flags import GRAMMAR_FLAGS, grammar_flags
from .messages import UsageError
from .prompt_flags import PROMPT_FLAGS, prompt_flags

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True)
class FirstRecords:
    """What the first records hold, and so which tokenizer is needed."""

    have_texts: bool  # or chats: a tokenizer is needed
    only_chats: bool  # the tokenizer needs a chat template, or all of them are errors
    name_adapters: bool = False
    place: str = ""  # of the first of them, as a person names it
    only_images: bool = False  # all are chats with images: the model must take these


def layout_from(asked: argparse.Namespace) -> RecordLayout:
    template = None
    if asked.template is not None:
        if asked.prompt_field is not None:
            raise UsageError("--template and --prompt-field both say what the prompt is: keep one of them")
        template = Template(_template_text(asked.template))
    keep = getattr(asked, "keep", None)
    names = () if keep is None else tuple(name.strip() for name in keep.split(",") if name.strip())
    return RecordLayout(
        prompt_field=asked.prompt_field,
        template=template,
        chat=asked.chat,
        system=None if asked.system is None else unescaped(asked.system),
        line_settings=not asked.no_line_settings,
        keep=ALL_FIELDS if keep == "all" else names,
    )


def _template_text(given: str) -> str:
    if not given.startswith("@"):
        return unescaped(given)
    try:
        with open(given[1:], encoding="utf-8-sig") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UsageError(f"--template {given}: {why}") from None


def images_from(asked: argparse.Namespace) -> ImageSources | None:
    """Which images lines may show; None where chats are text alone."""
    if asked.gpus:
        for name, value in (("--image-folder", asked.image_folder), ("--image-urls", asked.image_urls)):
            if value:
                raise UsageError(
                    f"{name} does not go with --gpus, as images are not supported there so far: run a part of the file "
                    "on each GPU, with --shard"
                )
        return None
    try:
        return ImageSources(asked.image_folder, asked.image_urls)
    except FilesError as error:
        raise UsageError(str(error).replace("`image_folder`", "--image-folder")) from error


def reader_from(
    asked: argparse.Namespace,
    source: Source,
    layout: RecordLayout,
    base: GenerationSettings,
    images: ImageSources | None = None,
) -> RecordReader:
    reader = make_reader(source, layout, base, asked.dialect, images)
    if reader.dialect == OPENAI:
        _refuse_with_batches(asked)
    return reader


def _refuse_with_batches(asked: argparse.Namespace) -> None:
    given = {
        "--template": asked.template,
        "--prompt-field": asked.prompt_field,
        "--chat": asked.chat,
        "--system": asked.system,
        "--keep": getattr(asked, "keep", None),
        "--token-ids": getattr(asked, "token_ids", None),
    }
    for name, value in given.items():
        if value:
            raise UsageError(f"{name} does not go with a file of OpenAI's requests, whose form is fixed: leave it out")


def first_records(reader: RecordReader, source: Source, limit: int | None = None) -> FirstRecords:
    records = check_first_records(reader, source, limit)
    texts = any(isinstance(each.prompt, str) for each in records)
    return FirstRecords(
        texts or any(is_chat(each.prompt) for each in records),
        bool(records) and all(is_chat(each.prompt) and not each.settings.brings_template for each in records),
        any(each.settings.adapter is not None for each in records),
        source.where(records[0].number) if records else "",
        bool(records) and all(is_chat(each.prompt) and has_images(each.prompt) for each in records),
    )


def settings_from(asked: argparse.Namespace) -> GenerationSettings:
    """The settings of the command line, over those of a --generation-config."""
    given: dict[str, Any] = {
        "max_new_tokens": asked.max_new_tokens,
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "top_k": asked.top_k,
        "num_return_sequences": asked.num_return_sequences,
        "stop_strings": None if asked.stop is None else [unescaped(text) for text in asked.stop],
        "logprobs": asked.logprobs,
        "seed": asked.seed,
    }
    given |= prompt_flags(asked) | grammar_flags(asked)
    flags = {name: value for name, value in given.items() if value is not None}
    for name, value in read_assignments(asked.set).items():
        if name in flags:
            raise UsageError(f"{name} is given twice, with --set and with its own option: keep one of them")
        flags[name] = value
    try:
        settings = read_settings(flags)
    except BatchLLMError as error:
        raise UsageError(_with_flags(str(error), [*given, *PROMPT_FLAGS, *GRAMMAR_FLAGS])) from error
    return settings.over(_config_file(asked.generation_config))


def prompt_settings_from(asked: argparse.Namespace) -> GenerationSettings:
    """The settings of a command that generates nothing."""
    try:
        return read_settings(prompt_flags(asked))
    except BatchLLMError as error:
        raise UsageError(_with_flags(str(error), PROMPT_FLAGS)) from error


def _with_flags(message: str, names: Iterable[str]) -> str:
    """With the command's options in the place of the settings' names."""
    for name in names:
        message = message.replace(f"`{name}`", flag_of(name))
    return message


def _config_file(path: str | None) -> GenerationSettings:
    if path is None:
        return GenerationSettings()
    path = os.path.join(path, "generation_config.json") if os.path.isdir(path) else path
    try:
        with open(path, encoding="utf-8") as file:
            fields = json.load(file)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else f"it is not JSON ({error})"
        raise UsageError(f"--generation-config {path}: {why}") from None
    if not isinstance(fields, dict):
        raise UsageError(f"--generation-config {path}: it holds no JSON object")
    not_settings = ("transformers_version",)
    fields = {name: value for name, value in fields.items() if name not in not_settings and not name.startswith("_")}
    try:
        return read_settings(fields, settle=False)
    except BatchLLMError as error:
        raise UsageError(f"--generation-config {path}: {error}") from error


def size_from(text: str, option: str) -> int:
    """``256MiB``, ``256M`` or bytes."""
    bare = text.strip().upper().removesuffix("B").removesuffix("I")
    unit = bare[-1:] if bare[-1:] in ("K", "M", "G") else ""
    number = bare.removesuffix(unit)
    try:
        size = int(float(number) * _UNITS[unit])
    except ValueError:
        size = 0
    if size < 1:
        raise UsageError(f"{option} must be a size such as 256MiB, not {text!r}")
    return size
