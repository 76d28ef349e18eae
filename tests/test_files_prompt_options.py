"""Chats with tools and template options, and long prompts, in files: by line, by flag, and in OpenAI's requests."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support_chats import ASKED, BEGUN, NO_THINKING, NO_THOUGHT, WEATHER, chat_tokenizer, warned
from support_families import build

from hf_batchllm import BatchGenerator, run_file
from hf_batchllm.cli import main
from hf_batchllm.errors import RunChangedError
from hf_batchllm.files.settings import SettingError

LONG = "w5 w6 w7 w8 w9 w30 w31 w32"
PARSED = {"function": {"name": "w9", "arguments": {"x": "w8"}}}
CALLED = [*ASKED, {"role": "assistant", "content": None, "tool_calls": [PARSED]}, {"role": "tool", "content": "w50"}]


@pytest.fixture(scope="module")
def model() -> Any:
    made = copy.deepcopy(build("llama"))
    made.config.max_position_embeddings = 40
    return made


@pytest.fixture
def generator(model: Any) -> Iterator[BatchGenerator]:
    with BatchGenerator(model, chat_tokenizer()) as made:
        yield made


@pytest.fixture(scope="module")
def saved(model: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    chat_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def ran(generator: BatchGenerator, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Runs records, and gives the results."""

    def run(*records: dict[str, Any], **settings: Any) -> list[dict[str, Any]]:
        given, wanted = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        given.write_text("".join(f"{json.dumps(record)}\n" for record in records))
        run_file(generator, given, wanted, restart=True, **{"max_new_tokens": 3, "token_ids": True, **settings})
        return [json.loads(line) for line in wanted.read_text().splitlines()]

    return run


def request(**body: Any) -> dict[str, Any]:
    url = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    body = {"messages": ASKED, **body} if url.endswith("chat/completions") else body
    return {"custom_id": json.dumps(body), "method": "POST", "url": url, "body": body}


def test_lines_have_options_of_their_own(ran: Callable[..., Any], generator: BatchGenerator) -> None:
    records: list[dict[str, Any]] = [
        {"messages": ASKED},
        {"messages": BEGUN},
        {"messages": BEGUN, "continue_final_message": False},
        {"messages": ASKED, "chat_template_kwargs": NO_THOUGHT},
        {"messages": ASKED, "tools": [WEATHER]},
        {"messages": ASKED, "tools": json.dumps([WEATHER])},  # as data sets hold them
        {"prompt": LONG, "max_prompt_tokens": 4},
        {"prompt": LONG, "settings": {"max_prompt_tokens": 4, "truncation_side": "right"}},
    ]
    found = ran(*records)
    for record, result in zip(records, found, strict=True):
        options = {**record, **record.get("settings", {})}
        prompt = options.pop("messages", None) or options.pop("prompt")
        options.pop("settings", None)
        options |= {"tools": [WEATHER]} if "tools" in options else {}
        (alone,) = BatchGenerator(generator.model, generator.tokenizer).generate([prompt], max_new_tokens=3, **options)
        assert (result["token_ids"], result["prompt_tokens"]) == (alone.token_ids, len(alone.prompt_token_ids))
    assert len({each["prompt_tokens"] for each in found[:5]}) > 3 and found[4]["token_ids"] == found[5]["token_ids"]


def test_a_line_wins_over_the_run(ran: Callable[..., Any], generator: BatchGenerator, tmp_path: Path) -> None:
    records = [
        {"messages": ASKED},
        {"messages": ASKED, "chat_template_kwargs": {"enable_thinking": True}},
        {"messages": ASKED, "chat_template_kwargs": {"x": 1}},  # of these each name counts by itself
        {"messages": ASKED, "max_prompt_tokens": 5},
    ]
    found = ran(*records, chat_template_kwargs=NO_THOUGHT, max_prompt_tokens=4)
    assert [each["prompt_tokens"] for each in found] == [4, 4, 4, 5]
    whole = generator.tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, return_dict=False, **NO_THOUGHT)
    thinking = generator.tokenizer.apply_chat_template(ASKED, add_generation_prompt=True, return_dict=False)
    ids = [whole[-4:], thinking[-4:], whole[-4:], whole[-5:]]
    assert [each["token_ids"] for each in found] == generator.generate(ids, max_new_tokens=3).token_ids
    with pytest.raises(RunChangedError, match="max_prompt_tokens"):
        run_file(generator, tmp_path / "in.jsonl", tmp_path / "out.jsonl", max_new_tokens=3, token_ids=True)


