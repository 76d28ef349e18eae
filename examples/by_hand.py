"""``BatchGenerator.generate`` by hand, on a CPU: the page to begin with for whoever wants to read the library's code.

    python examples/by_hand.py     # over the model of `make demo`; without it, over a tiny one with random weights

Prompts that begin alike share a prefix, which is computed once. A step of the model takes decode rows (the last token
of each answer so far) and chunks of prompts together. After this page read ``hf_batchllm/generator.py``,
``engine/generate_calls.py``, ``engine/call.py`` and ``engine/loop.py``: they run the same pieces in the same order,
with all options, and faster.
Where ``argmax`` stands here, ``sampling/`` has processors, masks of grammars and noise. ``docs/seams.md`` says where
images, adapters, beams and the rest come in.
"""

from __future__ import annotations

from collections.abc import Container

import small_model
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from hf_batchllm.inputs.prompts import prepare_prompts
from hf_batchllm.model.attention.kv_storage import KVStorage
from hf_batchllm.model.attention.torch_attention import TorchBackend
from hf_batchllm.model.batch_builder import BatchBuilder
from hf_batchllm.model.inspection.architecture import inspect_model
from hf_batchllm.model.runner import ModelRunner
from hf_batchllm.planning.lineup import line_up, pages_at_once
from hf_batchllm.planning.paged_cache import PagedCache
from hf_batchllm.planning.requests_and_prefixes import FinishReason
from hf_batchllm.planning.scheduler import GroupScheduler
from hf_batchllm.planning.sharing import plan_sharing

BRISA = """The Brisa is a coffee machine for small kitchens. It was designed in Lisbon by Ana Reis,
weighs four kilograms and is sold in red, white and black.\n\nQ: What is the Brisa?\nA: A coffee machine.\nQ: """
ORLA = """The Orla is a folding bicycle for commuters. It was designed in Porto by Rui Costa,
weighs nine kilograms and is sold in green and blue.\n\nQ: What is the Orla?\nA: A folding bicycle.\nQ: """
TEXTS = [
    f"{page}{question}\nA:"
    for page in (BRISA, ORLA)
    for question in ("Who designed it?", "How heavy is it?", "Which colours are there?")
]
MAX_NEW_TOKENS = 8
MIN_SHARED_TOKENS = 8  # a prefix that saves fewer is not worth a unit of its own
MAX_BATCH_TOKENS = 48  # of a step: so few that the second page is computed while answers about the first are written
PAGE_SIZE = 16  # tokens in a page of the KV cache


def generate(
    model: PreTrainedModel, prompts: list[list[int]], max_new_tokens: int, end_tokens: Container[int] = ()
) -> list[list[int]]:
    """The greedy answer to each prompt, as token ids."""
    # Plan: find out what prompts share, and in which order to run them.
    checked = prepare_prompts(prompts)
    plan = plan_sharing(checked, min_shared_tokens=MIN_SHARED_TOKENS)
    print(f"{plan.computed_tokens} of {plan.total_tokens} prompt tokens computed, {len(plan.segments)} prefixes shared")

    # Cache: stand each request on the prefix that it shares. Here all of them have room at the same time.
    limits = [max_new_tokens] * len(checked)
    cache = PagedCache(pages_at_once(checked, plan, limits, PAGE_SIZE), PAGE_SIZE)
    requests = line_up(checked, plan, limits, cache).requests

    # Scheduler: it counts tokens and pages, and sees neither a token nor the model.
    scheduler = GroupScheduler()
    scheduler.start(requests, cache, MAX_BATCH_TOKENS)

    # Builder and runner: a step becomes one packed row of tokens, and the user's own model runs over it.
    builder = BatchBuilder(PAGE_SIZE)
    storage = KVStorage(cache.num_pages, PAGE_SIZE)
    runner = ModelRunner(model, inspect_model(model), TorchBackend(storage, model.device))

    while step := scheduler.next():
        print(f"step: {len(step.rows)} decode rows, {step.tokens - len(step.rows)} prompt tokens")
        logits = runner.step(builder.build(step))  # [sampled, vocabulary]
        tokens = logits.argmax(dim=-1).tolist()
        for request, token in zip(step.sampling(), tokens, strict=True):
            request.take(token, FinishReason.STOP if token in end_tokens else None)
            if request.done:
                scheduler.finish(request)  # its pages are free for others
    runner.restore()  # nothing of the steps stays behind, in the model or in memory
    return [request.generated for request in requests]


def main() -> None:
    if small_model.is_available():
        model, tokenizer = small_model.load()
        answers = generate(model, tokenizer(TEXTS).input_ids, MAX_NEW_TOKENS, {tokenizer.eos_token_id})
        print(*map(repr, tokenizer.batch_decode(answers)), sep="\n")
    else:
        print(*generate(tiny_model(), [list(text.encode()) for text in TEXTS], MAX_NEW_TOKENS), sep="\n")


def tiny_model() -> PreTrainedModel:
    torch.manual_seed(0)
    size = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**size, num_attention_heads=4, initializer_range=0.3)).eval()


if __name__ == "__main__":
    main()
