"""``hf-batchllm plan``: what the prompts of a file share. No model."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import cache
from typing import Any

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


def main(arguments: Sequence[str]) -> int:
    asked = plan_parser().parse_args(arguments)
    console = Console(asked.quiet, asked.traceback)
    with interruptible(), console.warnings_shown():
        try:
            plan, errors = _plan_file(asked, console)
            _show(asked, plan, errors, console)
        except KeyboardInterrupt:
            console.error("interrupted")
            return INTERRUPTED
        except BrokenPipeError:
            raise
        except Exception as error:
            console.error(reason(error), error)
            return USAGE
    return SOME_ERRORS if errors else DONE


def _plan_file(asked: argparse.Namespace, console: Console) -> tuple[SharingPlan, list[str]]:
    """The plan of all prompts, and the errors of records that cannot be used."""
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
        read = [reader.read(*each) for each in source.read(range(min(source.count, asked.limit or source.count)))]
    prompts, errors = _prompts(read, tokenizer)
    plan = plan_sharing(prompts, min_shared_tokens=min_shared)
    if first.have_texts:
        plan.add_labels(prompts, lambda ids: tokenizer().decode(ids, skip_special_tokens=True))
    return plan, errors


def _tokenizer(asked: argparse.Namespace, first: FirstRecords) -> Any:
    if asked.tokenizer is None:
        raise UsageError("prompts that are text need a tokenizer: pass --tokenizer with a folder or a name")
    check_folders(asked)
    with bars_of_loading(asked.quiet):
        return load_tokenizer(asked, first)


def _prompts(read: Sequence[PromptRecord | BadPromptRecord], tokenizer: Any) -> tuple[list[Prompt], list[str]]:
    """The prompts as tokens, and the errors of records without one."""
    records = [record for record in read if isinstance(record, PromptRecord)]
    notices = Notices()
    with notices.naming([each.where for each in records]):
        checked, problems = check_prompts(
            [record.prompt for record in records],
            tokenizer=tokenizer,
            notices=notices,
            options=as_lists([record.settings.prompt_options for record in records]),
        )
    errors = [str(record) for record in read if isinstance(record, BadPromptRecord)]
    errors += [f"{records[place].where}: the prompt {why}" for place, why in problems.items()]
    return [prompt for prompt in checked if prompt is not None], errors


def _show(asked: argparse.Namespace, plan: SharingPlan, errors: Sequence[str], console: Console) -> None:
    if asked.html is not None:
        from ..results.views.html import text

        with open(asked.html, "w", encoding="utf-8") as file:
            title = text(f"What the prompts of {asked.source} share")
            file.write(_PAGE.format(title=title, body=plan._repr_html_()))
    if asked.json:
        saved = plan.total_tokens - plan.computed_tokens
        figures = {
            "prompts": len(plan.order),
            "tokens": plan.total_tokens,
            "computed_tokens": plan.computed_tokens,
            "saved_tokens": saved,
            "saving": saved / plan.total_tokens if plan.total_tokens else 0.0,
            "errors": len(errors),
        }
        print(json.dumps(figures, indent=2))
    else:
        print(plan)
    if errors:
        console.note(listed(f"{counted(len(errors), 'line')} cannot be used:", errors))