def test_mistakes_in_a_line_are_the_lines_errors(ran: Callable[..., Any]) -> None:
    found = ran(
        {"messages": ASKED, "enable_thinking": False},
        {"messages": ASKED, "chat_template_kwargs": True},
        {"messages": ASKED, "tools": {"name": "w9"}},
        {"messages": ASKED, "tools": "no json"},
        {"prompt": LONG, "max_prompt_tokens": 0},
        {"prompt": LONG, "truncation_side": "end"},
        {"messages": [*ASKED, {"role": "assistant", "content": "w5", "tool_calls": [PARSED]}]},
        {"messages": ASKED},
    )
    assert "error" not in found.pop()
    why = [each["error"] for each in found]
    assert "line 1: `enable_thinking` goes into `chat_template_kwargs`" in why[0]
    assert "line 2: `chat_template_kwargs` must be a dict" in why[1]
    assert "line 3: `tools` must be a list of tools, not a dict: pass [tool]" in why[2]
    assert "line 4: `tools` is not JSON" in why[3]
    assert "line 5: `max_prompt_tokens` must be at least 1, but is 0" in why[4]
    assert 'line 6: `truncation_side` must be "left"' in why[5]
    assert "line 7: the prompt is a chat that ends with a call of a tool" in why[6]


def test_functions_are_tools_of_a_run(ran: Callable[..., Any], tmp_path: Path) -> None:
    def w9(x: str) -> str:
        """The weather.

        Args:
            x: where
        """
        return x

    with_tool, without = ran({"messages": ASKED}, tools=[w9]), ran({"messages": ASKED})
    assert with_tool[0]["prompt_tokens"] == without[0]["prompt_tokens"] + 2
    with pytest.raises(SettingError, match="`tools` holds the function len, of which"):
        ran({"messages": ASKED}, tools=[len])


def test_lines_beyond_the_context_say_so(generator: BatchGenerator, tmp_path: Path) -> None:
    given = tmp_path / "in.jsonl"
    prompts = [[5], [5] * 50, [6] * 38, [7] * 50]
    given.write_text("".join(f"{json.dumps({'prompt': ids})}\n" for ids in prompts))
    options = {"max_new_tokens": 5, "eos_token_id": 100}
    report, said = warned(run_file, generator, given, tmp_path / "out.jsonl", **options)
    (context,) = said
    assert context.startswith("2 of 4 prompts are longer than the 40 tokens that LlamaForCausalLM was made for")
    assert ": line 2, line 4; the longest has 50 tokens. line 3 has 38 tokens and may grow by 5" in context
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    beyond = [each["prompt_tokens"] + each["new_tokens"] - 1 > 40 for each in found]
    assert beyond[:2] == [False, True] and ["warning" in each for each in found] == beyond
    assert found[1]["warning"] == "prompt and answer have 55 tokens, more than the 40 that the model was made for"
    assert report.beyond_context == sum(beyond) and "longer, with the prompt, than the model was made for" in str(
        report
    )
    cut, said = warned(run_file, generator, given, tmp_path / "cut.jsonl", **options, max_prompt_tokens=36)
    assert said == [
        "3 of 4 prompts have more tokens than `max_prompt_tokens` and were cut (line 2, line 3, line 4; the longest "
        "has 50)"
    ]
    assert not cut.beyond_context and "longer, with" not in str(cut)


