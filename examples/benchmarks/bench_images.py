"""Many questions about each of many pictures: prompts a second, beside ``generate`` at its best batch.

    python examples/benchmarks/bench_images.py --config qwen2.5-vl-7b
    python examples/benchmarks/bench_images.py --config tiny --device cpu --images 3 --questions 4 --new 8

Weights are random, pictures are noise, and tokenizer and processor are made up. No token ends an answer. The split of
the time: images made ready on the host (a plan), the vision tower alone, prompts (a run with one new token each, less
these two), and answers (the rest).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import bench_support  # noqa: F401  before hf_batchllm: finds the checkout
import numpy as np
import torch
from bench_grammar_masks import made_up
from PIL import Image
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    GenerationConfig,
    ProcessorMixin,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessorPil,
)

from hf_batchllm import BatchGenerator
from hf_batchllm.patches.tower_attention import TowerAttention

_SPECIAL = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
_TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
)
_SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen2.5-vl-7b": (
        {
            "vocab_size": 152_064,
            "hidden_size": 3584,
            "intermediate_size": 18_944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
        },
        {"depth": 32, "hidden_size": 1280, "out_hidden_size": 3584, "intermediate_size": 3420, "num_heads": 16},
    ),
    "tiny": (
        {
            "vocab_size": 2048,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
        },
        {"depth": 2, "hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 32, "num_heads": 2},
    ),
}


def model_and_processor(name: str, device: torch.device, dtype: torch.dtype) -> tuple[Any, Any]:
    text, vision = _SHAPES[name]
    tokenizer = made_up(text["vocab_size"] - len(_SPECIAL))
    tokenizer.add_special_tokens({"additional_special_tokens": _SPECIAL})
    ids = dict(zip(_SPECIAL, tokenizer.convert_tokens_to_ids(_SPECIAL), strict=True))
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.padding_side = "left"
    # Without torchvision there are no classes of video processors, with which arguments are compared.
    with mock.patch.object(ProcessorMixin, "check_argument_for_proper_class", return_value=None):
        processor = Qwen2_5_VLProcessor(Qwen2VLImageProcessorPil(), tokenizer, None, chat_template=_TEMPLATE)
    config = AutoConfig.for_model(
        "qwen2_5_vl",
        text_config=text,
        vision_config=vision,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    torch.manual_seed(0)
    auto: Any = AutoModelForImageTextToText
    with torch.device(device):
        model = auto.from_config(config, dtype=dtype).eval()
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=None, pad_token_id=0)
    return model, processor


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


def timed(run: Callable[[], object], runs: int, device: torch.device) -> float:
    taken = []
    for number in range(runs + 1):
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if number:  # the first compiles kernels
            taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", choices=_SHAPES, default="qwen2.5-vl-7b")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--questions", type=int, default=8, help="about each image")
    parser.add_argument("--size", type=int, default=896, help="pixels of a side")
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--batches", type=int, nargs="*", default=[16, 32, 64], help="of generate; none leaves it out")
    parser.add_argument("--rival-prompts", type=int, default=128, help="of the list, that generate is given")
    asked = parser.parse_args()
    device = torch.device(asked.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model, processor = model_and_processor(asked.config, device, dtype)
    chats = chats_of(asked.images, asked.questions, asked.size)
    on = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{asked.config} on {on}: {asked.images} images of {asked.size} x {asked.size}, {asked.questions} questions")
    print(f"about each, {asked.new} new tokens\n", flush=True)
    with BatchGenerator(model, processor) as generator:

        def ours(new: int) -> Callable[[], object]:
            return lambda: generator.generate(chats, max_new_tokens=new, progress=False)

        whole = timed(ours(asked.new), asked.runs, device)
        report = generator.last_report
        first = timed(ours(1), asked.runs, device)
        ready = timed(lambda: generator.plan(chats), asked.runs, device)
    alone = timed(tower(model, processor, chats, asked.questions), asked.runs, device)
    prompts, answers = first - ready - alone, whole - first
    print(f"{'':24}{'seconds':>10}{'prompts/s':>12}{'images/s':>10}")
    row("hf_batchllm", len(chats), whole, asked.questions)
    print(f"of them: images made ready {ready:.2f}, vision tower {alone:.2f}, ", end="")
    print(f"prompts {prompts:.2f}, answers {answers:.2f}\n", flush=True)
    some = chats[: asked.rival_prompts]
    for batch in asked.batches:
        try:
            by_generate(model, processor, some[:batch], batch, 2)  # the first compiles kernels
            began = time.perf_counter()
            made_ready = by_generate(model, processor, some, batch, asked.new)
            row(f"generate, batch {batch}", len(some), time.perf_counter() - began, asked.questions)
        except torch.OutOfMemoryError:
            print(f"generate, batch {batch}: out of memory", flush=True)
            break
        print(f"of them: images made ready {made_ready:.2f}", flush=True)
    print()
    print(report)


def row(name: str, prompts: int, seconds: float, questions: int) -> None:
    print(f"{name:24}{seconds:10.2f}{prompts / seconds:12.1f}{prompts / questions / seconds:10.2f}", flush=True)


if __name__ == "__main__":
    main()
