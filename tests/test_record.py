"""The record of answers that two trees are compared by: it finds what differs, and passes over last bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from record import compare, record


def test_a_record_is_equal_to_itself_and_to_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = tmp_path / "before.jsonl", tmp_path / "after.jsonl"
    record(4, before)
    assert compare([before, before]) == 0 and capsys.readouterr().out == "4 cases, equal\n"
    lines: list[dict[str, Any]] = [json.loads(line) for line in before.read_text().splitlines()]
    changed = next(line for line in lines if "rows" in line)
    changed["rows"][0][0]["token_ids"][-1] += 1
    after.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert compare([before, after]) == 1
    assert f"case {changed['case']} ({changed['family']}, {changed['kind']}): tokens" in capsys.readouterr().out
    after.write_text("".join(json.dumps(line) + "\n" for line in lines[1:]))
    assert compare([before, after]) == 1


@pytest.mark.parametrize(("moved", "status"), [(1e-9, 0), (1e-3, 1)])
def test_last_bits_are_no_difference(moved: float, status: int, tmp_path: Path) -> None:
    row = {"token_ids": [1, 2], "finish_reason": "length", "score": -1.5}
    for name, score in (("before", -1.5), ("after", -1.5 - moved)):
        line = {"case": 0, "family": "llama", "kind": "beams", "rows": [[row | {"score": score}]]}
        (tmp_path / name).write_text(json.dumps(line) + "\n")
    assert compare([tmp_path / "before", tmp_path / "after"]) == status
