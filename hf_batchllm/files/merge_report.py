"""``MergeReport``: what a merge of parts came to."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..wording import counted


@dataclass
class MergeReport:
    """``str(report)`` is one to four lines for a person.

    path: where the results are.
    parts: how many parts the file was split into.
    records: how many records all parts have together.
    before: how many results were there when the merge began.
    written: how many results came from the parts.
    errors: how many of all results are errors.
    lacks: which parts lack results, in words; "" if no result is missing.
    """

    path: str
    parts: int
    records: int
    before: int = 0
    written: int = 0
    errors: int = 0
    lacks: str = ""
    errors_in: str = field(default="error", init=False, repr=False)  # the field of a result that holds its error

    @property
    def left(self) -> int:
        """How many results are missing."""
        return self.records - self.before - self.written

    def __str__(self) -> str:
        if not self.written and not self.left:
            lines = [f"{self.path}: complete already, {counted(self.records, 'result')}. Nothing to do"]
        else:
            lines = [f"{self.path}: {counted(self.written, 'result')} of {counted(self.parts, 'part')}"]
        if self.before and (self.written or self.left):
            lines.append(f"{counted(self.before, 'result')} {'was' if self.before == 1 else 'were'} there before")
        if self.errors:
            are = "is an error" if self.errors == 1 else "are errors"
            lines.append(f"{self.errors:,} of {self.before + self.written:,} results {are}: see `{self.errors_in}`")
        if self.left:
            are = "is" if self.left == 1 else "are"
            lines.append(
                f"{self.left:,} of {self.records:,} {are} missing: {self.lacks}. Run these jobs again and merge again, "
                f"or continue {self.path} by a run of the whole file"
            )
        else:
            lines.append(
                f"the parts are not needed any more, and may be deleted: {self.path}.shard-*-of-{self.parts}.jsonl and "
                "their .run.json"
            )
        return "\n".join(lines)
