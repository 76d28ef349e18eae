"""``accelerated(pipe)`` for a pipeline for images: it gives what it gave, or runs as it did and says why."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from support_accelerated import Rows, accelerated_throughout, alike, fails_alike, falls_back, plain_form, reasons
from support_image_pipelines import CHATS, GREEDY, OTHER, PAGE, made, pictures_made, placeholder
from support_image_prompts import PICTURED, model_of, shows, user, words
from support_kernels import plain
from support_letter_tokenizers import letter_tokens
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import ImageTextToTextPipeline, PreTrainedTokenizerFast
from transformers.pipelines.pt_utils import KeyDataset
from transformers.utils.chat_template_utils import Chat

from hf_batchllm import accelerated
from hf_batchllm.inputs.images import image_models

pytestmark = plain
FAMILY = "llava"
IMAGE = placeholder(FAMILY)
TASK = "image-text-to-text"
CONTINUED = [*user(shows(PAGE), words(5)), {"role": "assistant", "content": [words(7)]}]
PAIRS = [{"images": image, "text": f"{IMAGE} w3"} for image in (PAGE, OTHER)]
TEMPLATE = (
    "{% for message in messages %}w50 {% for part in message['content'] %}{% if part['type'] == 'image' %}"
    + IMAGE
    + "{% else %}{{ part['text'] }}{% endif %} {% endfor %}{% endfor %}{{ more }}"
)


@pytest.fixture(scope="module")
def pipe() -> Any:
    return made(TASK, FAMILY)


def asks(**call: Any) -> Any:
    return lambda pipe: pipe(**copy.deepcopy(call))  # transformers' own writes into what it was passed


@pytest.mark.some_cases
@pytest.mark.parametrize("family", PICTURED)
def test_families(family: str) -> None:
    pipe, image = made(TASK, family), placeholder(family)
    before = {name: value for name, value in vars(pipe).items() if name != "call_count"}
    texts = [f"w3 {image} w4", f"w5 {image} w6 {image} w7"]
    alone = [pipe(chat, **GREEDY) for chat in CHATS]
    with accelerated_throughout(pipe):
        assert pipe(CHATS, **GREEDY) == alone
    alike(pipe, asks(images=[[PAGE], [OTHER, PAGE]], text=texts, **GREEDY), min_shared_tokens=2)
    del pipe.last_report
    assert {name: value for name, value in vars(pipe).items() if name != "call_count"} == before


@pytest.mark.parametrize(
    "options",
    [
        {"return_full_text": False},
        {"return_full_text": True},
        {"return_tensors": True},
        {"skip_special_tokens": False},
        {"continue_final_message": False},
        {"generate_kwargs": {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5}},
        {"generate_kwargs": {"repetition_penalty": 1.5}, "return_full_text": False},
        {"processor_kwargs": {"images_kwargs": {"do_normalize": False}}},
        {"chat_template": TEMPLATE, "more": "w51"},
    ],
    ids=lambda options: "-".join(options),
)
def test_every_option_gives_what_it_gave(pipe: Any, options: dict[str, Any]) -> None:
    chats = [CHATS[0], CHATS[2], CHATS[3], CONTINUED]  # in some versions beams mix several images of a prompt up
    call = {"text": chats, "max_new_tokens": 5, **options}
    one, as_images = {**call, "text": chats[0]}, {**call, "text": None, "images": chats[0]}
    alike(pipe, asks(**call), asks(**one), asks(**as_images))


@pytest.mark.parametrize(
    "given",
    [
        {"images": PAGE, "text": f"w3 {IMAGE} w4"},
        {"images": [PAGE, OTHER], "text": [f"w3 {IMAGE}", f"w3 w4 {IMAGE} w4"]},
        {"images": [[PAGE, OTHER], [PAGE]], "text": [f"{IMAGE} {IMAGE}", f"w3 {IMAGE} w4"]},
        {"images": {"images": PAGE, "text": f"w3 {IMAGE} w4"}},
        {"text": "w3 w4"},
        {"text": ["w3 w4", "w5 w6 w7"]},
        {"text": Chat(CHATS[0])},
        {"text": [Chat(chat) for chat in CHATS]},
        {"images": CHATS},
        {"text": tuple(CHATS)},
        {"images": Rows(PAIRS)},
        {"images": KeyDataset([{"chat": chat} for chat in CHATS], "chat")},
    ],
)
def test_forms_of_inputs(pipe: Any, given: dict[str, Any]) -> None:
    alike(pipe, asks(**given, **GREEDY))


def test_generators(pipe: Any) -> None:
    for items in (CHATS, PAIRS):
        alike(pipe, lambda pipe, items=items: pipe((each for each in items), **GREEDY))


def test_stop_sequences() -> None:
    tokens = {token: place for place, token in enumerate(letter_tokens()[:100])}
    inner = Tokenizer(models.BPE(vocab=tokens, merges=[]))
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens([AddedToken(IMAGE, special=True, normalized=False)])
    pipe = made(TASK, FAMILY)
    pipe.processor.tokenizer = pipe.tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner)
    pipe.model.generation_config.suppress_tokens = list(range(100, model_of(FAMILY).config.text_config.vocab_size))
    call = {"max_new_tokens": 12, "return_full_text": False, "stop_sequence": "b"}
    inputs = [{"images": image, "text": f"abc{IMAGE}{end}"} for image in (PAGE, OTHER) for end in ("a", "cde")]
    (got,) = alike(pipe, asks(images=Rows(inputs), **call))
    assert len({len(answer[0]["generated_text"]) for answer in got}) > 1


def test_an_image_is_made_once_and_read_once(tmp_path: Any) -> None:
    (name := tmp_path / "page.png") and PAGE.save(name)
    pipe = made(TASK, "qwen2_5_vl")
    chats = [user(shows(PAGE if end % 2 else PAGE.copy()), words(end)) for end in range(6)]
    chats += [user({"type": "image", "path": str(name)}, words(end)) for end in range(6, 9)]
    chats += [user(shows(PAGE), shows(OTHER), words(end)) for end in range(9, 12)]
    expected = pipe(chats, **GREEDY)
    with accelerated_throughout(pipe):
        for _ in range(2):
            with pictures_made(pipe) as counts:
                assert pipe(chats, batch_size=2, **GREEDY) == expected
            assert counts == [1, 2], "nothing is remembered from call to call"
            assert pipe.last_report.images.startswith("2 images, read by the vision tower in 1 run")


# -- what runs as it did ---------------------------------------------------------------------------------------


def test_what_cannot_be_served_goes_its_usual_way_and_says_why(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"images": [[PAGE], [OTHER, PAGE]], "text": [f"w3 {IMAGE} w4", f"w5 {IMAGE} w6 {IMAGE} w7"], **GREEDY}
    stopping = {"stopping_criteria": [lambda ids, scores: torch.ones(len(ids), dtype=torch.bool)]}
    longest = {**texts, "max_new_tokens": None, "generate_kwargs": {"max_length": 60}}
    falls_back(pipe, "`stopping_criteria` has a", asks(text=CHATS, max_new_tokens=5, generate_kwargs=stopping))
    falls_back(pipe, "`max_length` would count", asks(**longest), then=asks(text=CHATS, **GREEDY))
    monkeypatch.setattr(pipe.processor.tokenizer, "padding_side", "right")
    falls_back(pipe, "`attention_mask` marks padding on the right", asks(**texts))
    monkeypatch.undo()
    expected = plain_form(pipe(CHATS, **GREEDY))
    monkeypatch.setattr(image_models, "_SERVED", ())
    with reasons() as said, accelerated(pipe):
        assert plain_form(pipe(CHATS, **GREEDY)) == expected
    assert said[0].startswith("prompt 0: holds `pixel_values`, which cannot be taken: images are not supported for Ll")


@pytest.mark.parametrize(
    "call",
    [
        {"text": [CHATS[0], 3]},
        {"images": PAGE},
        {},
        {"text": "w3", "images": PAGE},
        {"text": ""},
        {"text": user({"type": "image", "path": "missing.png"}, words(3))},
        {"text": CHATS, "generate_kwargs": {"seed": 1}},
    ],
)
def test_errors_are_its_own(pipe: Any, call: dict[str, Any]) -> None:
    fails_alike(pipe, asks(**call))


def test_methods_of_its_own(pipe: Any) -> None:
    class Own(ImageTextToTextPipeline):
        def _forward(self, *args: Any, **options: Any) -> Any:
            return super()._forward(*args, **options)

    class Counted(ImageTextToTextPipeline):
        seen = 0

        def preprocess(self, inputs: Any = None, **options: Any) -> Any:
            self.seen += 1
            return super().preprocess(inputs, **options)

    expected, given = pipe(CHATS, **GREEDY), {"model": pipe.model, "processor": pipe.processor, "device": "cpu"}
    with accelerated_throughout(Counted(**given)) as counted:
        assert counted(CHATS, **GREEDY) == expected and counted.seen == len(CHATS)
    with warnings.catch_warnings(record=True) as caught, accelerated(Own(**given)) as own:
        assert own(CHATS, **GREEDY) == expected
        assert not own.last_report.images, "of the last batch, which shows none"
    assert "Own has a `_forward` of its own" in str(caught[0].message)
