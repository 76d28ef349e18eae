"""``hf-batchllm plan``: what the prompts of a file share, window by window. No model."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from ..files.records import BadPromptRecord, PromptRecord, check_first_records, listed, make_reader
from ..files.sources import open_source
from ..inputs.prompt_options import as_lists
from ..inputs.prompts import Prompt, check_prompts
from ..notices import Notices
from ..planning.sharing import plan_sharing
from ..results.sharing_plan import SharingPlan
from ..wording import counted
from .arguments import config_from, plan_parser
from .console import DONE, INTERRUPTED, SOME_ERRORS, USAGE, Console, UsageError, interruptible, reason
from .loading import bars_of_loading, check_folders, load_tokenizer
from .values import FirstRecords, first_records, layout_from, settings_from

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
    errors: list[str] = field(default_factory=list)

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
            "errors": len(self.errors),
        }


def main(arguments: Sequence[str]) -> int:
    asked = plan_parser().parse_args(arguments)
    console = Console(asked.quiet, asked.traceback)
    with interruptible(), console.warnings_shown():
        try:
            file_plan = _plan_file(asked, console)
            _show(asked, file_plan, console)
        except KeyboardInterrupt:
            console.error("interrupted")
            return INTERRUPTED
        except BrokenPipeError:
            raise
        except Exception as error:
            console.error(reason(error), error)
            return USAGE
    return SOME_ERRORS if file_plan.errors else DONE


def _plan_file(asked: argparse.Namespace, console: Console) -> FilePlan:
    min_shared = config_from(asked).min_shared_tokens
    if asked.html is not None:
        with open(asked.html, "a", encoding="utf-8"):
            pass  # a wrong place is an error now, and not when all is planned
    with open_source(asked.source, asked.format, note=console.note) as source:
        reader = make_reader(source, layout_from(asked), settings_from(asked))
        first = first_records(asked, reader, check_first_records(reader, source, asked.limit))
        tokenizer = cache(lambda: _tokenizer(asked, first))
        if first.have_texts:
            tokenizer()
        notices, file_plan = Notices(), FilePlan()  # each warning once, for all windows
        numbers = np.arange(min(source.count, asked.limit or source.count))
        for window in source.windows(numbers, asked.window, reader.prompt_text):
            prompts = _prompts([reader.read(*each) for each in source.read(window)], tokenizer, notices, file_plan)
            plan = plan_sharing(prompts, min_shared_tokens=min_shared)
            if first.have_texts:
                plan.add_labels(prompts, lambda ids: tokenizer().decode(ids, skip_special_tokens=True))
            file_plan.plans.append(plan)
        return file_plan


def _tokenizer(asked: argparse.Namespace, first: FirstRecords) -> Any:
    if asked.tokenizer is None:
        raise UsageError("prompts that are text need a tokenizer: pass --tokenizer with a folder or a name")
    check_folders(asked)
    with bars_of_loading(asked.quiet):
        return load_tokenizer(asked, first)


def _prompts(
    window: Sequence[PromptRecord | BadPromptRecord], tokenizer: Any, notices: Notices, file_plan: FilePlan
) -> list[Prompt]:
    """The prompts of a window, as tokens. The errors of its records go into ``file_plan``."""
    records = [record for record in window if isinstance(record, PromptRecord)]
    with notices.naming(lambda place: records[place].where):
        checked, problems = check_prompts(
            [record.prompt for record in records],
            tokenizer=tokenizer,
            notices=notices,
            options=as_lists([record.settings.prompt_options for record in records]),
        )
    file_plan.errors += [str(record) for record in window if isinstance(record, BadPromptRecord)]
    file_plan.errors += [f"{records[place].where}: the prompt {why}" for place, why in problems.items()]
    return [prompt for prompt in checked if prompt is not None]


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
    if errors := file_plan.errors:
        console.note(listed(f"{counted(len(errors), 'line')} cannot be used:", errors))
