"""Whether a run may continue with the results of an earlier one: its settings and its records must be the same."""

from __future__ import annotations

import numpy as np

from ...errors import RunChangedError
from ...wording import differing
from .journal import Journal
from .run_record import RunRecord
from .shards import Part, Shard
from .sources import Source, record_key

RESTART_HINT = (
    "`--restart` begins afresh (the old results are moved to {path}.bak-1 or the next free number, never deleted)"
)


def check_same_run(
    path: str,
    old: RunRecord,
    new: RunRecord,
    source: Source,
    *,
    journal: Journal,
    complete: bool,  # a finished table
    retry_errors: bool,
    part: Part | None = None,
) -> None:
    """RunChangedError, naming what has changed."""
    afresh = f"give another output, or {RESTART_HINT.format(path=path)}"
    _check_same_kind(path, old, part, afresh)
    differences = old.differences(new)
    if differences:
        raise RunChangedError(
            f"{path} was begun with other settings: {'; '.join(differences)}. "
            f"To continue it, run it with the old ones; else {afresh}",
            differences,
        )
    if old.input.get("digest") == source.digest and source.digest:
        if part is not None:
            _check_same_split(path, old, part, afresh)
        return
    if part is not None:
        raise RunChangedError(
            f"{source.name} has changed since {path} was begun. All jobs need the same file, as each finds its part "
            f"in it: give the old input; else {afresh}",
            [f"{source.name} has changed"],
        )
    if complete:
        before, now = int(old.input.get("records") or 0), source.count
        raise RunChangedError(
            f"{path} is complete, and {source.name} has changed since (it had {before:,} records, and has "
            f"{now:,}). A table cannot be continued (a .jsonl file can): {afresh}",
            [f"{source.name} has changed"],
        )
    _check_records(path, source, journal, afresh, retry_errors)


def check_same_merge(path: str, old: RunRecord, merged: RunRecord) -> None:
    """Whether results of parts may be added to those that are in ``path``. RunChangedError, naming what differs."""
    differences = old.differences(merged, "{name} is {before} there and {after} in the parts")
    if old.input.get("digest") != merged.input.get("digest"):
        differences.append("the input was another one")
    if other := differing(old.model, merged.model):
        differences.append(f"the parts had {other}")
    if old.shard:
        differences.append(f"it is {_part_in_words(old)}")
    if differences:
        raise RunChangedError(
            f"{path} has results of another run than its parts: {'; '.join(differences)}. Merge into another output, "
            f"or {RESTART_HINT.format(path=path)}",
            differences,
        )


def _check_same_kind(path: str, old: RunRecord, part: Part | None, afresh: str) -> None:
    """Whether both runs are of the same part, or both of no part."""
    was = _part_in_words(old) or "a run of the whole file"
    now = "a run of the whole file" if part is None else part.shard.words
    if was != now:
        raise RunChangedError(
            f"{path} was begun as {was}, and would now be {now}: {afresh}", [f"it was begun as {was}"]
        )


def _check_same_split(path: str, old: RunRecord, part: Part, afresh: str) -> None:
    before = old.shard.get("records")
    if before != part.records:
        raise RunChangedError(
            f"{path} was begun as a part of {before:,} records, and is now to be a part of {part.records:,}, which is "
            f"another part: give the old limit; else {afresh}",
            [f"limit was {before:,} and is {part.records:,}"],
        )
    if old.shard.get("split") != part.split:
        raise RunChangedError(
            f"{path} was begun with another split of the same file, by version {old.version} of the library: continue "
            f"it with that version; else {afresh}",
            ["the split of the file has changed"],
        )


def _part_in_words(record: RunRecord) -> str:
    return Shard(record.shard["part"], record.shard["of"]).words if record.shard else ""


def _check_records(path: str, source: Source, journal: Journal, afresh: str, retry_errors: bool) -> None:
    """Compares the key of each result with its record in the input."""
    numbers, keys = journal.keys()
    errors = np.isin(numbers, journal.errors)
    if retry_errors:  # these records run again anyhow, so they may have been corrected
        numbers, keys = numbers[~errors], keys[~errors]
    if len(numbers) and numbers[-1] >= source.count:
        raise RunChangedError(
            f"{path} has a result for record {int(numbers[-1]) + 1:,}, and {source.name} has only "
            f"{source.count:,} records: it is another input, or it was cut. Give the old input; else {afresh}",
            [f"{source.name} is shorter than it was"],
        )
    first = 0
    for chunk in source.chunks(numbers):
        found = np.array([int(record_key(raw), 16) for raw in source.records(chunk)], dtype=np.uint64)
        changed = np.flatnonzero(found != keys[first : first + len(chunk)]) + first
        first += len(chunk)
        if len(changed):
            where = source.where(int(numbers[changed[0]]))
            corrected = not retry_errors and bool(errors[changed].all())
            remedy = "`--retry-errors` runs lines with errors again" if corrected else "Give the old input"
            raise RunChangedError(
                f"{source.name}, {where}: this record has changed since {path} was begun, which has "
                f"{'an error' if corrected else 'a result'} for it. {remedy} (lines may be added at its end); "
                f"else {afresh}",
                [f"{source.name}, {where} has changed"],
            )
