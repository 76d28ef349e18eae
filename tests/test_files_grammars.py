"""Answers of a given form in files: by line, by flag and in OpenAI's requests."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support_grammars import END_OF_BYTES, of_bytes

from hf_batchllm import BatchGenerator, run_file
from hf_batchllm.cli import main
from hf_batchllm.errors import RunChangedError
from hf_batchllm.files.settings import SettingError

MOOD = {
    "type": "object",
    "properties": {"mood": {"enum": ["so", "la"]}},
    "required": ["mood"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
MOODS = ('{"mood":"so"}', '{"mood":"la"}')
SETTINGS: dict[str, Any] = {"max_new_tokens": 20, "eos_token_id": END_OF_BYTES}


@pytest.fixture(scope="module")
def generator() -> Iterator[BatchGenerator]:
    model, tokenizer = of_bytes()
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    with BatchGenerator(model, tokenizer) as made:
        yield made


@pytest.fixture
def ran(generator: BatchGenerator, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Runs records, and gives the results."""

    def run(*records: Any, name: str = "in.jsonl", **settings: Any) -> list[dict[str, Any]]:
        given, wanted = tmp_path / name, tmp_path / "out.jsonl"
        text = records[0] if name.endswith("csv") else "".join(f"{json.dumps(record)}\n" for record in records)
        given.write_text(text)
        run_file(generator, given, wanted, restart=True, **{**SETTINGS, **settings})
        return [json.loads(line) for line in wanted.read_text().splitlines()]

    return run


@pytest.mark.filterwarnings("ignore:what was in")
def test_lines_have_forms_of_their_own(ran: Callable[..., Any], generator: BatchGenerator, tmp_path: Path) -> None:
    asked = [
        ({"schema": MOOD}, MOODS),
        ({"settings": {"schema": json.dumps(MOOD)}}, MOODS),
        ({"regex": "a{3}b"}, ("aaab",)),
        ({"grammar": 'start: "x" | "yz"'}, ("x", "yz")),
        ({"choice": ["left", "right"]}, ("left", "right")),
        ({}, None),
    ]
    found = ran(*({"prompt": f"p{place}", **own} for place, (own, _) in enumerate(asked)))
    for line, (_, allowed) in zip(found, asked, strict=True):
        assert "error" not in line and (allowed is None or line["text"] in allowed)
    (free,) = generator.generate(["p5"], **SETTINGS)
    assert found[-1]["text"] == free.text
    found = ran({"prompt": "p1"}, {"prompt": "p2", "regex": "q"}, choice=["left", "right"])
    assert found[0]["text"] in ("left", "right") and found[1]["text"] == "q", "a line wins over the run"
    table = 'prompt,choice,regex\np1,"[""left""]",\np2,,12?3\n'
    assert [line["text"] for line in ran(table, name="in.csv")] == ["left", found_text(ran, {"prompt": "p2"}, "12?3")]


def found_text(ran: Callable[..., Any], record: dict[str, Any], regex: str) -> str:
    (line,) = ran({**record, "regex": regex})
    text: str = line["text"]
    return text


@pytest.mark.filterwarnings("ignore:what was in")
def test_bad_forms_are_errors_of_their_line(ran: Callable[..., Any], generator: BatchGenerator) -> None:
    bad: list[tuple[dict[str, Any], str]] = [
        ({"schema": "CREATE TABLE t"}, "`schema` is not JSON"),
        ({"schema": "CREATE TABLE t"}, "(if `schema` is a field of your own data: --no-line-settings)"),
        ({"schema": {"type": "strin"}}, "has a `schema` that cannot be used: llguidance says: Invalid type: strin"),
        ({"regex": "(a"}, "has a `regex` that cannot be used: llguidance says: "),
        ({"choice": "left"}, "`choice` must be a list of strings"),
        ({"choice": ["a"], "regex": "a"}, "`choice` contradicts `regex`: an answer has one form"),
        ({"regex": "a", "min_new_tokens": 3}, "has a `min_new_tokens` that does not go with `regex`"),
        ({"regex": "a", "num_beams": 2}, "has a `regex` that does not go with `num_beams`"),
    ]
    *found, good = ran(*({"prompt": "p", **own} for own, _ in bad), {"prompt": "p", "regex": "a"})
    for line, (_, why) in zip(found, bad, strict=True):
        assert why in line["error"], line
    assert good["text"] == "a"
    (data,) = ran({"prompt": "p", "schema": "CREATE TABLE t"}, line_settings=False)
    assert "error" not in data
    with pytest.raises(SettingError, match="`schema` must be a JSON schema"):
        ran({"prompt": "p"}, schema=5)


