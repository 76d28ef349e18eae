"""What the results of a run depend on: a run that continues must have the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .prompt_records import RecordLayout
from .settings import GenerationSettings


def run_identity(
    model: Mapping[str, Any],  # its name, dtype, ... as the user gave them
    layout: RecordLayout,
    base: GenerationSettings,
    dialect: str,
    token_ids: bool,
    **more: Any,
) -> dict[str, Any]:
    """By the names of the options, so that an error can name the option that differs."""
    found: dict[str, Any] = {
        **model,
        "dialect": dialect,
        "prompt_field": layout.prompt_field,
        "template": None if layout.template is None else layout.template.text,
        "chat": layout.chat or None,
        "system": layout.system,
        "line_settings": layout.line_settings,
        "keep": list(layout.keep) or None,
        "token_ids": token_ids or None,
        "logprobs": base.logprobs,
        "adapter": base.adapter,
        **base.options,
        **base.prompt_options,
        **({} if base.grammar is None else {base.grammar.option: base.grammar.text}),
        **more,
    }
    return {name: value for name, value in found.items() if value is not None}
