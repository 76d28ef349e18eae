"""One bad line never refuses a batch; plain text is a file of prompts; a report says where errors are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support_families import build
from support_word_tokenizer import word_tokenizer

from hf_batchllm import BatchGenerator, FileReport, run_file
from hf_batchllm.errors import InputFileError, OutputFileError

GOOD = {"prompt": "w5 w6"}


@pytest.fixture(scope="module")
def generator() -> BatchGenerator:
    return BatchGenerator(build("llama"), word_tokenizer())


def answered(generator: BatchGenerator, path: Path, **options: Any) -> tuple[FileReport, list[dict[str, Any]]]:
    target = path.parent / "out.jsonl"
    report = run_file(generator, path, target, max_new_tokens=2, **options)
    return report, [json.loads(line) for line in target.read_text().splitlines()]


def request(name: str | None = "a") -> str:
    made = {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {"prompt": "w5 w6"}}
    return json.dumps({field: value for field, value in made.items() if value is not None})


@pytest.mark.parametrize("first", ['[{"prompt": "w5"}]', "no json", "{", "7", '{"custom_id": "x"}'])
def test_a_bad_first_line(first: str, generator: BatchGenerator, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(f"{first}\n{json.dumps(GOOD)}\n{json.dumps(GOOD)}\n")
    if first == "{":
        with pytest.raises(InputFileError, match="objects over several lines"):  # nobody could tell
            answered(generator, tmp_path / "in.jsonl")
        return
    report, lines = answered(generator, tmp_path / "in.jsonl")
    assert ["error" in line for line in lines] == [True, False, False]
    assert "1 of 3 results is an error: see `error`" in str(report)


@pytest.mark.parametrize("first", ["no json", request(None), '{"custom_id": "x"}', '{"custom_id": "x", "url": "/v1"}'])
def test_a_bad_first_request_of_a_batch(first: str, generator: BatchGenerator, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(f"{first}\n{request()}\n")
    report, lines = answered(generator, tmp_path / "in.jsonl")
    assert [line["response"]["status_code"] for line in lines] == [400, 200]
    assert report.errors == 1
    assert str(report).endswith("1 of 2 results is an error: see `response.body.error`")
    again = run_file(generator, tmp_path / "in.jsonl", tmp_path / "out.jsonl", max_new_tokens=2)
    assert again.errors == 1 and "complete already, 2 results" in str(again)


def test_a_line_whose_scores_are_no_numbers(generator: BatchGenerator, tmp_path: Path) -> None:
    """Only the middle of the call shows it. All other lines get what they get without it."""
    others = [{"prompt": f"w{place} w7", "temperature": 1, "seed": place} for place in range(1, 8)]
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in others))
    _, expected = answered(generator, path)
    bad = {"prompt": "w5", "temperature": 1, "guidance_scale": 1e308}
    path.write_text("".join(json.dumps(line) + "\n" for line in [*others[:3], bad, *others[3:]]))
    report, lines = answered(generator, path, restart=True)
    assert "there is nothing to draw from" in lines.pop(3)["error"]
    assert [line["text"] for line in lines] == [line["text"] for line in expected]
    assert report.errors == 1 and report.written == 8
    with pytest.raises(RuntimeError, match="nothing to draw from"):
        answered(generator, path, restart=True, on_error="raise")


def test_a_run_of_nothing_but_such_lines_is_given_up(generator: BatchGenerator, tmp_path: Path) -> None:
    """The model is to blame then, and an error for each of a million lines helps nobody."""
    bad = {"prompt": "w5", "temperature": 1, "guidance_scale": 1e308}
    (tmp_path / "in.jsonl").write_text((json.dumps(bad) + "\n") * 40)
    with pytest.raises(RuntimeError, match="nothing to draw from"):
        answered(generator, tmp_path / "in.jsonl")


def test_plain_text_is_a_prompt_on_each_line(generator: BatchGenerator, tmp_path: Path) -> None:
    text = b'\xef\xbb\xbfw5 w6\r\n\n  w7 w8 \n \nw5 \xff\n[{"role": "user", "content": "w5"}]\nw9'
    (tmp_path / "in.txt").write_bytes(text)
    report, lines = answered(generator, tmp_path / "in.txt")
    prompts = ["w5 w6", "  w7 w8 ", None, '[{"role": "user", "content": "w5"}]', "w9"]
    for prompt, line in zip(prompts, lines, strict=True):
        if prompt is None:
            assert line["error"] == "line 5: is not UTF-8: byte 0xff at byte 4"
        else:
            assert line["text"] == generator.generate(prompt, max_new_tokens=2)[0].text
    assert report.errors == 1
    (tmp_path / "copy.dat").write_bytes(text)
    other = run_file(generator, tmp_path / "copy.dat", tmp_path / "other.jsonl", format="txt", max_new_tokens=2)
    assert other.written == 5


def test_plain_text_is_no_output(generator: BatchGenerator, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("w5\n")
    with pytest.raises(OutputFileError, match="may have several lines"):
        run_file(generator, tmp_path / "in.txt", tmp_path / "out.txt", max_new_tokens=1)
    (tmp_path / "packed.txt").write_bytes(b"\x1f\x8b\x08")
    with pytest.raises(InputFileError, match="is compressed"):
        run_file(generator, tmp_path / "packed.txt", tmp_path / "out.jsonl", max_new_tokens=1)


def test_what_a_report_says() -> None:
    counts = {"prompt_tokens": 657, "computed_tokens": 237, "new_tokens": 18, "seconds": 1.4}
    report = FileReport("out.jsonl", records=6, written=6, **counts)
    assert str(report) == "out.jsonl: 6 results in 1.4 s · 657 prompt tokens (64 % shared) · 18 new (13/s)"
    report = FileReport("-", records=9, before=1, written=6, errors=2, **counts)
    assert str(report).splitlines() == [
        "stdout: 6 results in 1.4 s · 657 prompt tokens (64 % shared) · 18 new (13/s)",
        "1 result was there before",
        "2 are missing: the same command continues",
        "2 of 7 results are errors: see `error`",
    ]
    assert (
        str(FileReport("o", records=1, written=1, errors=1)) == "o: 1 result\n1 of 1 results is an error: see `error`"
    )
    assert "errors_in" not in report.figures()