def request(**body: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": "p"}], "max_tokens": 20, **body}
    return {"custom_id": str(body), "method": "POST", "url": "/v1/chat/completions", "body": body}


def json_schema(**given: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "mood", **given}}


@pytest.mark.filterwarnings("ignore:what was in")
def test_requests_of_openais(ran: Callable[..., Any]) -> None:
    asked: list[tuple[dict[str, Any], tuple[str, ...]]] = [
        ({"response_format": json_schema(schema=MOOD, strict=True)}, MOODS),
        ({"response_format": json_schema(schema=MOOD)}, MOODS),
        ({"guided_json": MOOD}, MOODS),
        ({"guided_choice": ["left", "right"]}, ("left", "right")),
        ({"structured_outputs": {"regex": "ab"}}, ("ab",)),
        ({"response_format": {"type": "text"}, "guided_regex": "ab"}, ("ab",)),
    ]
    *found, any_object = ran(*(request(**own) for own, _ in asked), request(response_format={"type": "json_object"}))
    for line, (_, allowed) in zip(found, asked, strict=True):
        assert line["response"]["body"]["choices"][0]["message"]["content"] in allowed
    assert any_object["response"]["body"]["choices"][0]["message"]["content"].startswith("{")


@pytest.mark.filterwarnings("ignore:what was in")
def test_bad_requests_of_openais(ran: Callable[..., Any]) -> None:
    name = "response_format"
    bad: list[tuple[dict[str, Any], str, str | None]] = [
        ({name: {"type": "xml"}}, "`response_format` is of type 'xml'", name),
        ({name: {"type": "json_schema"}}, "`response_format` has no `json_schema`", name),
        ({name: json_schema(strict=True)}, "`response_format` has no `schema` in its `json_schema`", name),
        ({name: json_schema(schema=MOOD, strict="yes")}, "`response_format` has a `strict` that is 'yes'", name),
        ({name: {"type": "json_object"}, "guided_regex": "a"}, "`guided_regex` contradicts `response_format`", None),
        ({"guided_choice": "a"}, "`guided_choice` must be a list of strings", "guided_choice"),
        ({"structured_outputs": {"xml": 1}}, "`structured_outputs` must have one of json, ", "structured_outputs"),
        ({name: json_schema(schema={"type": "strin"})}, "`response_format` that cannot be used: llguidance says", None),
    ]
    found = ran(*(request(**own) for own, _, _ in bad))
    for line, (_, why, param) in zip(found, bad, strict=True):
        error = line["response"]["body"]["error"]
        assert why in error["message"] and (param is None or error["param"] == param)


def test_a_run_goes_on_with_the_same_form_alone(generator: BatchGenerator, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "p"}\n{"prompt": "q"}\n')
    given = generator, tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    run_file(*given, limit=1, regex="ab?", **SETTINGS)
    with pytest.raises(RunChangedError, match="regex"):
        run_file(*given, regex="ab", **SETTINGS)
    run_file(*given, regex="ab?", **SETTINGS)


def test_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, tokenizer = of_bytes()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "mood.json").write_text(json.dumps(MOOD))
    (tmp_path / "in.jsonl").write_text('{"prompt": "p"}\n')

    def run(*flags: str) -> int:
        files = [str(tmp_path / name) for name in ("in.jsonl", "out.jsonl")]
        more = ("--max-new-tokens", "20", "--set", f"eos_token_id={END_OF_BYTES}", "--restart", "--quiet")
        return int(main(["run", *files, "--model", str(tmp_path / "model"), *more, *flags]))

    def text() -> str:
        found: str = json.loads((tmp_path / "out.jsonl").read_text())["text"]
        return found

    assert run("--schema", str(tmp_path / "mood.json")) == 0 and text() in MOODS
    assert run("--choice", "left", "--choice", "right") == 0 and text() in ("left", "right")
    assert run("--regex", "a", "--choice", "b") == 2 and "`choice` contradicts `regex`" in capsys.readouterr().err
    assert run("--schema", "nowhere.json") == 2
    assert "--schema: it is neither JSON nor a file: nowhere.json" in capsys.readouterr().err
