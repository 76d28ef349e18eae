"""``pipeline("batch-image-text-to-text")`` gives what transformers' pipeline for images gives, one prompt at a time."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
from support_image_pipelines import CHATS, GREEDY, OTHER, PAGE, made, pictures_made, placeholder, plain_form
from support_image_prompts import PICTURED, model_of, shows, user, words
from support_kernels import plain
from support_letter_tokenizers import letter_tokens
from support_pipelines import Texts
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from transformers.pipelines.pt_utils import KeyDataset
from transformers.utils.chat_template_utils import Chat

from hf_batchllm import ConfigError, PromptError, PromptsTypeError, UnsupportedModelError, UnsupportedOptionError
from hf_batchllm.inputs.images import image_models
from hf_batchllm.integrations.image_pipeline import BatchImageTextToTextPipeline

pytestmark = plain
FAMILY = "llava"
IMAGE = placeholder(FAMILY)
CONTINUED = [*user(shows(PAGE), words(5)), {"role": "assistant", "content": [words(7)]}]


@pytest.fixture(scope="module")
def stock() -> Any:
    return made("image-text-to-text", FAMILY)


@pytest.fixture(scope="module")
def pipe() -> Any:
    with made("batch-image-text-to-text", FAMILY) as pipe:
        yield pipe


@pytest.mark.some_cases
@pytest.mark.parametrize("family", PICTURED)
def test_families(family: str) -> None:
    stock, pipe = made("image-text-to-text", family), made("batch-image-text-to-text", family)
    assert pipe.task == "batch-image-text-to-text"
    assert pipe(CHATS, **GREEDY) == [stock(chat, **GREEDY) for chat in CHATS]
    images, texts = (
        [[PAGE], [OTHER, PAGE]],
        [f"w3 {placeholder(family)} w4", "w5 {0} w6 {0} w7".format(placeholder(family))],
    )
    assert pipe(images=images, text=texts, **GREEDY) == stock(images=images, text=texts, **GREEDY)
    pipe.close()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"return_full_text": False},
        {"return_full_text": True},
        {"return_tensors": True},
        {"skip_special_tokens": False},
        {"continue_final_message": False},
        {"generate_kwargs": {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5}},
        {"generate_kwargs": {"repetition_penalty": 1.5}, "return_full_text": False},
        {"processor_kwargs": {"images_kwargs": {"do_normalize": False}}},
    ],
)
def test_every_option_gives_what_the_stock_pipeline_gives(stock: Any, pipe: Any, options: dict[str, Any]) -> None:
    chats = [CHATS[0], CHATS[2], CHATS[3], CONTINUED]  # in some versions beams mix several images of a prompt up
    call = {"max_new_tokens": 5, **options}
    given = copy.deepcopy(call)
    assert plain_form(pipe(chats, **given)) == plain_form(stock(chats, **copy.deepcopy(call)))
    assert given == call, "transformers' own writes into what it was passed"
    assert plain_form(pipe(text=chats[0], **given)) == plain_form(stock(text=chats[0], **copy.deepcopy(call)))


def test_no_length_given(pipe: Any) -> None:
    assert len(pipe("w3 w4", return_tensors=True)[0]["generated_token_ids"]) == 2 + 256


@pytest.mark.parametrize(
    "given",
    [
        {"images": PAGE, "text": f"w3 {IMAGE} w4"},
        {"images": [PAGE], "text": f"w3 {IMAGE} w4"},
        {"images": [PAGE, OTHER], "text": [f"w3 {IMAGE}", f"w3 w4 {IMAGE} w4"]},
        {"images": [[PAGE, OTHER], [PAGE]], "text": [f"{IMAGE} {IMAGE}", f"w3 {IMAGE} w4"]},
        {"images": {"images": PAGE, "text": f"w3 {IMAGE} w4"}},
        {"text": "w3 w4"},
        {"text": ["w3 w4", "w5 w6 w7"]},
        {"text": Chat(CHATS[0])},
        {"text": [Chat(chat) for chat in CHATS]},
        {"images": CHATS[0]},
        {"images": CHATS},
        {"text": tuple(CHATS)},
    ],
)
def test_forms_of_inputs(stock: Any, pipe: Any, given: dict[str, Any]) -> None:
    assert pipe(**given, **GREEDY) == stock(**given, **GREEDY)


@pytest.mark.parametrize(
    "make",
    [
        lambda: (chat for chat in CHATS),
        lambda: ({"images": image, "text": f"{IMAGE} w3"} for image in (PAGE, OTHER)),
        lambda: Texts([{"images": image, "text": f"{IMAGE} w3"} for image in (PAGE, OTHER)]),
        lambda: KeyDataset([{"chat": chat} for chat in CHATS], "chat"),
    ],
)
def test_iterators(stock: Any, pipe: Any, make: Any) -> None:
    got, expected = pipe(make(), **GREEDY), stock(make(), **GREEDY)
    assert isinstance(got, list) == isinstance(expected, list)
    assert list(itertools.islice(got, 5)) == list(itertools.islice(expected, 5))


def test_what_the_stock_pipeline_does_not_take_in_a_list(stock: Any, pipe: Any) -> None:
    mixed = [{"images": PAGE, "text": f"{IMAGE} w3"}, CHATS[0], "w3 w4"]
    expected = [stock(iter_of(mixed[0]), **GREEDY), [stock(CHATS[0], **GREEDY)], [stock(text="w3 w4", **GREEDY)]]
    assert pipe(mixed, **GREEDY) == [next(iter(each)) for each in expected]
    assert pipe([], **GREEDY) == []


def iter_of(item: Any) -> Any:
    yield item


def test_samples_repeat_and_have_the_stock_structure(stock: Any, pipe: Any) -> None:
    sampled: dict[str, Any] = {"max_new_tokens": 5, "generate_kwargs": {"do_sample": True, "num_return_sequences": 3}}
    first, again = (pipe(CHATS, seed=3, return_tensors=True, **sampled) for _ in range(2))
    assert plain_form(first) == plain_form(again)
    theirs = stock(CHATS, return_tensors=True, **copy.deepcopy(sampled))
    assert [len(records) for records in first] == [len(records) for records in theirs]  # older ones give the first
    sampled["generate_kwargs"]["seed"] = 3
    assert plain_form(pipe(CHATS, return_tensors=True, progress=False, **sampled)) == plain_form(first)


def test_stop_sequences() -> None:
    tokens = {token: place for place, token in enumerate(letter_tokens()[:100])}
    inner = Tokenizer(models.BPE(vocab=tokens, merges=[]))
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens([AddedToken(IMAGE, special=True, normalized=False)])
    stock, pipe = made("image-text-to-text", FAMILY), made("batch-image-text-to-text", FAMILY)
    for each in (stock, pipe):
        each.processor.tokenizer = each.tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
        each.model.generation_config.suppress_tokens = list(range(100, model_of(FAMILY).config.text_config.vocab_size))
    call = {"max_new_tokens": 12, "return_full_text": False, "stop_sequence": "b"}
    inputs = [{"images": image, "text": f"abc{IMAGE}{end}"} for image in (PAGE, OTHER) for end in ("a", "cde")]
    got = pipe(inputs, **call)
    assert got == [next(iter(stock(iter_of(given), **call))) for given in inputs]
    assert len({len(answer[0]["generated_text"]) for answer in got}) > 1


def test_an_image_is_made_once_and_read_once(tmp_path: Any) -> None:
    (name := tmp_path / "page.png") and PAGE.save(name)
    pipe = made("batch-image-text-to-text", "qwen2_5_vl")
    chats = [user(shows(PAGE if end % 2 else PAGE.copy()), words(end)) for end in range(6)]
    chats += [user({"type": "image", "path": str(name)}, words(end)) for end in range(6, 9)]
    chats += [user(shows(PAGE), shows(OTHER), words(end)) for end in range(9, 12)]
    with pictures_made(pipe) as counts:
        results = pipe(chats, **GREEDY)
    assert counts == [1, 2]
    assert pipe.last_report.images.startswith("2 images, read by the vision tower in 1 run")
    assert results == made("image-text-to-text", "qwen2_5_vl")(chats, **GREEDY)
    with pictures_made(pipe) as counts:
        plan = pipe.plan(chats)
    assert counts == [1, 2], "nothing is remembered from call to call"
    assert plan.computed_tokens < plan.total_tokens / 2


def test_bad_prompts_are_named_by_their_places(stock: Any, pipe: Any) -> None:
    bad = [
        (user({"type": "image", "path": "missing.png"}, words(3)), "is a chat that the processor refused"),
        (user({"type": "image_url", "image_url": {"url": "x.png"}}), "holds a part of type 'image_url'"),
        (user({"type": "video", "video": "x.mp4"}), "holds a part of type 'video'"),
        ({"image": PAGE, "text": "w3"}, "text with images is {'images': ..., 'text': ...}"),
        ({"images": PAGE, "text": f"{IMAGE} {IMAGE}"}, "image"),  # which of the two is missing depends on the version
        (7, "is an int"),
        ("", "is an empty string"),
        ([{"role": "user"}], "has no 'content'"),
    ]
    given = [CHATS[0], *(each for each, _ in bad), CHATS[3]]
    with pytest.raises(PromptError) as caught:
        pipe(given, **GREEDY)
    assert list(caught.value.problems) == [*range(1, len(bad) + 1)]
    got = pipe(given, on_error="record", **GREEDY)
    assert [got[0], got[-1]] == stock([CHATS[0], CHATS[3]], **GREEDY)
    for (record,), (_, says) in zip(got[1:-1], bad, strict=True):
        assert record["generated_text"] is None and says in record["error"]


def test_rows_that_do_not_fit(pipe: Any) -> None:
    """They are named by the place of their input, which may have several."""
    room = 40 * pipe._generator.architecture.kv_bytes_per_token
    rows = {"images": [PAGE, OTHER], "text": [f"w3 {IMAGE} w4 w5", f"{IMAGE} w3 w4"]}
    with made("batch-image-text-to-text", FAMILY, kv_memory=room, page_size=2) as small:
        with pytest.raises(PromptError) as caught:
            small([rows, "w3", rows], max_new_tokens=36)
        assert list(caught.value.problems) == [0, 2]
        first, text, last = small([rows, "w3", rows], max_new_tokens=36, on_error="record", return_tensors=True)
        assert first == last and len(text[0]["generated_token_ids"]) == 1 + 36
        assert [record["generated_token_ids"] for record in first] == [None, None]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "prompts is None"),
        ({"images": PAGE}, "there are images, and no text"),
        ({"images": PAGE, "text": CHATS[0]}, "chats hold their images themselves"),
        ({"images": PAGE, "text": CHATS}, "chats hold their images themselves"),
        ({"text": 3}, "prompts is an int"),
    ],
)
def test_what_is_no_list_of_prompts(pipe: Any, given: dict[str, Any], says: str) -> None:
    with pytest.raises(PromptsTypeError, match=says):
        pipe(**given)


def test_misplaced_options(pipe: Any) -> None:
    with pytest.raises(UnsupportedOptionError, match=r"pass generate_kwargs=\{'do_sample': \.\.\.\}"):
        pipe(CHATS, do_sample=False)
    with pytest.raises(UnsupportedOptionError, match="did you mean `num_beams`"):
        pipe(CHATS, generate_kwargs={"num_beam": 2})
    with pytest.raises(ConfigError, match="is set when the pipeline is made"):
        pipe(CHATS, kv_memory="1GiB")
    with pytest.raises(UnsupportedOptionError, match="has no place in a pipeline's results"):
        pipe(CHATS, logprobs=2)
    with pytest.raises(UnsupportedOptionError, match="is a list: a pipeline takes one for all prompts"):
        pipe(CHATS, generate_kwargs={"generation_config": []})


def test_the_template_gets_its_options(stock: Any, pipe: Any) -> None:
    template = "{% for message in messages %}w50 {% for part in message['content'] %}{% if part['type'] == 'image' %}"
    template += IMAGE + "{% else %}{{ part['text'] }}{% endif %} {% endfor %}{% endfor %}{{ more }}"
    expected = stock(CHATS, chat_template=template, more="w51", **GREEDY)
    assert pipe(CHATS, chat_template=template, more="w51", **GREEDY) == expected
    assert pipe(CHATS, chat_template_kwargs={"chat_template": template, "more": "w51"}, **GREEDY) == expected


def test_a_preprocess_of_ones_own(stock: Any) -> None:
    class Counted(BatchImageTextToTextPipeline):
        seen = 0

        def preprocess(self, inputs: Any = None, **options: Any) -> Any:
            self.seen += 1
            return super().preprocess(inputs, **options)

    class Own(BatchImageTextToTextPipeline):
        def _forward(self, *args: Any, **options: Any) -> Any:
            return super()._forward(*args, **options)

    given = {"model": stock.model, "processor": stock.processor, "device": "cpu"}
    pipe = Counted(**given)
    assert pipe(CHATS, **GREEDY) == stock(CHATS, **GREEDY)
    assert pipe.seen == len(CHATS)
    with pytest.raises(UnsupportedModelError, match="Own has a `_forward` of its own"):
        Own(**given)


def test_images_that_are_not_supported(pipe: Any, stock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = stock(CHATS, **GREEDY)
    monkeypatch.setattr(image_models, "_SERVED", ())
    got = pipe(CHATS, on_error="record", **GREEDY)
    assert got[3] == expected[3]
    assert "images are not supported for Llava" in got[0][0]["error"]
