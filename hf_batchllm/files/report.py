"""The figures of a run from a file to a file, and of a merge of parts."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from ..results.run_report import RunReport
from ..wording import counted

_LEAST_LOADING = 0.05  # seconds that are told


@dataclass
class FileReport:
    """``str(report)`` is one to four lines for a person. A merge has no tokens and no seconds of its own.

    path: where the results are; "-" for stdout.
    records: how many records the run had: all of the input, ``limit`` of them, or those of its part.
    before: how many results were there when the run began.
    written: how many results this run has written.
    errors: how many of all results are errors, those of earlier runs included.
    beyond_context: how many of this run's results have more tokens, with their prompts, than the model was made for.
    prompt_tokens, computed_tokens, new_tokens: of this run, summed over its calls.
    seconds: of this run, from its beginning to its end, without the time in which the model was loaded.
    loading_seconds: in which the model was loaded; of the command, and the library. 0 where a model object was passed.
    """

    path: str
    records: int = 0
    before: int = 0
    written: int = 0
    errors: int = 0
    beyond_context: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    new_tokens: int = 0
    seconds: float = 0.0
    loading_seconds: float = 0.0
    part: str | None = field(default=None, init=False, repr=False)  # "part 2 of 8", of a run with ``shard``
    errors_in: str = field(default="error", init=False, repr=False)  # the field of a result that holds its error
    then: str = field(default="", init=False, repr=False)  # a last line, of a merge: what to do now

    @property
    def saving(self) -> float:
        """The share of the prompts' tokens that was not computed again."""
        return 1 - self.computed_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def left(self) -> int:
        return self.records - self.before - self.written

    def add(self, report: RunReport | None) -> None:
        if report is not None:
            self.prompt_tokens += report.prompt_tokens
            self.computed_tokens += report.computed_tokens
            self.new_tokens += report.new_tokens

    def figures(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self) if each.init and each.name != "path"}

    def __str__(self) -> str:
        where = "stdout" if self.path == "-" else self.path
        if not self.records:
            return f"{where}: nothing to do, as {self.part or 'the input'} has no records"
        if not self.written and not self.left:
            lines = [f"{where}: complete already, {counted(self.records, 'result')}. Nothing to do"]
        else:
            lines = [f"{where}: {self._of_this_run()}"]
            if self.before:
                were = "was" if self.before == 1 else "were"
                lines.append(f"{counted(self.before, 'result')} {were} there before")
        if self.left and not self.then:
            lines.append(f"{self.left:,} {'is' if self.left == 1 else 'are'} missing: the same command continues")
        if self.errors:
            are = "is an error" if self.errors == 1 else "are errors"
            all_of_them = f"{self.before + self.written:,} results {are}"
            lines.append(f"{self.errors:,} of {all_of_them}: see `{self.errors_in}`")
        if self.beyond_context:
            are = "is" if self.beyond_context == 1 else "are"
            lines.append(
                f"{self.beyond_context:,} of them {are} longer, with the prompt, than the model was made for: set "
                "`max_prompt_tokens`, or lower `max_new_tokens`"
            )
        return "\n".join([*lines, self.then] if self.then else lines)

    def _of_this_run(self) -> str:
        """``6 results in 1.4 s and 7.2 s of loading · 657 prompt tokens (64 % shared) · 18 new (13/s)``"""
        text = counted(self.written, "result")
        if not self.prompt_tokens:
            return text
        loading = f" and {self.loading_seconds:,.1f} s of loading" if self.loading_seconds >= _LEAST_LOADING else ""
        rate = f" ({self.new_tokens / self.seconds:,.0f}/s)" if self.seconds else ""
        return (
            f"{text} in {self.seconds:,.1f} s{loading} · {counted(self.prompt_tokens, 'prompt token')} "
            f"({100 * self.saving:.0f} % shared) · {self.new_tokens:,} new{rate}"
        )
