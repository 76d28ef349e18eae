"""``<output>.run.json``, the run record: how the results beside it were made.

It is on the disk before the first result. A run that continues compares itself with it.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import secrets
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from ..._version import __version__
from ...errors import OutputFileError
from .paths import reason, write_atomically
from .shards import Part


def record_path(output: str) -> str:
    return f"{output}.run.json"


@dataclass
class RunRecord:
    settings: dict[str, Any]  # all that the results depend on: a run that continues must have the same
    seed: int | None = None  # None: drawn when the run begins, and kept when it continues
    model: dict[str, str] = field(default_factory=dict)  # its fingerprint; known once it is loaded
    input: dict[str, Any] = field(default_factory=dict)  # path, records, bytes, digest: filled in by the output
    version: str = ""  # of this library
    created: str = ""
    process: dict[str, Any] = field(default_factory=dict)  # pid, host, since: of the process that writes, or wrote last
    figures: dict[str, Any] = field(default_factory=dict)  # of the run that finished
    finished: str | None = None
    results: int | None = None  # how many, when it finished
    shard: dict[str, Any] = field(default_factory=dict)  # of a job that runs a part of the input: ``Part.summary``

    def differences(self, now: RunRecord, words: str = "{name} was {before} and is {after}") -> list[str]:
        """``max_new_tokens was 50 and is 20``, for each setting that has changed."""
        was, new = _flat(self.settings), _flat(now.settings)
        names = dict.fromkeys([*was, *new])
        if now.seed is not None:
            was["seed"], new["seed"] = self.seed, now.seed
            names["seed"] = None
        changes: list[str] = []
        for name in names:
            before, after = _in_words(was, name), _in_words(new, name)
            if before != after:
                changes.append(words.format(name=name, before=before, after=after))
        return changes

    def begin(self, old: RunRecord | None, source: dict[str, Any], part: Part | None = None) -> RunRecord:
        """The run record of a run that continues ``old``, or begins."""
        now = _now()
        seeds = (self.seed, None if old is None else old.seed, None if part is None else part.seed)
        return RunRecord(
            settings=json.loads(_json(self.settings)),
            seed=next((seed for seed in seeds if seed is not None), secrets.randbits(32)),
            model=old.model if old is not None and old.model else self.model,
            input=source,
            version=self.version or __version__,
            created=old.created if old is not None else self.created or now,
            process={"pid": os.getpid(), "host": platform.node(), "since": now},
            shard={} if part is None else part.summary(),
        )

    def finish(self, figures: dict[str, Any] | None, results: int) -> None:
        self.results = results
        self.figures = json.loads(_json(figures or {}))
        self.finished = _now()

    def write(self, path: str) -> None:
        """When this returns, it is whole and on the disk."""
        write_atomically(path, (json.dumps(asdict(self), ensure_ascii=True, indent=2) + "\n").encode())

    @classmethod
    def read(cls, path: str) -> RunRecord | None:
        try:
            with open(path, "rb") as file:
                found = json.loads(file.read())
            known = {each.name: found[each.name] for each in fields(cls) if each.name in found}
            types: dict[str, Any] = dict.fromkeys(("settings", "model", "input", "process", "figures", "shard"), dict)
            types |= {"seed": int | None, "results": int | None}
            if any(not isinstance(known[name], type_) for name, type_ in types.items() if name in known):
                raise ValueError("fields of another type")
            shard = known.get("shard")
            if shard and any(type(shard.get(name)) is not int for name in ("part", "of", "results", "records")):
                raise ValueError("a part without its place")
            return cls(**known)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise OutputFileError(f"{path} cannot be read: {reason(error)}") from error
        except (ValueError, TypeError, RecursionError) as error:
            raise OutputFileError(
                f"{path}, which says how the results were made, is damaged: `--restart` begins afresh"
            ) from error


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _json(value: Any) -> str:
    return json.dumps(value, default=str, sort_keys=True)


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict) and value:
            flat.update(_flat(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _in_words(settings: dict[str, Any], name: str) -> str:
    """None is the same as not set: old run records lack options that the library has got since."""
    value = settings.get(name)
    return "not set" if value is None else json.dumps(value, default=str, sort_keys=True)
