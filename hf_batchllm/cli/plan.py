"""``hf-batchllm plan``: what the prompts of a file share, window by window. No model."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from ..config import BatchConfig
from ..files.records.records import PromptRecord, Reader
from ..files.records.settings import LineSettings
from ..files.store.sources import Source, open_source
from ..inputs.prompts import Prompt, check_prompts
from ..planning.sharing import plan_sharing
from ..results.sharing_plan import SharingPlan
from .arguments import plan_parser
from .exits import DONE, SOME_ERRORS, USAGE, interruptible
from .loading import check_template, load_tokenizer, quiet_transformers
from .messages import Said, UsageError, reason
from .reading import first_of, form_of, reader_of, size_of

_SHOWN = 8  # bad lines that are spelt out
_PAGE = """\
<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title></head>
<body style="max-width: 60rem; margin: 2rem auto; font-family: system-ui, sans-serif">
<h1 style="font-size: 1.2rem">{title}</h1>
{body}
</body></html>
"""


@dataclass
class PlannedFile:
    plans: list[SharingPlan] = field(default_factory=list)  # one for each window
    bad: list[str] = field(default_factory=list)
    errors: int = 0

    def add_error(self, why: str) -> None:
        self.errors += 1
        if len(self.bad) < _SHOWN:
            self.bad.append(why)

    @property
    def figures(self) -> dict[str, Any]:
        prompts = sum(len(plan.order) for plan in self.plans)
        total = sum(plan.total_tokens for plan in self.plans)
        computed = sum(plan.computed_tokens for plan in self.plans)
        return {
            "prompts": prompts,
            "tokens": total,
            "computed_tokens": computed,
            "saved_tokens": total - computed,
            "saving": (total - computed) / total if total else 0.0,
            "windows": len(self.plans),
            "errors": self.errors,
        }


def main(arguments: Sequence[str]) -> int:
    asked = plan_parser().parse_args(arguments)
    said = Said(asked.quiet, asked.traceback)
    with interruptible() as interrupts, said.warnings_shown():
        try:
            found = _found(asked, said)
            _show(asked, found, said)
        except KeyboardInterrupt:
            said.error("interrupted")
            return interrupts.code
        except BrokenPipeError:
            raise
        except Exception as error:
            said.error(reason(error), error)
            return USAGE
    return SOME_ERRORS if found.errors else DONE


def _found(asked: argparse.Namespace, said: Said) -> PlannedFile:
    form, window = form_of(asked), size_of(asked.window, "--window")
    fee = BatchConfig.min_shared_tokens if asked.min_shared_tokens is None else asked.min_shared_tokens
    if asked.html is not None:
        _check_html(asked.html)
    source = open_source(asked.source, asked.format, note=said.note)
    try:
        reader = reader_of(asked, source, form, LineSettings())
        first = first_of(reader, source, asked.limit)

        @cache
        def tokenizer() -> Any:
            if asked.tokenizer is None:
                raise UsageError("prompts that are text need a tokenizer: pass --tokenizer, a folder or a name")
            with quiet_transformers(asked.quiet):
                return load_tokenizer(asked, "prompts that are text")

        if first.texts:
            loaded = tokenizer()
            if first.chats:
                check_template(loaded, asked.tokenizer)
        numbers = np.arange(min(source.count, asked.limit or source.count))
        found = PlannedFile()
        for prompts in _windows(source, reader, numbers, window, tokenizer, found):
            plan = plan_sharing(prompts, min_shared_tokens=fee)
            if first.texts:
                plan.add_labels(prompts, lambda ids: tokenizer().decode(ids, skip_special_tokens=True))
            found.plans.append(plan)
        return found
    finally:
        source.close()


def _windows(
    source: Source, reader: Reader, numbers: np.ndarray, window: int, tokenizer: Any, found: PlannedFile
) -> Iterator[list[Prompt]]:
    for stretch in source.windows(numbers, window, reader.prompt_text):
        items: list[PromptRecord] = []
        for number, raw in zip(stretch.tolist(), source.records(stretch), strict=True):
            read = reader.read(number, raw)
            if isinstance(read, PromptRecord):
                items.append(read)
            else:
                found.add_error(str(read))
        checked, problems = check_prompts([item.prompt for item in items], tokenizer=tokenizer)
        for place, why in problems.items():
            found.add_error(f"{source.where(items[place].number)}: the prompt {why}")
        yield [prompt for prompt in checked if prompt is not None]


def _check_html(path: str) -> None:
    try:
        with open(path, "a", encoding="utf-8"):
            pass
    except OSError as error:
        raise UsageError(f"--html {path}: {error.strerror}") from None


def _show(asked: argparse.Namespace, found: PlannedFile, said: Said) -> None:
    if asked.html is not None:
        from ..results.views.markup import text
        from ..results.views.plan import plan_html

        body = "\n".join(map(plan_html, found.plans))
        with open(asked.html, "w", encoding="utf-8") as file:
            file.write(_PAGE.format(title=text(f"What the prompts of {asked.source} share"), body=body))
    figures = found.figures
    if asked.json:
        print(json.dumps(figures, indent=2))
    elif len(found.plans) == 1:
        print(found.plans[0])
    else:
        print(f"{figures['prompts']:,} prompts in {len(found.plans):,} windows")
        print(f"  tokens asked for   {figures['tokens']:>18,}")
        print(f"  tokens to compute  {figures['computed_tokens']:>18,}")
        print(f"  tokens saved       {figures['saved_tokens']:>18,}   {figures['saving']:.1%}")
    if found.errors:
        more = f"\n  ... and {found.errors - len(found.bad):,} more" if found.errors > len(found.bad) else ""
        lines = "lines cannot" if found.errors > 1 else "line cannot"
        said.note("\n  ".join([f"{found.errors:,} {lines} be used:", *found.bad]) + more)
