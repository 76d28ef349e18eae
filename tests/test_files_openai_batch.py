"""Batch files of OpenAI's kind: requests in, responses out."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from support_accelerated import word_tokenizer
from support_families import build
from support_file_lines import KEY, answered
from support_letter_tokenizers import EOS, letter_tokenizer

from hf_batchllm import BatchGenerator, Generation
from hf_batchllm.files.journal import identify
from hf_batchllm.files.records import (
    OPENAI,
    PLAIN,
    BadPromptRecord,
    PromptRecord,
    RecordReader,
    dialect_of,
    repeated_ids,
)
from hf_batchllm.files.results import ResultWriter, TokenTexts
from hf_batchllm.files.settings import GenerationSettings
from hf_batchllm.files.sources import record_key

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]


def request(url: str = CHAT, custom_id: Any = "a", **body: Any) -> dict[str, Any]:
    source = {"messages": HELLO} if url == CHAT else {"prompt": "hello"}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "m", **source, **body}}


def read(record: Any, base: GenerationSettings | None = None, **more: Any) -> Any:
    raw = record if isinstance(record, bytes) else json.dumps(record).encode()
    reader = RecordReader(
        None, base or GenerationSettings(), dialect=OPENAI, where=lambda number: f"line {number + 1}", **more
    )
    return reader.read(2, raw)


def options(record: Any, base: GenerationSettings | None = None) -> dict[str, Any]:
    prompt_record = read(record, base)
    assert isinstance(prompt_record, PromptRecord), prompt_record
    return dict(prompt_record.settings.options)


def test_the_first_record_says_what_a_file_is() -> None:
    assert dialect_of([json.dumps(request()).encode()]) == OPENAI
    assert dialect_of([b'{"prompt": "x", "custom_id": "a"}']) == PLAIN
    assert dialect_of([b"no json"]) == PLAIN


def test_what_a_request_says() -> None:
    body = {"max_completion_tokens": 9, "temperature": 0.5, "top_p": 0.9, "n": 2, "stop": ["x"], "seed": -1, "top_k": 7}
    silent = {"stream": False, "user": "u", "presence_penalty": 0.0, "tools": [], "response_format": {"type": "text"}}
    prompt_record = read(request(**body, **silent, logprobs=True, top_logprobs=3, logit_bias={"5": -100}))
    assert prompt_record.prompt == HELLO
    assert prompt_record.settings.options == {
        "max_new_tokens": 9,
        "temperature": 0.5,
        "do_sample": True,
        "top_p": 0.9,
        "num_return_sequences": 2,
        "stop_strings": ["x"],
        "top_k": 7,
        "sequence_bias": [[[5], -100.0]],
    }
    assert (prompt_record.settings.seed, prompt_record.settings.logprobs, prompt_record.id) == (2**64 - 1, 3, "a")


def test_what_openai_draws_is_drawn() -> None:
    """Its temperature is 1 where none is said."""
    assert options(request(n=2))["do_sample"]
    assert options(request(top_p=0.5))["do_sample"]
    assert "do_sample" not in options(request(n=1, top_p=1, min_p=0))
    assert options(request(top_k=-1)) == {"top_k": 0}
    assert not options(request(n=2, temperature=0))["do_sample"]
    assert not options(request(n=2), GenerationSettings({"do_sample": False}))["do_sample"]
    assert options(request(), GenerationSettings({"max_new_tokens": 3})) == {"max_new_tokens": 3}


def test_texts_of_a_message_are_joined() -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    assert read(request(messages=[{"role": "user", "content": parts, "name": None}])).prompt == HELLO
    for prompt in ("x", [3, 4]):
        for given in (prompt, [prompt]):
            assert read(request(COMPLETIONS, prompt=given)).prompt == prompt


IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]


@pytest.mark.parametrize(
    ("record", "why", "param"),
    [
        (request("/v1/responses"), "has the url '/v1/responses': served are /v1/chat/completions and", "url"),
        (request("/v1/embeddings"), "has the url '/v1/embeddings'", "url"),
        (request(custom_id=7), "has the `custom_id` 7: it is a string", "custom_id"),
        ({"prompt": "x"}, "has no `custom_id`", "custom_id"),
        ({**request(), "method": "GET"}, "has the method 'GET'", "method"),
        ({**request(), "body": "x"}, "has no `body`", "body"),
        ({**request(), "max_tokens": 3}, "has `max_tokens` beside custom_id", "max_tokens"),
        (request(messages=IMAGE), "message 0 holds a part of type 'image_url'; only text is supported", "messages"),
        (request(messages=[]), "`messages` must be a list of messages", "messages"),
        (request(messages=[{"role": "user"}]), "has no 'content'", "messages"),
        (request(messages=None), "`messages` are missing", "messages"),
        (request(COMPLETIONS, prompt=["a", "b"]), "`prompt` holds 2 prompts: give each a line", "prompt"),
        (request(COMPLETIONS, messages=HELLO), "`messages` does not go with /v1/completions", "messages"),
        (request(tools=[5]), "`tools` holds an int; a tool is a dict", "tools"),
        (
            request(response_format={"type": "xml"}),
            "`response_format` is of type 'xml': it is text, json_object or json_schema",
            "response_format",
        ),
        (request(stream=True), "`stream` is not supported: results go to a file", "stream"),
        (request(audio={}), "`audio` is not supported", "audio"),
        (request(presence_penalty=0.5), "`presence_penalty` is not an option of transformers", "presence_penalty"),
        (request(max_token=5), "`max_token` is not supported; did you mean `max_tokens`?", "max_token"),
        (request(max_time=5), "`max_time` is not for files: interrupt a run", "max_time"),
        (request(prompt_logprobs=5), "`prompt_logprobs` is not for files", "prompt_logprobs"),
        (request(foo=5), "`foo` is not supported: leave it out", "foo"),
        (request(top_logprobs=5), "`top_logprobs` needs `logprobs`", "top_logprobs"),
        (request(logprobs=True, top_logprobs=21), "`top_logprobs` is 21: at most 20", "top_logprobs"),
        (request(logprobs=5), "`logprobs` must be true or false", "logprobs"),
        (request(COMPLETIONS, logprobs=True), "`logprobs` must be a whole number", "logprobs"),
        (request(logit_bias={"a": 1}), "`logit_bias` maps 'a' to 1", "logit_bias"),
        (request(logit_bias={"1": 200}), "from -100 to 100", "logit_bias"),
        (request(temperature="hot"), "`temperature` must be a number", "temperature"),
        (request(max_tokens=0), "`max_tokens` must be at least 1", "max_tokens"),
        (request(best_of=3), "`best_of` is not an option here", "best_of"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(record: Any, why: str, param: str) -> None:
    prompt_record = read(record)
    assert isinstance(prompt_record, BadPromptRecord)
    assert str(prompt_record).startswith("line 3: ")
    assert why in str(prompt_record)
    line = json.loads(ResultWriter(OPENAI).error(prompt_record, KEY))
    assert line["custom_id"] == record.get("custom_id")
    assert line["response"]["status_code"] == 400
    told = line["response"]["body"]["error"]
    assert told == {"message": str(prompt_record), "type": "invalid_request_error", "param": param, "code": None}
    assert line["error"] is None
    assert identify(line) == (2, KEY, True)


def test_an_id_that_was_there_before_is_a_bad_line() -> None:
    records = [(number, json.dumps(request(custom_id=name)).encode()) for number, name in enumerate("abacab")]
    second = repeated_ids([*records, (6, b"no json"), (7, b'{"custom_id": 4}')])
    assert second == {2: 0, 4: 0, 5: 1}
    prompt_record = read(request(), repeated={2: 0})
    assert str(prompt_record) == "line 3: has the custom_id 'a', which line 1 has already: each needs its own"
    assert repeated_ids([]) == {}


def test_a_stop_string_is_left_out_of_the_text() -> None:
    """``generate`` keeps it, and so do plain records."""
    prompt_record = read(request(stop=["cd", "d"], logprobs=True))
    tokens = TokenTexts(letter_tokenizer())
    ids = [tokens_id(letters) for letters in ("a", "bc", "da")]
    probabilities = [{token: -0.5} for token in ids]
    given = Generation(0, 0, "abcda", ids, [1], "stop", logprobs=probabilities)
    choice = json.loads(ResultWriter(OPENAI, tokens=tokens).result(prompt_record, KEY, [given]))["response"]["body"][
        "choices"
    ][0]
    assert choice["message"]["content"] == "ab"
    assert choice["finish_reason"] == "stop"
    assert [each["token"] for each in choice["logprobs"]["content"]] == ["a", "bc"]
    plain = ResultWriter(PLAIN).result(RecordReader().read(0, b'{"prompt": "x", "stop": "cd"}'), KEY, [given])  # type: ignore[arg-type]
    assert json.loads(plain)["text"] == "abcda"
    ended = Generation(0, 0, "a", [ids[0], EOS], [1], "stop", logprobs=[{ids[0]: -0.5}, {EOS: -0.1}])
    choice = json.loads(ResultWriter(OPENAI, tokens=tokens).result(prompt_record, KEY, [ended]))["response"]["body"][
        "choices"
    ][0]
    assert [each["token"] for each in choice["logprobs"]["content"]] == ["a"]


def tokens_id(letters: str) -> int:
    return letter_tokenizer().convert_tokens_to_ids(letters)


def test_tokens_that_are_parts_of_characters_have_bytes() -> None:
    class Pieces:
        all_special_ids = ()

        def decode(self, ids: list[int]) -> str:
            return {0: "\ufffd", 1: "\ufffd", 2: "a", 3: "\ufffd"}[ids[0]]

        def convert_ids_to_tokens(self, token: int) -> str:
            return {0: "<0xE2>", 1: "\u00c3\u0122", 2: "\u2581a", 3: "??\u2603"}[token]

    tokens = TokenTexts(Pieces())
    assert tokens.byte_values(0) == [0xE2]
    assert tokens.byte_values(1) == [0xC3, 0x80]
    assert (tokens.text(2), tokens.byte_values(2)) == (" a", [32, 97])
    assert tokens.byte_values(3) is None
    assert TokenTexts(None).text(7) == "token_id:7"


def test_requests_are_answered_as_openai_answers(tmp_path: Any) -> None:
    tokenizer = word_tokenizer()
    chat = [{"role": "user", "content": "w5 w6"}]
    records = [
        request(messages=chat, custom_id="chat", max_tokens=3),
        request(COMPLETIONS, custom_id="text", prompt="w7 w8", max_tokens=2, logprobs=2, n=2, seed=4),
        request(COMPLETIONS, custom_id="ids", prompt=[5, 6, 7], max_tokens=2, logprobs=0),
        request(messages=chat, custom_id="told", max_tokens=2, logprobs=True, top_logprobs=1),
        request(messages=chat, custom_id="bias", max_tokens=2, logit_bias={"200": 1}),
    ]
    said = "requests name the model 'm'; all of them are answered by 'LlamaForCausalLM'"
    with BatchGenerator(build("llama"), tokenizer) as generator:
        with pytest.warns(UserWarning, match=said):
            lines = answered(generator, tmp_path, records)
        expected = generator.generate([chat], max_new_tokens=3)[0]
    key, created = record_key(json.dumps(records[0]).encode()), lines[0]["response"]["body"].pop("created")
    assert abs(time.time() - created) < 1000
    assert [line["custom_id"] for line in lines] == ["chat", "text", "ids", "told", "bias"]
    assert lines[0] == {
        "id": f"batch_req_0_{key}",
        "custom_id": "chat",
        "response": {
            "status_code": 200,
            "request_id": f"req_0_{key}",
            "body": {
                "id": f"chatcmpl-0-{key}",
                "object": "chat.completion",
                "model": "LlamaForCausalLM",
                "choices": [
                    {
                        "index": 0,
                        "message": {"role": "assistant", "content": expected.text, "refusal": None},
                        "logprobs": None,
                        "finish_reason": "length",
                    }
                ],
                "usage": {
                    "prompt_tokens": len(expected.prompt_token_ids),
                    "completion_tokens": 3,
                    "total_tokens": len(expected.prompt_token_ids) + 3,
                },
            },
        },
        "error": None,
    }
    assert identify(lines[0]) == (0, key, False)
    body = lines[1]["response"]["body"]
    assert body["object"] == "text_completion"
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 4, "total_tokens": 6}
    told = body["choices"][0]["logprobs"]
    assert len(told["tokens"]) == len(told["token_logprobs"]) == len(told["top_logprobs"]) == 2
    assert told["text_offset"] == [0, len(told["tokens"][0])]
    assert lines[2]["response"]["body"]["choices"][0]["logprobs"]["top_logprobs"] is None
    content = lines[3]["response"]["body"]["choices"][0]["logprobs"]["content"]
    assert len(content) == 2
    assert content[0]["top_logprobs"][0]["token"] == content[0]["token"]  # greedy
    assert bytes(content[0]["bytes"]).decode() == content[0]["token"]
    assert "outside the model's vocabulary" in lines[4]["response"]["body"]["error"]["message"]
