"""What a run from a file to a file comes to."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..results.run_report import RunReport


@dataclass
class FileReport:
    """``str`` of it is two or three lines for a person.

    path: of the results; "-" for stdout.
    records: that were to have a result: all of the input, or as many as the run was limited to.
    before: results that were there when the run began.
    written: results of this run.
    errors: how many of all results are errors, those that were there before included.
    prompt_tokens, computed_tokens, new_tokens, seconds: of this run, summed up over its calls.
    """

    path: str
    records: int = 0
    before: int = 0
    written: int = 0
    errors: int = 0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    new_tokens: int = 0
    seconds: float = 0.0

    @property
    def saving(self) -> float:
        """Of the prompts' tokens, the part that was not computed again."""
        return 1 - self.computed_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def left(self) -> int:
        return self.records - self.before - self.written

    def add(self, report: RunReport | None) -> None:
        if report is not None:
            self.prompt_tokens += report.prompt_tokens
            self.computed_tokens += report.computed_tokens
            self.new_tokens += report.new_tokens
            self.seconds += report.seconds

    def figures(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "path"}

    def __str__(self) -> str:
        where = "stdout" if self.path == "-" else self.path
        if not self.records:
            return f"{where}: nothing to do, as the input has no records"
        if not self.written and not self.left:
            return f"{where}: complete already, {_counted(self.records, 'result')}{self._errors()}. Nothing to do"
        beside = f", {self.before:,} were there" if self.before else ""
        lines = [f"{where}: {_counted(self.written, 'result')} written{beside}{self._errors()}"]
        if self.left:
            lines.append(f"{self.left:,} are missing: the same command goes on")
        if self.prompt_tokens:
            rate = self.new_tokens / self.seconds if self.seconds else 0.0
            lines.append(
                f"{self.prompt_tokens:,} prompt tokens, {self.saving:.0%} of which sharing saved; "
                f"{self.new_tokens:,} new ones, {rate:,.0f} a second"
            )
        return "\n".join(lines)

    def _errors(self) -> str:
        if not self.errors:
            return ""
        return f"; {self.errors:,} of them {'is an error' if self.errors == 1 else 'are errors'} (see `error` in each)"


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
