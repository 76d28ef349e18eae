"""What is made of a record of the input: a prompt with its settings, or the reason why it cannot be run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .openai_requests import OpenAIRequest
from .settings import GenerationSettings
from .templates import Template

PLAIN, OPENAI = "plain", "openai"  # dialects
ALL_FIELDS = ("all",)


@dataclass(frozen=True)
class RecordLayout:
    """How plain records become prompts, and which of their fields go into the results.

    prompt_field: the field that is the prompt; by default ``prompt`` or ``messages``.
    template: builds the prompt from fields instead.
    chat: a prompt that is text becomes the user's message of a chat; ``system`` begins every chat that has no system
        message.
    line_settings: whether fields named as settings are settings; else all fields are the user's own data.
    keep: fields that are copied into the results; ALL_FIELDS for all of them.
    """

    prompt_field: str | None = None
    template: Template | None = None
    chat: bool = False
    system: str | None = None
    line_settings: bool = True
    keep: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptRecord:
    """A record that can be run, as far as can be seen without a model."""

    number: int  # its place among the records, from 0
    prompt: Any  # as BatchGenerator.generate takes it
    settings: GenerationSettings  # of the line over those of the command line
    id: Any = None
    has_id: bool = False
    kept: Mapping[str, Any] = field(default_factory=dict)
    request: OpenAIRequest | None = None  # of an OpenAI batch


@dataclass(frozen=True, slots=True)
class BadPromptRecord:
    """A record that cannot be run: the reason, and the place as a person names it."""

    number: int
    where: str
    why: str
    id: Any = None
    has_id: bool = False
    kept: Mapping[str, Any] = field(default_factory=dict)
    param: str | None = None  # the setting that is to blame
    no_prompt: bool = False  # the fields that should make its prompt are missing or empty

    def __str__(self) -> str:
        return f"{self.where}: {self.why}"
