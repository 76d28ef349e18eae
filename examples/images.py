"""Questions about pictures: each picture is read once, however many questions there are about it.

    python examples/images.py                                       # a made-up model that sees nothing; half a minute
    python examples/images.py --model Qwen/Qwen2.5-VL-3B-Instruct   # one that sees

What to copy: pass the processor in the place of a tokenizer, put the picture *before* the question, and pass the whole
list at once. The pictures are drawn here; paths, URLs and arrays do as well (docs/images.md).
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from PIL import Image, ImageDraw
from small_image_model import load

from hf_batchllm import BatchGenerator

CHARTS = {
    "Coffee sold": {"red": 3, "white": 8, "black": 5},
    "Rain by season": {"red": 6, "green": 2, "blue": 4, "orange": 9},
    "Visitors a day": {"blue": 7, "black": 1},
    "Books lent": {"green": 9, "red": 4, "blue": 6},
}
# A question, and how its answer begins: a base model continues a text.
QUESTIONS = [
    ("Which bar is the highest?", "The highest bar is the"),
    ("How many bars are there?", "The number of bars is"),
    ("What is the title of the chart?", "The title of the chart is"),
    ("Is there a blue bar?", "To say whether there is a blue bar: there is"),
]


def drawn(title: str, bars: dict[str, int]) -> Image.Image:
    """A bar chart."""
    picture = Image.new("RGB", (448, 336), "whitesmoke")
    pen = ImageDraw.Draw(picture)
    pen.text((20, 12), title, fill="black", font_size=28)
    for place, (colour, height) in enumerate(bars.items()):
        left = 30 + 100 * place
        pen.rectangle((left, 316 - 28 * height, left + 70, 316), fill=colour, outline="black")
    return picture


def model_and_processor(name: str | None) -> tuple[Any, Any]:
    if name is None:
        return load()
    from transformers import AutoModelForImageTextToText, AutoProcessor

    model = AutoModelForImageTextToText.from_pretrained(name, dtype="auto", device_map="auto")
    return model, AutoProcessor.from_pretrained(name)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--model", help="a name or a path; by default a made-up model, whose answers mean nothing")
    name = arguments.parse_args().model
    model, processor = model_and_processor(name)

    pictures = {title: drawn(title, bars) for title, bars in CHARTS.items()}
    asked = [(title, question, begin) for question, begin in QUESTIONS for title in pictures]
    chats = []
    for title, question, begin in asked:
        text = f"Look at the chart.\nQuestion: {question}\n" + (f"Answer: {begin}" if name is None else "")
        content = [{"type": "image", "image": pictures[title]}, {"type": "text", "text": text}]
        chats.append([{"role": "user", "content": content}])

    with BatchGenerator(model, processor) as gen:
        began = time.perf_counter()
        out = gen.generate(chats, max_new_tokens=8)
        seconds = time.perf_counter() - began
        print(out.report)

    inputs = processor.apply_chat_template(
        chats[0], add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    ).to(model.device)
    began = time.perf_counter()
    alone = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    each = time.perf_counter() - began
    same = "the same tokens" if alone.tolist() == out[0].token_ids else "other tokens"
    print(f"\n{seconds / len(chats):.2f} s for each of {len(chats)}; model.generate: {each:.2f} s, and {same}\n")

    for (title, question, _), answer in zip(asked, out, strict=True):
        first_line = (answer.text or "").strip().partition("\n")[0]
        print(f"{title:16} {question:34} {first_line}")
    if name is None:
        print("\nThis model sees nothing: its vision tower has random weights. Name one that does with --model.")


if __name__ == "__main__":
    main()
