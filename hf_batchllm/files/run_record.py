"""``<output>.run.json``, the run record: how the results beside it were made.

It is on the disk before the first result. A run that continues must have the same settings, model and input.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from .._version import __version__
from ..errors import OutputFileError
from .paths import reason, replacing
from .records import RecordLayout
from .settings import GenerationSettings

_OBJECTS = ("settings", "model", "input", "process", "figures", "shard")
_OF_PARTS = ("part", "of", "results", "records")


def record_path(output: str) -> str:
    return f"{output}.run.json"


@dataclass
class RunRecord:
    settings: dict[str, Any]  # all that results depend on, by the names of the options
    seed: int | None = None  # None: drawn when the run begins, and kept when it continues
    model: dict[str, str] = field(default_factory=dict)  # digests; known once it is loaded
    input: dict[str, Any] = field(default_factory=dict)  # path, records, bytes, digest
    version: str = ""  # of this library
    created: str = ""
    process: dict[str, Any] = field(default_factory=dict)  # pid, host, since: of the process that writes, or wrote last
    figures: dict[str, Any] = field(default_factory=dict)  # of the run that finished
    finished: str | None = None
    results: int | None = None  # how many, when it finished
    shard: dict[str, Any] = field(default_factory=dict)  # part, of, results, records: of a run of a part

    @property
    def part(self) -> str:
        """``part 2 of 8``, or ``a run of the whole file``."""
        return f"part {self.shard['part']:,} of {self.shard['of']:,}" if self.shard else "a run of the whole file"

    def differences(self, now: RunRecord, words: str = "{name} was {before} and is {after}") -> list[str]:
        """``max_new_tokens was 50 and is 20``, for each setting that has changed."""
        was, new = _flat(self.settings), _flat(now.settings)
        if now.seed is not None:
            was["seed"], new["seed"] = self.seed, now.seed
        names = dict.fromkeys([*was, *new])
        told = ((name, _in_words(was.get(name)), _in_words(new.get(name))) for name in names)
        return [words.format(name=name, before=one, after=other) for name, one, other in told if one != other]

    def begun(self, old: RunRecord | None, seed: int | None = None) -> RunRecord:
        """The run record of a run that continues ``old``, or begins. ``seed``: where neither has one."""
        seeds = (self.seed, None if old is None else old.seed, seed)
        return replace(
            self,
            settings=json.loads(json.dumps(self.settings, default=str, sort_keys=True)),
            seed=next((each for each in seeds if each is not None), secrets.randbits(32)),
            version=self.version or __version__,
            created=self.created or _now() if old is None else old.created,
            process={"pid": os.getpid(), "host": platform.node(), "since": _now()},
        )

    def finish(self, figures: Mapping[str, Any], results: int) -> None:
        self.results, self.figures, self.finished = results, dict(figures), _now()

    def write(self, path: str) -> None:
        """When this returns, it is whole and on the disk."""
        with replacing(path) as file:
            file.write(json.dumps(asdict(self), indent=2).encode() + b"\n")
        file.close()

    @classmethod
    def read(cls, path: str) -> RunRecord | None:
        try:
            with open(path, "rb") as file:
                found = json.loads(file.read())
            made = cls(**{each.name: found[each.name] for each in fields(cls) if each.name in found})
            whole = [made.shard[name] for name in _OF_PARTS] if made.shard else []
            whole += [number for number in (made.seed, made.results) if number is not None]
            if not all(isinstance(getattr(made, name), dict) for name in _OBJECTS) or set(map(type, whole)) - {int}:
                raise ValueError("fields of another type")
            return made
        except FileNotFoundError:
            return None
        except OSError as error:
            raise OutputFileError(f"{path} cannot be read: {reason(error)}") from error
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise OutputFileError(
                f"{path}, which says how the results were made, is damaged: `--restart` begins afresh"
            ) from error


def run_identity(
    model: Mapping[str, Any],  # its name, dtype, ... as the user gave them
    layout: RecordLayout,
    base: GenerationSettings,
    dialect: str,
    token_ids: bool,
) -> dict[str, Any]:
    """What results depend on, by the names of the options, so that an error can name the one that differs."""
    found: dict[str, Any] = {
        **model,
        "dialect": dialect,
        "prompt_field": layout.prompt_field,
        "template": None if layout.template is None else layout.template.text,
        "chat": layout.chat or None,
        "system": layout.system,
        "line_settings": layout.line_settings,
        "keep": list(layout.keep) or None,
        "token_ids": token_ids or None,
        "logprobs": base.logprobs,
        "adapter": base.adapter,
        **base.options,
        **base.prompt_options,
        **({} if base.grammar is None else {base.grammar.option: base.grammar.text}),
    }
    return {name: value for name, value in found.items() if value is not None}


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {f"{prefix}{name}": value}
    return flat


def _in_words(value: Any) -> str:
    """None is the same as not set: old run records lack options that the library has got since."""
    return "not set" if value is None else json.dumps(value, default=str, sort_keys=True)