def test_flags_of_the_command(saved: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").write_text(f"{json.dumps({'messages': ASKED})}\n{json.dumps({'prompt': LONG})}\n")
    Path("tools.json").write_text(json.dumps([WEATHER]))
    run = ["run", "in.jsonl", "out.jsonl", "--model", saved, "--max-new-tokens", "2", "--restart"]

    def tokens(*arguments: str) -> list[int]:
        assert main([*run, *arguments]) == 0
        return [json.loads(line)["prompt_tokens"] for line in Path("out.jsonl").read_text().splitlines()]

    chat, text = tokens()
    assert tokens("--chat-template-kwargs", '{"enable_thinking": false}') == [chat + 1, text]
    assert tokens("--tools", "tools.json") == [chat + 2, text]
    assert tokens("--max-prompt-tokens", "4", "--truncation-side", "right") == [4, 4]
    assert tokens("--set", 'chat_template_kwargs={"enable_thinking": false}') == [chat + 1, text]
    capsys.readouterr()
    plan = ["plan", "in.jsonl", "--tokenizer", saved, "--json"]
    assert main([*plan, "--tools", "tools.json", "--max-prompt-tokens", "5"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["tokens"] == 10 and "(line 1, line 2; the longest has" in err

    def refused(*arguments: str) -> str:
        assert main([*run, *arguments]) == 2
        return str(capsys.readouterr().err)

    assert "neither JSON nor a file: thinking=0" in refused("--chat-template-kwargs", "thinking=0")
    assert "`chat_template_kwargs` must be a dict" in refused("--chat-template-kwargs", "[]")
    assert "neither JSON nor a file: nowhere.json" in refused("--tools", "nowhere.json")
    assert "`tools` must be a list of tools, not a dict" in refused("--tools", json.dumps(WEATHER))
    assert "`max_prompt_tokens` must be at least 1, but is 0" in refused("--max-prompt-tokens", "0")
    assert "goes into `chat_template_kwargs`" in refused("--set", "enable_thinking=false")


def test_requests_of_openais(ran: Callable[..., Any], generator: BatchGenerator) -> None:
    text = {**CALLED[1], "tool_calls": [{"function": {"name": "w9", "arguments": '{"x": "w8"}'}}]}
    asked: list[tuple[dict[str, Any], Any, dict[str, Any]]] = [
        (request(tools=[WEATHER]), ASKED, {"tools": [WEATHER]}),
        (request(tools=[WEATHER], tool_choice="auto", n=1), ASKED, {"tools": [WEATHER]}),
        (request(tools=[WEATHER], tool_choice="none"), ASKED, {}),
        (request(chat_template_kwargs=NO_THOUGHT), ASKED, {"chat_template_kwargs": NO_THOUGHT}),
        (request(messages=BEGUN), BEGUN, {}),
        (request(messages=BEGUN, add_generation_prompt=False, continue_final_message=True), BEGUN, {}),
        (request(messages=BEGUN, continue_final_message=False), BEGUN, {"continue_final_message": False}),
        (request(messages=BEGUN, add_generation_prompt=True), BEGUN, {"continue_final_message": False}),
        (request(messages=[ASKED[0], text, CALLED[2]]), CALLED, {}),
        (request(prompt=LONG, truncate_prompt_tokens=4), LONG, {"max_prompt_tokens": 4}),
    ]
    found = ran(*(record for record, _, _ in asked), token_ids=False)
    for result, (_, prompt, options) in zip(found, asked, strict=True):
        body = result["response"]["body"]
        assert result["response"]["status_code"] == 200, body
        alone = generator.generate([prompt], max_new_tokens=3, **options)[0]
        choice = body["choices"][0]
        assert (choice["message"]["content"] if "message" in choice else choice["text"]) == alone.text
        assert body["usage"]["prompt_tokens"] == len(alone.prompt_token_ids)


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (request(tools=[WEATHER], tool_choice="required"), "`tool_choice` is not supported: a model cannot be made to"),
        (request(functions=[{}]), "`functions` is not supported: pass `tools`"),
        (request(tools=WEATHER), "`tools` must be a list of tools, not a dict"),
        (
            request(prompt="w5", tools=[WEATHER]),
            "`tools` goes with /v1/chat/completions, whose requests have `messages`",
        ),
        (request(chat_template_kwargs={"tokenize": False}), "has `tokenize`, which is not for templates"),
        (request(add_generation_prompt=False), "`add_generation_prompt` is false, and nothing is continued"),
        (request(add_generation_prompt=True, continue_final_message=True), "contradicts `continue_final_message`"),
        (request(truncate_prompt_tokens=-1), "must be at least 1, but is -1"),
        (request(messages=[{"role": "assistant", "content": None, "tool_calls": ["x"]}]), "without a `function`"),
        (
            request(messages=[{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}]),
            "message 0 holds a call of a tool whose `arguments` are not JSON",
        ),
    ],
)
def test_requests_that_cannot_be_served(ran: Callable[..., Any], record: dict[str, Any], why: str) -> None:
    result, _ = ran(record, request(), token_ids=False)
    assert result["response"]["status_code"] == 400
    assert why in result["response"]["body"]["error"]["message"]


def test_a_table_has_columns_for_them(generator: BatchGenerator, tmp_path: Path) -> None:
    table = tmp_path / "in.csv"
    table.write_text(
        'prompt,chat_template_kwargs,max_prompt_tokens\nw5 w6 w7,"{""enable_thinking"": false}",\nw5 w6 w7,,2\n'
    )
    run_file(generator, table, tmp_path / "out.jsonl", chat=True, max_new_tokens=2)
    first, second = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    (whole,) = generator.generate(
        [[{"role": "user", "content": "w5 w6 w7"}]], max_new_tokens=2, chat_template_kwargs=NO_THOUGHT
    )
    assert (first["prompt_tokens"], second["prompt_tokens"]) == (len(whole.prompt_token_ids), 2)
    assert NO_THINKING in whole.prompt_token_ids
