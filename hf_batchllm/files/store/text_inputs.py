"""Plain text -> one JSON object for each line that is not blank: a prompt on each line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import IO

from ...errors import InputFileError

_NOT_TEXT = (b"PAR1", b"PK\x03\x04", b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh", b"\xff\xfe", b"\xfe\xff")
_MARK = b"\xef\xbb\xbf"  # some editors write it before UTF-8


def text_lines(stream: IO[bytes], path: str) -> Iterator[tuple[bytes, str]]:
    """(a JSON object, or nothing for a blank line; the problem of the line, or ""). Spaces are part of a prompt."""
    for number, raw in enumerate(stream):
        if not number and raw.startswith(_NOT_TEXT):
            raise InputFileError(
                f"{path} is not text (compressed, a spreadsheet, UTF-16?): it must be plain UTF-8 text"
            )
        line = (raw if number else raw.removeprefix(_MARK)).rstrip(b"\r\n")
        if not line.strip():
            yield b"", ""
            continue
        try:
            problem, text = "", line.decode()
        except UnicodeDecodeError as error:
            problem, text = f"is not UTF-8: byte {line[error.start]:#04x} at byte {error.start + 1}", ""
        yield json.dumps({"prompt": text}, ensure_ascii=False).encode(), problem
