"""What single lines of a file say, and what comes of it: their error, and no harm to the other lines."""

from __future__ import annotations

import copy
import json
import re
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
from support_adapters import build as adapted
from support_families import build
from support_file_lines import SETTINGS, answered, reported, request, results, write_lines
from support_file_lines import generator as generator  # a fixture
from support_word_tokenizer import word_tokenizer

from hf_batchllm import BatchGenerator, BatchLLMError, FileReport, run_file
from hf_batchllm.errors import FilesError, InputFileError, OutputFileError, RunChangedError
from hf_batchllm.inputs.other_names import FROM_ELSEWHERE

pytestmark = pytest.mark.filterwarnings("ignore:what was in")
CHAT = [{"role": "user", "content": "w5"}]
DATA_HINT = " (if `n` is a field of your own data: --no-line-settings)"
GOOD = {"prompt": "w5 w6"}

# -- errors of their line ----------------------------------------------------------------------------------------------

OUT_OF_RANGE: list[tuple[dict[str, Any], str]] = [
    ({"top_p": 3}, "`top_p` is 3: it is a probability, from 0 to 1"),
    ({"min_p": -0.5}, "`min_p` is -0.5: it is a probability"),
    ({"top_k": -2}, "`top_k` must be at least 0 (0 for none), but is -2"),
    ({"repetition_penalty": 0}, "`repetition_penalty` must be a float above 0, such as 1.2, not 0"),
    *(
        ({name: 10**9}, f"`{name}` must be at most 1,000 (0 for none), but is 1,000,000,000")
        for name in ("no_repeat_ngram_size", "encoder_no_repeat_ngram_size")
    ),
]

BAD: list[tuple[Any, str]] = [  # (what stands beside a prompt, or the line; its error)
    ({"exponential_decay_length_penalty": [1, 1.5]}, "settings that cannot be used"),  # there is no EOS
    (
        {"exponential_decay_length_penalty": [1, 1.5], "eos_token_id": [7, 6000]},
        "`eos_token_id` has token 6000, outside the model's vocabulary",
    ),
    ({"forced_eos_token_id": [6, 6000]}, "`forced_eos_token_id` has token 6000, outside the model's vocabulary"),
    ({"forced_bos_token_id": 6000}, "`forced_bos_token_id` has token 6000, outside the model's vocabulary"),
    *(
        ({name: "x"}, f"`{name}` is not the name of a setting; did you mean `{meant}`?")
        for name, meant in {
            **dict.fromkeys(("adaptor", "adapters", "Adapter"), "adapter"),
            "temprature": "temperature",
            "chat_template_kwarg": "chat_template_kwargs",
            "max_prompt_token": "max_prompt_tokens",
        }.items()
    ),
    *(
        ({name: "x"}, f"`{name}` {FROM_ELSEWHERE[name]}")
        for name in (
            *("lora_request", "guided_json", "use_tqdm", "response_format", "best_of", "bad_words", "repeat_penalty"),
        )
    ),
    ({"lora-request": "x"}, "is called `adapter` here"),
    ({"sampling_params": "x"}, "is called `settings` here"),
    *(
        (line.format(number), f"`{name}` must be a number, not {number}")
        for number in ("NaN", "Infinity", "-Infinity")
        for name, line in {
            "temperature": '{{"prompt": "w5", "temperature": {}}}',
            "top_p": '{{"prompt": "w5", "settings": {{"top_p": {}}}}}',
            "sequence_bias": '{{"prompt": "w5", "sequence_bias": [[[5], {}]]}}',
        }.items()
    ),
    *(({"do_sample": True, **given}, f": {why}") for given, why in OUT_OF_RANGE),
    ({"n": 2}, ": `n` is 2, and greedy decoding"),
    ({"n": 2}, DATA_HINT),
    ({"n": "a"}, f": `n` must be a whole number, not 'a'{DATA_HINT}"),
    ({"num_return_sequences": 2}, "`num_return_sequences` is 2"),
    ('{"promt": "w5"}', "has no `prompt` and no `messages` (it has promt)"),
    (json.dumps({"message": CHAT}), "has no `prompt` and no `messages` (it has message)"),
    ('{"Prompt": "w5"}', "has no `prompt` and no `messages` (it has Prompt)"),
]


