"""``hf-batchllm plan``: what the prompts of a file share, window by window. No model."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import numpy as np

from ..config import BatchConfig
from ..files.records.prompt_records import PromptRecord
from ..files.records.record_reader import RecordReader
from ..files.store.sources import Source, open_source
from ..inputs.prompt_options import as_lists
from ..inputs.prompts import Prompt, check_prompts
from ..notices import Notices
from ..planning.sharing import plan_sharing
from ..results.sharing_plan import SharingPlan
from .argument_values import first_records, layout_from, prompt_settings_from, reader_from, size_from
from .arguments import plan_parser
from .exits import DONE, SOME_ERRORS, USAGE, interruptible
from .flag_names import in_flags
from .loading import bars_of_loading, check_template, check_tokenizer_name, load_tokenizer, quiet_transformers
from .messages import Console, UsageError, reason

_MOST_ERRORS_SHOWN = 8
_PAGE = """\
<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title></head>
<body style="max-width: 60rem; margin: 2rem auto; font-family: system-ui, sans-serif">
<h1 style="font-size: 1.2rem">{title}</h1>
{body}
</body></html>
"""


@dataclass
class FilePlan:
    plans: list[SharingPlan] = field(default_factory=list)  # one for each window
    shown_errors: list[str] = field(default_factory=list)  # the first ones
    errors: int = 0

    def add_error(self, why: str) -> None:
        self.errors += 1
        if len(self.shown_errors) < _MOST_ERRORS_SHOWN:
            self.shown_errors.append(why)

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
    console = Console(asked.quiet, asked.traceback, in_flags(asked))
    with interruptible() as interrupts, console.warnings_shown():
        try:
            file_plan = _plan_file(asked, console)
            _show(asked, file_plan, console)
        except KeyboardInterrupt:
            console.error("interrupted")
            return interrupts.code
        except BrokenPipeError:
            raise
        except Exception as error:
            console.error(reason(error), error)
            return USAGE
    return SOME_ERRORS if file_plan.errors else DONE


def _plan_file(asked: argparse.Namespace, console: Console) -> FilePlan:
    layout, window = layout_from(asked), size_from(asked.window, "--window")
    min_shared = BatchConfig.min_shared_tokens if asked.min_shared_tokens is None else asked.min_shared_tokens
    if asked.html is not None:
        _check_html(asked.html)
    source = open_source(asked.source, asked.format, note=console.note)
    try:
        base = prompt_settings_from(asked)
        reader = reader_from(asked, source, layout, base)
        first = first_records(reader, source, asked.limit)

        @cache
        def tokenizer() -> Any:
            if asked.tokenizer is None:
                raise UsageError("prompts that are text need a tokenizer: pass --tokenizer with a folder or a name")
            check_tokenizer_name(asked.tokenizer)
            with quiet_transformers(), bars_of_loading(not asked.quiet):
                return load_tokenizer(asked, "prompts that are text")

        if first.have_texts:
            loaded = tokenizer()
            if first.only_chats and not base.brings_template:
                check_template(loaded, asked.tokenizer, first.place)
        numbers = np.arange(min(source.count, asked.limit or source.count))
        file_plan = FilePlan()
        for prompts in _windows(source, reader, numbers, window, tokenizer, file_plan):
            plan = plan_sharing(prompts, min_shared_tokens=min_shared)
            if first.have_texts:
                plan.add_labels(prompts, lambda ids: tokenizer().decode(ids, skip_special_tokens=True))
            file_plan.plans.append(plan)
        return file_plan
    finally:
        source.close()


def _windows(
    source: Source, reader: RecordReader, numbers: np.ndarray, window: int, tokenizer: Any, file_plan: FilePlan
) -> Iterator[list[Prompt]]:
    notices = Notices()  # each of them once, for all windows
    for stretch in source.windows(numbers, window, reader.prompt_text):
        records: list[PromptRecord] = []
        for number, raw in zip(stretch.tolist(), source.records(stretch), strict=True):
            read = reader.read(number, raw)
            if isinstance(read, PromptRecord):
                records.append(read)
            else:
                file_plan.add_error(str(read))
        options = as_lists([record.settings.prompt_options for record in records])
        with notices.naming(partial(_place, source, records)):
            checked, problems = check_prompts(
                [record.prompt for record in records], tokenizer=tokenizer, notices=notices, options=options
            )
        for place, why in problems.items():
            file_plan.add_error(f"{_place(source, records, place)}: the prompt {why}")
        yield [prompt for prompt in checked if prompt is not None]


def _place(source: Source, records: Sequence[PromptRecord], place: int) -> str:
    return source.where(records[place].number)


def _check_html(path: str) -> None:
    try:
        with open(path, "a", encoding="utf-8"):
            pass
    except OSError as error:
        raise UsageError(f"--html {path}: {error.strerror}") from None


def _show(asked: argparse.Namespace, file_plan: FilePlan, console: Console) -> None:
    if asked.html is not None:
        from ..results.views.html import text

        body = "\n".join(plan._repr_html_() for plan in file_plan.plans)
        with open(asked.html, "w", encoding="utf-8") as file:
            file.write(_PAGE.format(title=text(f"What the prompts of {asked.source} share"), body=body))
    figures = file_plan.figures
    if asked.json:
        print(json.dumps(figures, indent=2))
    elif len(file_plan.plans) == 1:
        print(file_plan.plans[0])
    else:
        print(f"{figures['prompts']:,} prompts in {len(file_plan.plans):,} windows")
        print(f"  tokens asked for   {figures['tokens']:>18,}")
        print(f"  tokens to compute  {figures['computed_tokens']:>18,}")
        print(f"  tokens saved       {figures['saved_tokens']:>18,}   {figures['saving']:.1%}")
    if file_plan.errors:
        hidden = file_plan.errors - len(file_plan.shown_errors)
        more = f"\n  ... and {hidden:,} more" if hidden else ""
        lines = "lines cannot" if file_plan.errors > 1 else "line cannot"
        console.note("\n  ".join([f"{file_plan.errors:,} {lines} be used:", *file_plan.shown_errors]) + more)
