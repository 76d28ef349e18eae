"""Many short questions about a few long pages, on a CPU: what `make demo` runs. Nothing is downloaded.

The pages are Python's own documentation, which comes with Python. The model is Gemma 3 270M, small enough for two
cores. It is a base model, so each question comes with the beginning of its answer. Read `main` first.
"""

from __future__ import annotations

import importlib
import os
import sys
import textwrap
import time
from pydoc_data.topics import topics
from typing import TYPE_CHECKING

from small_model import load

from hf_batchllm import BatchGenerator

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from hf_batchllm import BatchResult

PROMPT = """\
Read this page of Python's documentation, then answer the question in one sentence.

=== Page ===
{page}

=== Question ===
{question}

=== Answer ===
{beginning}"""

MODULES = "copy", "timeit", "unittest"
TOPICS = "exceptions", "context-managers"

QUESTIONS = {  # question: how its answer begins
    "What is this page about?": "The page is about",
    "When would you use this?": "You would use this when you",
    "How do you use it?": "You use it by",
    "What is the main point?": "The main point is that",
    "What is a mistake to avoid?": "A mistake to avoid is",
    "Why does it exist?": "It exists because",
}

MAX_NEW_TOKENS = 16
SHOWN = 0, 8, 16, 25  # results that are printed
EVERY = 10  # model.generate gets each 10th prompt: they are about different pages, with different questions


def main() -> None:
    heading("The model")
    model, tokenizer = load()  # any transformers model and its tokenizer will do
    prompts = all_prompts()

    generator = BatchGenerator(model, tokenizer)
    print(generator)

    heading("The plan: made from the prompts alone, before anything runs")
    print(generator.plan(prompts))

    heading("The run: all prompts at once")
    began = time.perf_counter()
    result = generator.generate(prompts, max_new_tokens=MAX_NEW_TOKENS, progress=True)
    seconds = time.perf_counter() - began
    print(result.report)

    heading("Some of the results: they are in the order of the prompts")
    show(result, SHOWN)

    heading("The same with model.generate, one prompt at a time")
    compare(model, tokenizer, prompts, result, seconds)


def all_prompts() -> list[str]:
    return [
        PROMPT.format(page=page, question=question, beginning=beginning)
        for page in pages().values()
        for question, beginning in QUESTIONS.items()
    ]


def pages() -> dict[str, str]:
    found = {f"module {name}": importlib.import_module(name).__doc__ or "" for name in MODULES}
    found |= {f"topic {name}": topics[name] for name in TOPICS}
    return {name: page.strip() for name, page in found.items()}


def show(result: BatchResult, picked: tuple[int, ...]) -> None:
    names = list(pages())
    questions = list(QUESTIONS.items())
    for index in picked:
        question, beginning = questions[index % len(questions)]
        # The model does not know when to stop: its first paragraph is the answer.
        answer = " ".join((result[index].text or "").split("\n\n")[0].split())
        print(f"result[{index}]  {names[index // len(questions)]}: {question}")
        print(textwrap.indent(textwrap.fill(f"{beginning} {answer} ...", 86), "    "))


def compare(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: list[str],
    result: BatchResult,
    seconds: float,
) -> None:
    """A table of both; ``seconds``: what ``generator.generate`` took for all prompts."""
    sample = range(0, len(prompts), EVERY)
    print(f"on every {EVERY}th prompt, {len(sample)} of the {len(prompts)}, because it takes so long ...", flush=True)
    same = 0
    began = time.perf_counter()
    for index in sample:
        inputs = tokenizer(prompts[index], return_tensors="pt")
        output = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS)
        same += output[0, inputs.input_ids.shape[1] :].tolist() == result[index].token_ids
    one = (time.perf_counter() - began) / len(sample)
    batch = seconds / len(prompts)

    report = result.report
    rows = [
        ("", "model.generate", "BatchGenerator"),
        ("prompts run", f"{len(sample)}", f"{len(prompts)}"),
        ("prompt tokens computed for all", f"{report.prompt_tokens:,}", f"{report.computed_tokens:,}"),
        ("seconds per prompt", f"{one:.2f}", f"{batch:.2f}"),
        ("seconds for all", f"{one * len(prompts):.0f} (estimated)", f"{seconds:.0f}"),
    ]
    print()
    for name, left, right in rows:
        print(f"  {name:<32}{left:>18}{right:>18}")
    print(f"""
  tokens saved  {report.prompt_tokens - report.computed_tokens:,} of {report.prompt_tokens:,} ({report.saving:.0%})
  speed-up      {one / batch:.1f} x
  same tokens   {"yes" if same == len(sample) else "NO"}, for {same} of {len(sample)} prompts""")
    # This process alone makes a load of at most one for each core. More slows the many small steps of model.generate
    # most, and the speed-up looks larger than it is.
    if hasattr(os, "getloadavg") and os.getloadavg()[0] > 1.2 * (os.cpu_count() or 1):
        print("\n  Other programs kept this machine busy meanwhile: do not trust these times, run it again.")


def heading(text: str) -> None:
    print(f"\n--- {text} {'-' * (84 - len(text))}\n", flush=True)


if __name__ == "__main__":
    try:
        main()
    except ModuleNotFoundError as missing:
        sys.exit(str(missing))
    except KeyboardInterrupt:
        sys.exit("\nstopped")