def test_errors_of_their_line(tmp_path: Path, generator: BatchGenerator) -> None:
    """Some of them transformers has no words for, or would take all memory."""
    lines = [line if isinstance(line, str) else {"prompt": "w5", **line} for line, _ in BAD]
    usual = ("id", "label", "text", "model", "config", "sample", "params", "documents", "adapted", "timeout", "device")
    data = [{**GOOD, **dict.fromkeys(usual, "x")}, '{"prompt": "w5", "score_of_mine": NaN}']  # usual names of data
    report, (*bad, first, second) = reported(generator, tmp_path, [*lines, *data])
    for place, ((_, why), found) in enumerate(zip(BAD, bad, strict=True), 1):
        assert why in found["error"] and found["error"].startswith(f"line {place}: "), found
    assert first["new_tokens"] == second["new_tokens"] == 4
    assert report.errors == len(BAD)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        *(
            (f'{{"prompt": "w5", "temperature": {number}}}', f"`temperature` must be a number, not {number}")
            for number in ("NaN", "Infinity", "-Infinity")
        ),
        ('{"prompt": "w5", "top_p": 3}', "`top_p` is 3: it is a probability"),
        ('{"prompt": "w5", "n": 2, "temperature": 0}', "`n` is 2"),
        ('{"prompt": "w5", "n": 2, "temperature": 0}', "a `temperature` above 0"),
        ('{"prompt": "w5", "logit_bias": {"6000": 1}}', "`logit_bias` has token 6000"),
    ],
)
def test_errors_of_requests_are_in_their_words(body: str, said: str, tmp_path: Path, generator: BatchGenerator) -> None:
    line = f'{{"custom_id": "a", "url": "/v1/completions", "body": {body}}}'
    (refused,) = answered(generator, tmp_path, [line])
    assert said in refused["response"]["body"]["error"]["message"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        *(({"do_sample": True, **given}, re.escape(why)) for given, why in OUT_OF_RANGE),
        ({"temperature": float("nan")}, "`temperature` must be a number"),
        ({"temperature": float("inf")}, "`temperature` must be a number"),
        ({"on_error": "skip"}, "`on_error` must be"),
        ({"limit": 0}, "`limit` must be"),
        ({"limit": -1}, "`limit` must be"),
        ({"limit": "5"}, "`limit` must be"),
        ({"window_bytes": "1MiB"}, "`window_bytes` must be"),
        ({"generation_config": {"max_new_tokens": 3}}, "`generation_config` must be"),
        ({"prompt_field": "question"}, "has no field 'question'"),
        ({"prompt_field": "promt"}, r"has no field 'promt' \(it has prompt\)"),
        ({"template": "{question}"}, "has no field 'question'"),
        ({"keep": "question"}, "have no such field"),
    ],
)
def test_arguments_that_are_wrong_are_found_before_anything_runs(
    given: dict[str, Any], said: str, tmp_path: Path, generator: BatchGenerator
) -> None:
    with pytest.raises(BatchLLMError, match=said):
        answered(generator, tmp_path, [{"prompt": "w5"}], **given)
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("first", ['[{"prompt": "w5"}]', "no json", "7", '{"custom_id": "x"}'])
def test_a_bad_first_line(first: str, generator: BatchGenerator, tmp_path: Path) -> None:
    report, lines = reported(generator, tmp_path, [first, GOOD, GOOD])
    assert ["error" in line for line in lines] == [True, False, False]
    assert "1 of 3 results is an error: see `error`" in str(report)


