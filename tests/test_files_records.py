"""Plain records: what a line means, what it may say, and what comes back."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from support_accelerated import word_tokenizer
from support_families import build, random_prompts
from support_file_lines import KEY, reported
from transformers import GenerationConfig

from hf_batchllm import BatchGenerator, Generation
from hf_batchllm.files.journal import identify
from hf_batchllm.files.record_engine import LineConfig, RecordEngine, line_config, settings_in_config
from hf_batchllm.files.records import ALL_FIELDS, BadPromptRecord, PromptRecord, RecordLayout, RecordReader
from hf_batchllm.files.results import ResultWriter
from hf_batchllm.files.settings import (
    GenerationSettings,
    SettingError,
    read_assignments,
    read_settings,
    settings_in_record,
)
from hf_batchllm.files.templates import Template, TemplateError, unescaped


def read(
    record: Any, form: RecordLayout | None = None, base: GenerationSettings | None = None, cells: bool = False
) -> Any:
    raw = record if isinstance(record, bytes) else json.dumps(record).encode()
    return RecordReader(
        form, base or GenerationSettings(), cells=cells, where=lambda number: f"line {number + 1}"
    ).read(16, raw)


def good(record: Any, *given: Any, **named: Any) -> PromptRecord:
    prompt_record = read(record, *given, **named)
    assert isinstance(prompt_record, PromptRecord), prompt_record
    return prompt_record


def bad(record: Any, *given: Any, **named: Any) -> str:
    prompt_record = read(record, *given, **named)
    assert isinstance(prompt_record, BadPromptRecord)
    return str(prompt_record)


@pytest.fixture(scope="module")
def generator() -> Any:
    with BatchGenerator(build("llama"), word_tokenizer()) as made:
        yield made


def test_a_prompt_is_text_or_token_ids_or_a_chat() -> None:
    chat = [{"role": "user", "content": "hello"}]
    assert good({"prompt": "hello"}).prompt == "hello"
    assert good({"prompt": [3, 4]}).prompt == [3, 4]
    assert good({"messages": chat}).prompt == chat
    assert good({"prompt": chat}).prompt == chat
    assert good({"prompt": None, "messages": chat}).prompt == chat
    prompt_record = good({"prompt": "", "id": 7})
    assert (prompt_record.number, prompt_record.prompt, prompt_record.id, prompt_record.has_id) == (16, "", 7, True)
    assert not good({"prompt": "x"}).has_id


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b'{"prompt": "a" "b"}', "line 17, column 16: is not JSON: Expecting ',' delimiter"),
        (b'{"prompt": "a', "line 17, column 12: is not JSON: Unterminated string"),
        (b'{"prompt": "\xff"}', "line 17, byte 13: is not UTF-8: byte 0xff"),
        (b'["a"]', "line 17: is a list: a record is a JSON object"),
        (b"[" * 100_000, "line 17: is JSON that is nested too deeply"),
        (b"{}", "has no `prompt` and no `messages` (it is empty)"),
        (b'{"question": "x"}', "has no `prompt` and no `messages` (it has question): name its field with"),
        (b'{"prompt": "x", "messages": []}', "has both `prompt` and `messages`"),
        (b'{"prompt": 7}', "has an int as its `prompt`"),
        (b'{"prompt": []}', "has an empty list as its `prompt`"),
        (b'{"messages": "x"}', "has a string as its `messages`"),
        (b'{"messages": [{"role": "user"}]}', "is a chat whose message 0 has no 'content'"),
        (b'{"prompt": "x", "max_new_token": 3}', "`max_new_token` is not the name of a setting; did you mean `max_n"),
        (b'{"prompt": "x", "maxNewTokens": 3}', "did you mean `max_new_tokens`?"),
        (b'{"prompt": "x", "temprature": 3}', "did you mean `temperature`?"),
        (b'{"prompt": "x", "settings": {"foo": 1}}', "`foo` is not a setting; settings are max_new_tokens"),
        (b'{"prompt": "x", "settings": {"seed": 1}, "seed": 2}', "`seed` is given twice"),
        (b'{"prompt": "x", "max_tokens": 1, "max_new_tokens": 2}', "contradicts `max_tokens`"),
        (b'{"prompt": "x", "max_tokens": 1.5}', "`max_tokens` must be a whole number, not 1.5"),
        (b'{"prompt": "x", "max_tokens": "5"}', "`max_tokens` must be a whole number, not '5'"),
        (b'{"prompt": "x", "max_tokens": 0}', "`max_tokens` must be at least 1, but is 0"),
        (b'{"prompt": "x", "temperature": true}', "`temperature` must be a number, not True"),
        (b'{"prompt": "x", "temperature": -1}', "`temperature` must be 0 (for the most likely token) or more"),
        (b'{"prompt": "x", "temperature": 0, "do_sample": true}', "is 0, and sampling needs a temperature above 0"),
        (b'{"prompt": "x", "stop": ["a", 3]}', "`stop` must be a string, or a list of strings"),
        (b'{"prompt": "x", "stop": ""}', "`stop` is '', and an empty string ends nothing"),
        (b'{"prompt": "x", "seed": -1}', "`seed` must be a whole number from 0"),
        (b'{"prompt": "x", "presence_penalty": 1}', "`presence_penalty` is not an option of transformers; see `rep"),
        (b'{"prompt": "x", "max_time": 1}', "`max_time` is not for files"),
        (b'{"prompt": "x", "prompt_logprobs": [1]}', "BatchGenerator.generate (for a field of your own data: --keep p"),
        (b'{"prompt": "x", "top_logprobs": 1}', "`top_logprobs` needs `logprobs`"),
    ],
)
def test_a_line_that_cannot_be_run_says_where_and_why(line: bytes, why: str) -> None:
    said = bad(line)
    assert said.startswith("line 17")
    assert why in said


def test_a_bad_line_keeps_its_id() -> None:
    prompt_record = read({"id": "a", "prompt": "x", "seed": "y"})
    assert isinstance(prompt_record, BadPromptRecord)
    assert (prompt_record.id, prompt_record.has_id, prompt_record.param) == ("a", True, "seed")


def test_settings_stand_beside_the_prompt_or_by_themselves() -> None:
    base = GenerationSettings({"max_new_tokens": 50, "top_p": 0.5})
    beside = {"prompt": "x", "max_tokens": 5, "n": 2, "stop": "\n", "seed": 3, "logprobs": True, "adapter": "a"}
    nested = {"prompt": "x", "settings": {name: value for name, value in beside.items() if name != "prompt"}}
    for record in (beside, nested):
        said = good(record, None, base).settings
        assert said.options == {"max_new_tokens": 5, "top_p": 0.5, "num_return_sequences": 2, "stop_strings": ["\n"]}
        assert (said.seed, said.logprobs, said.adapter) == (3, 0, "a")
    assert good({"prompt": "x"}, None, GenerationSettings(seed=3)).settings.seed is None  # which is the run's
    assert good({"prompt": "x", "max_tokens": None}, None, base).settings.options == base.options
    assert good({"prompt": "x", "logprobs": True, "top_logprobs": 4}).settings.logprobs == 4


def test_what_goes_into_one_call() -> None:
    assert read_settings({"temperature": 0.3, "n": 2}).call_key == GenerationSettings().call_key
    for fields in ({"num_beams": 2}, {"logprobs": True}, {"adapter": "a"}):
        assert read_settings(fields).call_key != GenerationSettings().call_key


def test_a_temperature_says_whether_tokens_are_drawn() -> None:
    hot, cold = (
        GenerationSettings({"temperature": 0.7, "do_sample": True, "top_p": 0.9}),
        read_settings({"temperature": 0}),
    )
    assert read_settings({"temperature": 1}).options == {"temperature": 1.0, "do_sample": True}
    assert cold.options == {"do_sample": False}
    assert read_settings({"temperature": 2, "do_sample": False}).options == {"temperature": 2.0, "do_sample": False}
    assert cold.over(hot).options == {"do_sample": False}  # nothing of the base is left to warn of
    assert hot.over(cold).options == hot.options
    assert read_settings({"temperature": 0.5}, settle=False).options == {"temperature": 0.5}


def test_a_line_wins_by_another_name_too() -> None:
    base = read_settings({"max_new_tokens": 50, "min_new_tokens": 4, "stop": "x"})
    assert read_settings({"max_length": 9}).over(base).options == {
        "max_length": 9,
        "min_new_tokens": 4,
        "stop_strings": ["x"],
    }
    assert read_settings({"stop": []}).over(base).options == {"max_new_tokens": 50, "min_new_tokens": 4}
    config = GenerationConfig(max_new_tokens=7, eos_token_id=[1, 2])
    assert settings_in_config(config).over(base).options == {
        **base.options,
        "max_new_tokens": 7,
        "eos_token_id": [1, 2],
    }


def test_other_fields_are_the_users_own(generator: BatchGenerator) -> None:
    own = {"speed": 3, "steps": 1, "label": "n", "my_temperature": 20, "max_tokens_allowed": 4, "input": "x", "top": 1}
    own |= {
        "constraints": ["short"],
        "assistant": "x",
        "n_tokens": 3,
        "new_tokens": 4,
        "token_ids": [1],
        "prompt_id": 2,
    }
    assert good({"prompt": "x", **own}).settings.options == {}
    record = {"prompt": "x", "n": "three", "seed": "poppy"}
    assert good(record, RecordLayout(line_settings=False)).settings.options == {}
    assert "`n` must be a whole number" in bad(record)
    assert good({"stop": "bus 7"}, RecordLayout(template=Template("{stop}"))).prompt == "bus 7"  # it is the template's
    assert (
        good({"prompt": "x", "seed": 4}, RecordLayout(keep=("seed",))).settings.seed == 4
    )  # kept, and a setting still
    own = {"prompt": "x", "prompt_logprobs": [1]}  # as another server leaves it
    assert good(own, RecordLayout(keep=("prompt_logprobs",))).kept == {"prompt_logprobs": [1]}
    assert "`constraints` is not supported" in line_config(generator, read_settings({"constraints": ["x"]}))


def test_cells_are_text_and_an_empty_one_says_nothing() -> None:
    row = {"prompt": "x", "max_new_tokens": "5", "temperature": "", "do_sample": "False", "stop": '["a", "b"]'}
    assert good(row, cells=True).settings.options == {
        "max_new_tokens": 5,
        "do_sample": False,
        "stop_strings": ["a", "b"],
    }
    gaps = {"prompt": "x", "max_new_tokens": 5.0, "seed": 3.0, "top_p": None}
    said = good(gaps, cells=True).settings
    assert (said.options, said.seed) == ({"max_new_tokens": 5}, 3)
    assert good({"prompt": "x", "stop": " ,"}, cells=True).settings.options == {"stop_strings": [" ,"]}
    assert "`max_new_tokens` must be a whole number, not 'many'" in bad(
        {"prompt": "x", "max_new_tokens": "many"}, cells=True
    )
    assert "has an empty `prompt`" in bad({"prompt": ""}, cells=True)
    chat = [{"role": "user", "content": "hi"}]
    assert good({"messages": json.dumps(chat)}, cells=True).prompt == chat
    assert good({"prompt": "x", "settings": '{"seed": 4}'}, cells=True).settings.seed == 4


def test_a_template_makes_the_prompt() -> None:
    form = RecordLayout(template=Template(unescaped(r"{context}\n\nQ: {question}\nA: {{")))
    assert good({"context": "C", "question": "Q"}, form).prompt == "C\n\nQ: Q\nA: {"
    assert good({"context": 3, "question": [1, "ü"]}, form).prompt == '3\n\nQ: [1, "ü"]\nA: {'
    assert good({"m": {"t": "deep"}}, RecordLayout(template=Template("{m.t}"))).prompt == "deep"
    assert good({"m.t": "flat"}, RecordLayout(template=Template("{m.t}"))).prompt == "flat"
    assert "has no field 'question', which the template names (it has context)" in bad({"context": "C"}, form)
    assert bad({"qustion": "Q", "context": "C"}, form).endswith("(it has qustion, context)")
    gap = {"context": "C", "question": None}
    assert "has nothing in 'question'" in bad(gap, form)
    assert good(gap, form, cells=True).prompt == "C\n\nQ: \nA: {"
    assert "has nothing in 'context'" in bad(dict.fromkeys(gap), form, cells=True)
    for text in ("{a", "{}", "{a:3}", "{a!r}", "none"):
        with pytest.raises(TemplateError, match="the template"):
            Template(text)


def test_chats_are_made_of_prompts() -> None:
    user, system = {"role": "user", "content": "x"}, {"role": "system", "content": "Be brief."}
    assert good({"prompt": "x"}, RecordLayout(chat=True)).prompt == [user]
    assert good({"prompt": "x"}, RecordLayout(system="Be brief.")).prompt == [system, user]
    assert good({"messages": [user]}, RecordLayout(system="Be brief.")).prompt == [system, user]
    own = [{"role": "system", "content": "Own."}, user]
    assert good({"messages": own}, RecordLayout(system="Be brief.")).prompt == own
    assert "which cannot become a chat" in bad({"prompt": [1, 2]}, RecordLayout(chat=True))
    assert good({"q": "x"}, RecordLayout(prompt_field="q")).prompt == "x"
    assert "has no field 'q' (it has prompt)" in bad({"prompt": "x"}, RecordLayout(prompt_field="q"))


def test_settings_on_a_command_line() -> None:
    assert read_assignments(["a=1", "b=[1, 2]", "c=plain", "d-e=null"]) == {
        "a": 1,
        "b": [1, 2],
        "c": "plain",
        "d_e": None,
    }
    with pytest.raises(SettingError, match="takes NAME=VALUE"):
        read_assignments(["a"])
    with pytest.raises(SettingError, match="did you mean `repetition_penalty`"):
        settings_in_record({"repetition_penalti": 1.1})


def generation(text: str = "t", sample: int = 0, **more: Any) -> Generation:
    return Generation(0, sample, text, [5, 6], [1, 2, 3], "stop", **more)


def test_lines_of_the_output() -> None:
    writer = ResultWriter("plain")
    prompt_record = good({"id": "a", "prompt": "x", "label": 3, "text": "old"}, RecordLayout(keep=("label", "text")))
    line = json.loads(writer.result(prompt_record, KEY, [generation()]))
    assert line == {
        "index": 16,
        "id": "a",
        "text": "t",
        "finish_reason": "stop",
        "prompt_tokens": 3,
        "new_tokens": 2,
        "label": 3,
        "input_text": "old",
        "key": KEY,
    }
    assert identify(line) == (16, KEY, False)
    line = json.loads(writer.result(good({"prompt": "x"}), KEY, [generation(), generation("u", 1)]))
    assert line["samples"] == [{"text": text, "finish_reason": "stop", "new_tokens": 2} for text in "tu"]
    assert "id" not in line
    line = json.loads(writer.error(read({"id": 4, "prompt": 7}), KEY))
    assert line == {"index": 16, "id": 4, "error": line["error"], "key": KEY}
    assert identify(line) == (16, KEY, True)
    failed = Generation(0, 0, None, [], [], "error", error="is empty: it has no token ids")
    assert (
        json.loads(writer.result(prompt_record, KEY, [failed]))["error"]
        == "line 17: the prompt is empty: it has no token ids"
    )
    assert identify({"text": "x"}) is None
    odd = good(b'{"prompt": "x", "a": "\\ud800", "b": NaN}', RecordLayout(keep=ALL_FIELDS))
    assert json.loads(writer.result(odd, KEY, [generation()]))["a"] == "\ud800"
    assert b"NaN" not in writer.result(odd, KEY, [generation()])


def test_lines_of_a_file_give_what_generate_gives(generator: BatchGenerator, tmp_path: Any) -> None:
    prompts = random_prompts(random.Random(3), 101, count=4)
    records = [
        {"prompt": prompts[0], "max_new_tokens": 3},
        {"prompt": "w5 w6 w7", "n": 2, "temperature": 1.5, "seed": 9},
        {"prompt": prompts[1], "logprobs": 2},
        {"prompt": prompts[2], "num_return_sequences": 2},
        {"prompt": prompts[2], "settings": {"sequence_bias": [[[4000], 1.0]]}},
        {"prompt": prompts[2], "logprobs": 1, "num_beams": 2},
        {"prompt": prompts[3], "adapter": "judge"},
        {"prompt": [4000]},
    ]
    with_gaps = [line for record in records for line in (record, "")]
    report, lines = reported(generator, tmp_path, with_gaps, token_ids=True)
    assert lines[0]["token_ids"] == generator.generate([prompts[0]], max_new_tokens=3)[0].token_ids
    drawn = generator.generate(
        ["w5 w6 w7"], max_new_tokens=4, do_sample=True, temperature=1.5, num_return_sequences=2, seed=[9]
    )
    assert [sample["text"] for sample in lines[1]["samples"]] == drawn.texts
    told = lines[2]["logprobs"]
    assert [each["token_id"] for each in told] == lines[2]["token_ids"]
    assert all(len(each["top"]) == 2 and each["top"][0]["logprob"] >= each["logprob"] - 1e-6 for each in told)
    assert told[0]["token"] == f"w{told[0]['token_id']}"
    assert lines[3]["error"].startswith("line 7: `num_return_sequences` is 2, and greedy decoding gives one sequence")
    assert "`sequence_bias` has token 4000, outside the model's vocabulary of 101" in lines[4]["error"]
    assert "does not go with `num_beams`" in lines[5]["error"]
    assert "adapter" in lines[6]["error"]
    assert lines[7]["error"].startswith("line 15: the prompt has token id 4000 at position 0, outside the model's")
    assert report.errors == 5


def test_a_model_that_samples_by_itself_gives_several_answers(
    generator: BatchGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "greedy" in line_config(generator, GenerationSettings({"num_return_sequences": 2}))
    monkeypatch.setattr(generator.model.generation_config, "do_sample", True)
    engine = RecordEngine(generator)
    settings = GenerationSettings({"num_return_sequences": 2, "max_new_tokens": 2})
    resolved = engine.resolved(settings)
    assert isinstance(resolved, LineConfig) and resolved.samples == 2
    assert resolved is engine.resolved(GenerationSettings(dict(settings.options)))
    assert len(generator.generate([[5, 6]], [resolved.config])) == 2
