"""What the results of a run depend on: one that goes on with them must have the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .records import Form
from .settings import LineSettings


def identity_of(
    model: Mapping[str, Any],  # what its user said of it
    form: Form,
    base: LineSettings,
    dialect: str,
    token_ids: bool,
    **more: Any,
) -> dict[str, Any]:
    """By the names of the options, so that a difference can be told in those words."""
    found: dict[str, Any] = {
        **model,
        "dialect": dialect,
        "prompt_field": form.prompt_field,
        "template": None if form.template is None else form.template.text,
        "chat": form.chat or None,
        "system": form.system,
        "line_settings": form.line_settings,
        "keep": list(form.keep) or None,
        "token_ids": token_ids or None,
        "logprobs": base.logprobs,
        "adapter": base.adapter,
        **base.options,
        **more,
    }
    return {name: value for name, value in found.items() if value is not None}