@pytest.mark.parametrize(
    "data",
    [
        b'{\n  "prompt": "w5"\n}\n' * 2,
        b'[\n  {"prompt": "w5"},\n  {"prompt": "w6"}\n]\n',
        b'[{"prompt": "w5"}, {"prompt": "w6"}]\n',
        b"\x1f\x8b\x08\x00",
        '{"prompt": "w5"}\n'.encode("utf-16"),
        b"PAR1\x15\x04\n\xff\n" * 20,
        b"no json",
    ],
)
def test_a_file_of_another_kind_is_refused_as_a_whole(data: bytes, generator: BatchGenerator, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(data)
    with pytest.raises(InputFileError, match=r"in.jsonl is no file of JSON lines \(line 1.*jq.*zcat.*--format"):
        run_file(generator, tmp_path / "in.jsonl", tmp_path / "out.jsonl", **SETTINGS)
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    "first",
    [
        "no json",
        '{"url": "/v1/completions", "body": {"prompt": "w5"}}',
        '{"custom_id": "x"}',
        '{"custom_id": "x", "url": "/v1"}',
    ],
)
def test_a_bad_first_request_of_a_batch(first: str, generator: BatchGenerator, tmp_path: Path) -> None:
    lines = [first, request(GOOD)]
    report, found = reported(generator, tmp_path, lines)
    assert [line["response"]["status_code"] for line in found] == [400, 200]
    assert report.errors == 1
    assert str(report).endswith("1 of 2 results is an error: see `response.body.error`")
    again, _ = reported(generator, tmp_path, lines)
    assert again.errors == 1 and "complete already, 2 results" in str(again)


def test_a_prompt_that_all_lines_lack_comes_before_their_settings(tmp_path: Path, generator: BatchGenerator) -> None:
    lines: list[dict[str, Any]] = [{"question": "w5"}] * 5 + [{"question": "w5", "max_new_tokens": 0}]
    with pytest.raises(InputFileError, match=r"\(it has question\): name its field with --prompt-field"):
        answered(generator, tmp_path, lines)


def test_a_line_whose_scores_are_no_numbers(generator: BatchGenerator, tmp_path: Path) -> None:
    """Only the middle of the call shows it. All other lines get what they get without it."""
    others = [{"prompt": f"w{place} w7", "temperature": 1, "seed": place} for place in range(1, 8)]
    expected = answered(generator, tmp_path, others)
    bad = {"prompt": "w5", "temperature": 1, "guidance_scale": 1e308}
    report, lines = reported(generator, tmp_path, [*others[:3], bad, *others[3:]], restart=True)
    assert "there is nothing to draw from" in lines.pop(3)["error"]
    assert [line["text"] for line in lines] == [line["text"] for line in expected]
    assert report.errors == 1 and report.written == 8
    for given, settings in (([*others, bad], {"on_error": "raise"}), ([bad] * 40, {})):
        # Of nothing but such lines the model is to blame, and an error for each of a million lines helps nobody.
        with pytest.raises(RuntimeError, match="nothing to draw from"):
            answered(generator, tmp_path, given, restart=True, **settings)


# -- fields that are data, or settings ---------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{"keep": "lora_request"}, {"line_settings": False}])
def test_a_field_that_is_kept_or_not_read_is_data(
    settings: dict[str, Any], tmp_path: Path, generator: BatchGenerator
) -> None:
    (found,) = answered(generator, tmp_path, [{"prompt": "w5", "lora_request": "x", "adaptor": None}], **settings)
    assert found["new_tokens"] == 4 and found.get("lora_request") == ("x" if "keep" in settings else None)


def test_numbers_beyond_all_floats_come_out_as_null(tmp_path: Path, generator: BatchGenerator) -> None:
    line = '{"prompt": "w5", "id": 1e999, "mine": [{"x": -1e999, "y": "\\ud800"}]}'
    answered(generator, tmp_path, [line], keep="mine")
    found = json.loads((tmp_path / "out.jsonl").read_text(), parse_constant=pytest.fail)
    assert found["id"] is None and found["mine"] == [{"x": None, "y": "\ud800"}]


def test_a_line_with_many_log_probabilities_costs_the_others_nothing(
    tmp_path: Path, generator: BatchGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int | None] = []
    stream = generator.stream

    def watched(*given: Any, **options: Any) -> Any:
        asked.append(options.get("logprobs"))
        return stream(*given, **options)

    monkeypatch.setattr(generator, "stream", watched)
    found = answered(generator, tmp_path, [{"prompt": "w5", "logprobs": count} for count in (0, 2, 90, 1)])
    assert sorted(count or 0 for count in asked) == [2, 90]
    assert [len(each["logprobs"][0].get("top", [])) for each in found] == [0, 2, 90, 1]


