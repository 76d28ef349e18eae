"""Many questions about each of many pictures: prompts a second, beside ``generate`` at its best batch.

    python examples/benchmarks/bench_images.py --config qwen2.5-vl-7b
    python examples/benchmarks/bench_images.py --config tiny --device cpu --images 3 --questions 4 --new 8

Weights are random, pictures are noise, and tokenizer and processor are made up. No token ends an answer. The split of
the time: images made ready on the host (a plan), the vision tower alone, prompts (a run with one new token each, less
these two), and answers (the rest).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import common
import numpy as np
import torch
from PIL import Image
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    ProcessorMixin,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessorPil,
)

from hf_batchllm import BatchGenerator
from hf_batchllm.bench.contenders import machine_name
from hf_batchllm.bench.workload import random_model, shape
from hf_batchllm.patches.tower_attention import TowerAttention

_SPECIAL = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
_TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
)
_SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # of the text model, and of the vision tower
    "qwen2.5-vl-7b": (
        shape("", 152064, 3584, 18944, 28, 28, 4, 128000) | {"mrope_section": [16, 24, 24]},
        {"depth": 32, "hidden_size": 1280, "out_hidden_size": 3584, "intermediate_size": 3420, "num_heads": 16},
    ),
    "tiny": (
        shape("", 2048, 64, 64, 2, 4, 2, 32768) | {"mrope_section": [2, 3, 3]},
        {"depth": 2, "hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 32, "num_heads": 2},
    ),
}


def model_and_processor(name: str, device: torch.device, dtype: torch.dtype) -> tuple[Any, Any]:
    text, vision = _SHAPES[name]
    sections = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": text["mrope_section"]}
    text = {key: text[key] for key in text if key not in ("model_type", "mrope_section")} | {
        "rope_parameters": sections
    }
    tokenizer = common.made_up_tokenizer(text["vocab_size"] - len(_SPECIAL))
    tokenizer.add_special_tokens({"additional_special_tokens": _SPECIAL})
    ids = dict(zip(_SPECIAL, tokenizer.convert_tokens_to_ids(_SPECIAL), strict=True))
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "left"
    # Without torchvision there are no classes of video processors, with which arguments are compared.
    with mock.patch.object(ProcessorMixin, "check_argument_for_proper_class", return_value=None):
        processor = Qwen2_5_VLProcessor(Qwen2VLImageProcessorPil(), tokenizer, None, chat_template=_TEMPLATE)
    places = {"image": "<|image_pad|>", "video": "<|video_pad|>", "vision_start": "<|vision_start|>"}
    given = {f"{name}_token_id": ids[token] for name, token in (places | {"vision_end": "<|vision_end|>"}).items()}
    config = AutoConfig.for_model("qwen2_5_vl", text_config=text, vision_config=vision, **given)
    return random_model(config, device, dtype, auto=AutoModelForImageTextToText), processor


def chats_of(images: int, questions: int, size: int) -> list[Any]:
    rng = np.random.default_rng(0)
    chats = []
    for _ in range(images):
        page = Image.fromarray(rng.integers(0, 255, (size, size, 3), dtype=np.uint8))
        for _ in range(questions):
            question = " ".join(f"w{number}" for number in rng.integers(0, 999, 12))
            content = [{"type": "image", "image": page}, {"type": "text", "text": question}]
            chats.append([{"role": "user", "content": content}])
    return chats


def by_generate(model: Any, processor: Any, chats: list[Any], batch: int, new: int) -> float:
    """Seconds that the processor took."""
    made_ready = 0.0
    for begin in range(0, len(chats), batch):
        began = time.perf_counter()
        inputs = processor.apply_chat_template(
            chats[begin : begin + batch],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            processor_kwargs={"padding": True},
        ).to(model.device)
        made_ready += time.perf_counter() - began
        model.generate(**inputs, max_new_tokens=new, do_sample=False)
    return made_ready


def tower(model: Any, processor: Any, chats: list[Any], questions: int) -> Callable[[], None]:
    pages = [chat[0]["content"][0]["image"] for chat in chats[::questions]]
    made = processor.image_processor(pages, return_tensors="pt").to(model.device)

    def run() -> None:
        step = 4
        patches = made["image_grid_thw"].prod(-1).cumsum(0).tolist()
        with torch.no_grad(), TowerAttention(model.model).applied():
            for begin in range(0, len(pages), step):
                first, last = ([0, *patches][place] for place in (begin, min(begin + step, len(pages))))
                pixels = made["pixel_values"][first:last].to(model.dtype)
                model.model.get_image_features(pixels, made["image_grid_thw"][begin : begin + step])

    return run


def main(arguments: Sequence[str] | None = None) -> None:
    flags: common.Flags = {
        "--config": {"choices": _SHAPES, "default": "qwen2.5-vl-7b"},
        "--batches": {"type": int, "nargs": "*", "default": [16, 32, 64], "help": "of generate; none leaves it out"},
    }
    asked = common.read(
        __doc__, arguments, flags, images=(64, "pictures"), questions=(8, "about each"),
        size=(896, "of a picture's side"), new=(64, "new tokens"), runs=common.RUNS,
        rival_prompts=(128, "of the list, that generate is given"),
    )  # fmt: skip
    device = torch.device(asked.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model, processor = model_and_processor(asked.config, device, dtype)
    chats = chats_of(asked.images, asked.questions, asked.size)
    print(f"{asked.config} on {machine_name(device)}: {asked.images} images of {asked.size} x {asked.size},", end=" ")
    print(f"{asked.questions} questions about each, {asked.new} new tokens\n", flush=True)
    columns = {"": "<24", "seconds": "10.2f", "prompts/s": "10.1f", "images/s": "10.2f", "made ready": "10.2f"}
    table = common.Table({**columns, "vision tower": "12.2f", "prompts": "8.2f", "answers": "8.2f"})

    def add(name: str, count: int, seconds: float, **parts: float) -> None:
        speeds = {"prompts/s": count / seconds, "images/s": count / asked.questions / seconds}
        table.add({"": name, "seconds": seconds, **speeds}, **{part.replace("_", " "): parts[part] for part in parts})

    with BatchGenerator(model, processor) as generator:
        whole, first = (
            common.median_seconds(asked.runs, partial(generator.generate, chats, max_new_tokens=new, progress=False))
            for new in (asked.new, 1)
        )
        ready = common.median_seconds(asked.runs, lambda: generator.plan(chats))
        report = generator.last_report
    alone = common.median_seconds(asked.runs, tower(model, processor, chats, asked.questions))
    parts = {"made_ready": ready, "vision_tower": alone, "prompts": first - ready - alone, "answers": whole - first}
    add("hf_batchllm", len(chats), whole, **parts)
    some = chats[: asked.rival_prompts]
    for batch in asked.batches:
        try:
            by_generate(model, processor, some[:batch], batch, 2)  # the first compiles kernels
            began = time.perf_counter()
            made_ready = by_generate(model, processor, some, batch, asked.new)
            add(f"generate, batch {batch}", len(some), time.perf_counter() - began, made_ready=made_ready)
        except torch.OutOfMemoryError:
            print(f"generate, batch {batch}: out of memory", flush=True)
            break
    print(f"\n{report}")


if __name__ == "__main__":
    main()
