"""``RunOptions``: how one run from a file to a file goes, beside what its records and its model say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..errors import FilesError
from ..wording import shown
from .records.result_layout import RESULT_LAYOUT
from .store.open_output import open_output
from .store.output import ORDERS, Output
from .store.sources import WINDOW_BYTES, Source
from .store.syncing import seconds_between_syncs

ON_ERROR = ("record", "raise")


@dataclass(frozen=True)
class RunOptions:
    """Checked when it is made. ``run_file`` documents each field."""

    output_format: str | None = None
    token_ids: bool = False
    order: str = "input"
    fsync: str = "5s"
    window_bytes: int = WINDOW_BYTES
    retry_errors: bool = False
    restart: bool = False
    on_error: str = "record"
    limit: int | None = None
    seed: int | None = None
    progress: bool | None = None

    def __post_init__(self) -> None:
        for name, value, allowed in (("order", self.order, ORDERS), ("on_error", self.on_error, ON_ERROR)):
            if value not in allowed:
                raise FilesError(f"`{name}` must be {' or '.join(map(repr, allowed))}, not {shown(value)}")
        for name, size in (("limit", self.limit), ("window_bytes", self.window_bytes)):
            if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
                raise FilesError(f"`{name}` must be a whole number above 0, not {shown(size)}")
        seconds_between_syncs(self.fsync)

    def open_output(self, target: str, source: Source, note: Callable[[str], None]) -> Output:
        """Locks the output, and changes nothing in it: a refusal of its place, or of a second run, comes here."""
        return open_output(
            target,
            self.output_format,
            layout=RESULT_LAYOUT,
            source=source,
            fsync=self.fsync,
            restart=self.restart,
            note=note,
        )