def test_adapters_and_what_the_model_says_itself(tmp_path: Path) -> None:
    with BatchGenerator(copy.deepcopy(adapted("lora")), word_tokenizer(97)) as gen:
        name = next(iter(gen.model.peft_config))
        own = {"prompt": "w5", "adapter": name}
        found = answered(gen, tmp_path, [own, {**own, "num_return_sequences": 2, "do_sample": True}])
        assert [each["adapter"] for each in found] == [name, name]
        lines = [{"prompt": "w5"}]
        assert answered(gen, tmp_path, lines, restart=True) == answered(gen, tmp_path, lines)
        config = gen.model.generation_config
        config.repetition_penalty = 1.5
        with pytest.raises(RunChangedError, match=r"generation_config.repetition_penalty was not set and is 1.5"):
            answered(gen, tmp_path, lines)
        config.repetition_penalty = None
        answered(gen, tmp_path, lines)
        before = gen.model.active_adapters
        gen.model.set_adapter(next(name for name in gen.model.peft_config if name not in before))
        with pytest.raises(RunChangedError, match="active_adapters was"):
            answered(gen, tmp_path, lines)


# -- what is warned of -------------------------------------------------------------------------------------------------

TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    ("lines", "settings", "said", "unsaid"),
    [
        (
            [{"messages": CHAT, "tools": TOOLS}, {"prompt": "w5", "tools": TOOLS}],
            {},
            "`tools` is for chats, and line 2 is no chat: no effect there",
            "",
        ),
        (
            [{"prompt": "w5"}, {"messages": CHAT, "chat_template_kwargs": {"enable_thinkin": False}}],
            {},
            "`enable_thinkin` in the chat_template_kwargs of line 2 has no effect",
            "",
        ),
        ([{"messages": CHAT}, {"prompt": "w5"}], {"tools": TOOLS}, "", "is for chats"),  # options for all lines
        (["no json", {"prompt": "w5"}, {"prompt": ""}], {}, "the prompt of line 3 is an empty string", ""),
    ],
)
def test_warnings_name_their_lines(
    lines: list[Any], settings: dict[str, Any], said: str, unsaid: str, tmp_path: Path
) -> None:
    made = BatchGenerator(build("llama"), word_tokenizer(97, template=True, bos=True))
    with made, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        answered(made, tmp_path, lines, **settings)
    told = "\n".join(str(each.message) for each in warned)
    assert said in told and not (unsaid and unsaid in told)


# -- runs and their reports --------------------------------------------------------------------------------------------


def test_a_corrected_line_runs_with_retry_errors(tmp_path: Path, generator: BatchGenerator) -> None:
    lines: list[dict[str, Any]] = [{"prompt": f"w{place}", "temperature": 1.0} for place in range(3, 9)]
    right = dict(lines[2])
    lines[2] = {"promt": "w5"}
    assert "error" in answered(generator, tmp_path, lines)[2]
    lines[2] = right
    with pytest.raises(RunChangedError, match=r"has an error for .*line 3.*`--retry-errors` runs"):
        answered(generator, tmp_path, lines)
    report, found = reported(generator, tmp_path, lines, retry_errors=True)
    assert (report.before, report.written, report.errors) == (5, 1, 0)
    (tmp_path / "once").mkdir()
    assert found == answered(generator, tmp_path / "once", lines)
    with pytest.raises(RunChangedError, match=r"has a result for .*line 2"):
        answered(generator, tmp_path, [lines[0], {"prompt": "w9"}, *lines[2:]], retry_errors=True)


@pytest.mark.parametrize("target", ["out.jsonl", "out.csv"])
def test_errors_are_counted_among_the_records_asked_for(target: str, tmp_path: Path, generator: BatchGenerator) -> None:
    source = write_lines(tmp_path / "in.jsonl", [{"prompt": "w5"}, {"prompt": "w6"}, {"prompt": None}])
    for limit, errors in ((3, 1), (2, 0)) * 2:
        assert run_file(generator, source, tmp_path / target, limit=limit, **SETTINGS).errors == errors


