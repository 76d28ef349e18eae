"""``accelerated(pipe)`` for a pipeline for images: it gives what it gave, or runs as it did and says why."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from support_image_pipelines import CHATS, GREEDY, OTHER, PAGE, made, pictures_made, placeholder, plain_form
from support_image_prompts import shows, user, words
from support_kernels import plain
from transformers import ImageTextToTextPipeline

from hf_batchllm import UnsupportedModelError, accelerated
from hf_batchllm.inputs.images import image_models

pytestmark = plain
SAYS = "not accelerated, the pipeline runs as it does without: "


@pytest.mark.some_cases
@pytest.mark.parametrize("family", ["llava", "qwen3_vl", "internvl"])
def test_results_are_those_of_before(family: str) -> None:
    pipe = made("image-text-to-text", family)
    before = {name: value for name, value in vars(pipe).items() if name != "call_count"}
    image = placeholder(family)
    calls: list[dict[str, Any]] = [
        {"text": CHATS},
        {"images": CHATS[0], "return_full_text": False},
        {"text": CHATS, "return_tensors": True},
        {"images": [[PAGE], [OTHER, PAGE]], "text": [f"w3 {image} w4", f"w5 {image} w6 {image} w7"]},
        {"text": ["w3", "w4 w5"]},
        # Several tiles of an image are mixed up by generate of some versions.
        {
            "text": CHATS[3:] if family == "internvl" else CHATS[:1],
            "generate_kwargs": {"num_beams": 3, "num_return_sequences": 3},
        },
    ]
    expected = [plain_form(pipe(**GREEDY, **copy.deepcopy(call))) for call in calls]
    streamed = list(pipe((chat for chat in CHATS), **GREEDY))
    with warnings.catch_warnings(), accelerated(pipe, min_shared_tokens=2):
        warnings.simplefilter("error", UserWarning)
        for call, each in zip(calls, expected, strict=True):
            assert plain_form(pipe(**GREEDY, **copy.deepcopy(call))) == each
            assert pipe.last_report is not None
        assert list(pipe((chat for chat in CHATS), **GREEDY)) == streamed
        pages = [user(shows(PAGE), words(number)) for number in range(8)]
        with pictures_made(pipe) as counts:
            pipe(pages, batch_size=2, **GREEDY)
        assert counts == [1]
        assert "read by the vision tower in 1 run" in pipe.last_report.images
    del pipe.last_report
    assert {name: value for name, value in vars(pipe).items() if name != "call_count"} == before


def test_what_cannot_be_served_goes_its_usual_way_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = made("image-text-to-text", "llava")
    expected = pipe(CHATS, **GREEDY)
    criterion = {"stopping_criteria": [lambda ids, scores: torch.ones(len(ids), dtype=torch.bool)]}
    stopped = pipe(CHATS, max_new_tokens=5, generate_kwargs=dict(criterion))
    with warnings.catch_warnings(record=True) as caught, accelerated(pipe):
        warnings.simplefilter("always")
        assert pipe(CHATS, max_new_tokens=5, generate_kwargs=dict(criterion)) == stopped
        with pytest.raises(ValueError, match="seed"):
            pipe(CHATS, max_new_tokens=5, generate_kwargs={"seed": 1})
        assert pipe(CHATS, **GREEDY) == expected
        assert pipe.last_report is not None
        monkeypatch.setattr(image_models, "_SERVED", ())
        assert pipe(CHATS, **GREEDY) == expected
        assert pipe.last_report is None
    said = [str(each.message).removeprefix(SAYS) for each in caught if str(each.message).startswith(SAYS)]
    assert len(said) == 2
    monkeypatch.undo()
    pipe.processor.tokenizer.padding_side = "right"
    texts = {"images": [[PAGE], [OTHER, PAGE]], "text": [f"w3 {placeholder('llava')} w4", "w5 <image> w6 <image> w7"]}
    padded = plain_form(pipe(**GREEDY, **copy.deepcopy(texts)))
    with pytest.warns(UserWarning, match="without: `attention_mask` marks padding on the right"), accelerated(pipe):
        assert plain_form(pipe(**GREEDY, **copy.deepcopy(texts))) == padded
    assert said[0].startswith("`stopping_criteria` has a function")
    assert said[1].startswith(
        "prompt 0: holds `pixel_values`, which cannot be taken: images are not supported for Llava"
    )


@pytest.mark.parametrize("call", [{"text": [CHATS[0], 3]}, {"images": PAGE}, {}, {"text": "w3", "images": PAGE}])
def test_errors_are_its_own(call: dict[str, Any]) -> None:
    pipe = made("image-text-to-text", "llava")
    with pytest.raises(Exception) as expected:  # noqa: PT011
        pipe(**call)
    with accelerated(pipe), pytest.raises(Exception) as got:  # noqa: PT011
        pipe(**call)
    assert (type(got.value), str(got.value)) == (type(expected.value), str(expected.value))


def test_a_forward_of_its_own_is_accelerated_batch_by_batch() -> None:
    class Own(ImageTextToTextPipeline):
        def _forward(self, *args: Any, **options: Any) -> Any:
            return super()._forward(*args, **options)

    stock = made("image-text-to-text", "llava")
    pipe = Own(model=stock.model, processor=stock.processor, device="cpu")
    expected = stock(CHATS, **GREEDY)
    with warnings.catch_warnings(record=True) as caught, accelerated(pipe):
        warnings.simplefilter("always", UserWarning)
        assert pipe(CHATS, **GREEDY) == expected
        assert not pipe.last_report.images, "of the last batch, which shows none"
    assert any("Own has a `_forward` of its own" in str(each.message) for each in caught)


def test_a_batch_pipeline_is_fast_already() -> None:
    with pytest.raises(UnsupportedModelError, match=r"leave accelerated\(\) out"):
        accelerated(made("batch-image-text-to-text", "llava")).__enter__()
