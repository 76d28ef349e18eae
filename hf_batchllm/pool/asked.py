"""What a pool asks one of its workers, which has the model and the tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..results.sharing_plan import SharingPlan
from .part_generator import PartGenerator


def plan_of(generator: PartGenerator, prompts: Any, adapter: Any, options: dict[str, Any]) -> SharingPlan:
    return generator.plan(prompts, adapter=adapter, **options)


def tokenizer_of(generator: PartGenerator) -> Any:
    return generator.tokenizer


def decoded(generator: PartGenerator, lists: Sequence[list[int]]) -> list[str | None]:
    """Of token ids; None where there is no tokenizer."""
    return [generator._tokenizer.decode(ids) for ids in lists]