def test_an_input_without_records(tmp_path: Path, generator: BatchGenerator) -> None:
    report, found = reported(generator, tmp_path, [""])
    assert not found and "the input has no records" in str(report)


def test_renamed_results_need_their_record(tmp_path: Path, generator: BatchGenerator) -> None:
    answered(generator, tmp_path, [GOOD])
    (tmp_path / "out.jsonl").rename(tmp_path / "new.jsonl")
    with pytest.raises(OutputFileError, match=r"If you renamed the results, rename their \.run\.json, too"):
        run_file(generator, tmp_path / "in.jsonl", tmp_path / "new.jsonl", **SETTINGS)


def test_seconds_are_those_of_the_whole_run_without_loading(
    tmp_path: Path, generator: BatchGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokenizing, and all else beside the model, counts."""
    tokenizer = generator.tokenizer
    real = type(tokenizer).__call__

    def slow(self: Any, *given: Any, **named: Any) -> Any:
        time.sleep(0.3)
        return real(self, *given, **named)

    monkeypatch.setattr(type(tokenizer), "__call__", slow)
    began = time.perf_counter()
    report, _ = reported(generator, tmp_path, [GOOD])
    assert 0.3 <= report.seconds <= time.perf_counter() - began and report.loading_seconds == 0


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
    one = FileReport("o", records=1, written=1, errors=1)
    assert str(one) == "o: 1 result\n1 of 1 results is an error: see `error`"
    assert "errors_in" not in report.figures()


@pytest.mark.parametrize("window_bytes", [256 << 20, 1200], ids=["one window", "several windows"])
def test_the_bar_of_a_resumed_file_counts_from_what_is_done(
    tmp_path: Path, generator: BatchGenerator, capsys: pytest.CaptureFixture[str], window_bytes: int
) -> None:
    """It is one for all calls."""
    lines = [{"prompt": f"w{3 + number} w5 w6", "max_new_tokens": 2 + number % 2} for number in range(12)]
    lines.append({"prompt": None})
    answered(generator, tmp_path, lines, limit=5)
    assert not capsys.readouterr().err
    answered(generator, tmp_path, lines, progress=True, window_bytes=window_bytes)
    drawn = [line for line in capsys.readouterr().err.replace("\n", "\r").split("\r") if line.strip()]
    assert "5 of 13 done before" in drawn[0] and drawn[0].startswith(" 38%")
    assert drawn[-1].startswith("100%") and drawn[-1].rstrip().endswith("13 / 13 done (5 before)")


# -- plain text --------------------------------------------------------------------------------------------------------


def test_plain_text_is_a_prompt_on_each_line(generator: BatchGenerator, tmp_path: Path) -> None:
    text = b'\xef\xbb\xbfw5 w6\r\n\n  w7 w8 \n \n[{"role": "user", "content": "w5"}]\nw9'
    prompts = ["w5 w6", "  w7 w8 ", '[{"role": "user", "content": "w5"}]', "w9"]
    for name, format in (("in.txt", None), ("copy.dat", "txt")):
        (tmp_path / name).write_bytes(text)
        report = run_file(generator, tmp_path / name, tmp_path / f"{name}.jsonl", format=format, **SETTINGS)
        assert report.errors == 0 and report.written == 4
        for prompt, line in zip(prompts, results(tmp_path / f"{name}.jsonl"), strict=True):
            assert line["text"] == generator.generate(prompt, max_new_tokens=4)[0].text


@pytest.mark.parametrize(
    ("data", "target", "error", "said"),
    [
        (b"w5\n", "out.txt", OutputFileError, "does not say what it is"),
        (b"\x1f\x8b\x08", "out.jsonl", InputFileError, "compressed file is unpacked first"),
        (b"w5\nw6 \xff\n", "out.jsonl", InputFileError, "line 2: is not UTF-8: byte 0xff at byte 4"),
    ],
)
def test_where_plain_text_cannot_be(
    data: bytes, target: str, error: type[FilesError], said: str, generator: BatchGenerator, tmp_path: Path
) -> None:
    (tmp_path / "in.txt").write_bytes(data)
    with pytest.raises(error, match=said):
        run_file(generator, tmp_path / "in.txt", tmp_path / target, **SETTINGS)
