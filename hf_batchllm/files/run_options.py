"""``RunOptions``: how one run from a file to a file goes, beside what its records and its model say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..errors import FilesError, OutputFileError
from ..wording import shown
from .output import FileOutput, open_output
from .paths import real_path
from .shards import Part, Shard, part_of, shards_beside
from .sources import WINDOW_BYTES, PromptOf, Source
from .streams import StreamOutput, is_stream
from .tables import format_of

ON_ERROR = ("record", "raise")


@dataclass(frozen=True)
class RunOptions:
    """Checked when it is made. ``run_file`` documents each field."""

    output_format: str | None = None
    token_ids: bool = False
    window_bytes: int = WINDOW_BYTES
    retry_errors: bool = False
    restart: bool = False
    on_error: str = "record"
    limit: int | None = None
    seed: int | None = None
    progress: bool | None = None
    shard: Shard | None = None

    def __post_init__(self) -> None:
        if self.on_error not in ON_ERROR:
            raise FilesError(f"`on_error` must be {' or '.join(map(repr, ON_ERROR))}, not {shown(self.on_error)}")
        for name, size in (("limit", self.limit), ("window_bytes", self.window_bytes)):
            if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
                raise FilesError(f"`{name}` must be a whole number above 0, not {shown(size)}")

    @property
    def format(self) -> str | None:
        """The format of the file that the run writes; None where its name says it."""
        return self.output_format if self.shard is None else "jsonl"

    def check_target(self, target: str) -> None:
        """A name that cannot be an output is refused before the input is read."""
        if not is_stream(target):
            format_of(target, self.output_format, OutputFileError)
            return
        for name in ("restart", "retry_errors", "shard"):
            if getattr(self, name):
                raise OutputFileError(f"`{name}` needs an output that can be continued, and {target} is a stream")

    def place(self, target: str, source: Source) -> str:
        """The file that the run writes: ``target``, or that of a part beside it."""
        if self.shard is None:
            return target
        if source.is_file(real_path(target)):
            raise OutputFileError(f"{source.name} is the input, and would be merged into: give another output")
        other = next((shard for shard in shards_beside(target) if shard.of != self.shard.of), None)
        if other is not None:
            raise OutputFileError(
                f"{target} has parts of another split, as {other.place(target)}, and this is {self.shard.words}: say "
                "the same number of parts in all jobs, give another output, or move the old parts away (Slurm's "
                "$SLURM_ARRAY_TASK_COUNT is that of the tasks submitted now)"
            )
        return self.shard.place(target)

    def part(self, source: Source, prompt_of: PromptOf) -> Part | None:
        """Which records the run is for; None for all of them. Reads the whole input once."""
        if self.shard is None:
            return None
        return part_of(source, self.shard, min(source.count, self.limit or source.count), prompt_of)

    def open_output(self, place: str, source: Source, note: Callable[[str], None]) -> FileOutput | StreamOutput:
        """Locks the output, and changes nothing in it: a refusal of its place, or of a second run, comes here."""
        return open_output(place, self.format, source=source, restart=self.restart, note=note)
