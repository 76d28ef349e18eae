"""The tokens of a real language model, prompt by prompt, beside those of ``model.generate``.

Gemma 3 270M with trained weights: real text through a vocabulary of 262,144, and a sliding window of 512 that some of
the shared prefixes are longer than.
"""

from typing import NamedTuple

import pytest
import torch
from support_real_model import NEEDS_REAL_MODEL, ROOT, load_once

from hf_batchllm import BatchGenerator, BatchResult, SharingPlan

NEW_TOKENS = 8
WINDOW = 512

pytestmark = NEEDS_REAL_MODEL

INSTRUCTION = (
    "Read the page, then answer the question in one sentence. Keep to the words of the page where you can, leave out "
    "whatever nobody asked for, and say nothing that the page does not say.\n\n"
)
# What is asked about a page, and how the answer begins; a base model goes on from there.
QUESTIONS = [
    "What is this page about?\nThe page is about",
    "When would you use this?\nYou would use this when you",
    "What is a mistake to avoid?\nA mistake to avoid is",
]
# Apache 2.0, because it is the same on every machine. Nowhere do the two best logits of a step come closer to each
# other than 0.01, so that rounding, which differs between machines, decides no token.
LICENSE = (ROOT / "LICENSE").read_text(encoding="utf-8")
LONG = LICENSE[250:3500]  # 600 tokens and more
SHORT = LICENSE[3760:4650]


def _ask(page, question):
    return f"{INSTRUCTION}{page}\n\nQuestion: {question}"


ABOUT_LONG = [_ask(LONG, question) for question in QUESTIONS[:2]]
ABOUT_SHORT = [_ask(SHORT, question) for question in QUESTIONS]
ALONE = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived an old fisherman who",
    "def fibonacci(n):\n    ",
]
SAME = ABOUT_SHORT[1]
BEGINNING = ABOUT_SHORT[-1][: -len("\nA mistake to avoid is")]  # of another prompt
ASKED = {ALONE[0], ABOUT_LONG[0], SAME}
PROMPTS = [ALONE[0], *ABOUT_LONG, ALONE[1], *ABOUT_SHORT, SAME, BEGINNING, ALONE[2]]


@pytest.fixture(scope="session")  # made once, though tests of other files may come between
def model():
    return load_once()[0]


@pytest.fixture(scope="session")  # made once, though tests of other files may come between
def tokenizer():
    return load_once()[1]


class AtOnce(NamedTuple):
    result: BatchResult
    plan: SharingPlan
    ids_seen: list[int]  # of each pass, how many tokens went through the model


@pytest.fixture(scope="session")  # made once, though tests of other files may come between
def at_once(model, tokenizer):
    """All prompts in one call."""
    ids_seen = []
    hook = model.model.embed_tokens.register_forward_hook(lambda module, args, output: ids_seen.append(args[0].numel()))
    try:
        with BatchGenerator(model, tokenizer) as gen:
            result = gen.generate(PROMPTS, max_new_tokens=NEW_TOKENS)
            plan = gen.plan(PROMPTS)
    finally:
        hook.remove()
    return AtOnce(result, plan, ids_seen)


@pytest.fixture(scope="session")  # made once, though tests of other files may come between
def reference(model, tokenizer, at_once):
    """What ``model.generate`` makes of each prompt on its own: prompt -> new tokens.

    It is asked for one prompt of each kind. For the others it is enough to look: if each of the tokens at hand is the
    one that transformers' own forward likes best after those before it, ``generate`` would give just these. If not,
    ``generate`` is asked as well.
    """
    found = {}
    for prompt, generation in zip(PROMPTS, at_once.result, strict=True):
        if prompt in found:
            continue
        inputs = tokenizer(prompt, return_tensors="pt")
        if prompt not in ASKED and _is_greedy(model, inputs.input_ids[0].tolist(), generation.token_ids):
            found[prompt] = generation.token_ids
        else:
            output = model.generate(**inputs, max_new_tokens=NEW_TOKENS)
            found[prompt] = output[0, inputs.input_ids.shape[1] :].tolist()
    return found


def _is_greedy(model, prompt_ids, made):
    if len(made) != NEW_TOKENS or model.generation_config.eos_token_id in made:
        return False
    with torch.no_grad():
        every = model(torch.tensor([prompt_ids + made]), use_cache=False, logits_to_keep=NEW_TOKENS + 1).logits
    return every[0, :-1].argmax(dim=-1).tolist() == made


def _assert_same(model, reference, prompts, result):
    assert [generation.index for generation in result] == list(range(len(prompts)))
    for prompt, generation in zip(prompts, result, strict=True):
        if generation.token_ids != reference[prompt]:
            pytest.fail(_first_difference(model, generation, reference[prompt]))


def _first_difference(model, generation, expected):
    """Where they part, and how sure the model was there: a gap over 1e-3 cannot be rounding."""
    output = model.generate(
        torch.tensor([generation.prompt_token_ids]),
        max_new_tokens=NEW_TOKENS,
        output_logits=True,
        return_dict_in_generate=True,
    )
    length = min(len(expected), len(generation.token_ids))
    place = next((i for i in range(length) if generation.token_ids[i] != expected[i]), length)
    best = output.logits[min(place, len(output.logits) - 1)][0].topk(2)
    return (
        f"prompt {generation.index} ({len(generation.prompt_token_ids)} tokens) differs from model.generate at new "
        f"token {place}: {generation.token_ids} instead of {expected}; there the two best logits of model.generate, of "
        f"{best.indices.tolist()}, are {(best.values[0] - best.values[1]).item():.2e} apart"
    )


def test_the_prompts_are_what_they_are_meant_to_be(model, tokenizer):
    assert model.config.sliding_window == WINDOW
    plan = BatchGenerator(model, tokenizer).plan(PROMPTS)
    assert sum(segment.end > WINDOW + NEW_TOKENS for segment in plan.segments) >= 1
    assert plan.depth >= 2  # the instruction, then the pages
    assert PROMPTS.count(SAME) == 2
    ids = [tokenizer(prompt).input_ids for prompt in (BEGINNING, ABOUT_SHORT[-1])]
    assert ids[1][: len(ids[0])] == ids[0] and len(ids[1]) > len(ids[0])


def test_the_tokenizer_survived_the_unpacking(tokenizer):
    text = "The sky is blue.\n\n  Why?\tÜber 日本語 “so”  –  and   so on\n"
    ids = tokenizer(text).input_ids
    assert ids[0] == tokenizer.bos_token_id
    assert ids[1:8] == [tokenizer.convert_tokens_to_ids(word) for word in "The ▁sky ▁is ▁blue . \n\n ▁▁".split(" ")]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_everything_at_once(model, tokenizer, at_once, reference):
    result, plan, ids_seen = at_once
    _assert_same(model, reference, PROMPTS, result)
    for prompt, generation in zip(PROMPTS, result, strict=True):
        assert generation.text == tokenizer.decode(reference[prompt], skip_special_tokens=True)
        assert generation.prompt_token_ids == tokenizer(prompt).input_ids
    # The last new token of a sequence is never run.
    report = result.report
    assert plan.saving > 0.5
    assert report.computed_tokens == plan.computed_tokens and report.preemptions == 0
    assert sum(ids_seen) == plan.computed_tokens + sum(len(tokens) - 1 for tokens in result.token_ids)
    assert sum(ids_seen) == report.model_tokens


def test_log_probabilities(model, tokenizer, reference):
    """Of prompts, too, over a vocabulary of which the head runs few rows at a time."""
    prompts = [ABOUT_SHORT[0], ALONE[0]]
    result = BatchGenerator(model, tokenizer).generate(
        prompts, max_new_tokens=NEW_TOKENS, logprobs=2, prompt_logprobs=1
    )
    _assert_same(model, reference, prompts, result)
    for generation in result:
        ids = generation.prompt_token_ids + generation.token_ids
        entries = [*generation.prompt_logprobs, *generation.logprobs]
        assert len(entries) == len(ids) and entries[0] is None
        places = [place for place in range(1, len(ids)) if place % 4 == 1 or place > len(ids) - NEW_TOKENS - 4]
        with torch.no_grad():
            kept = model(torch.tensor([ids]), logits_to_keep=torch.tensor(places) - 1).logits[0].log_softmax(dim=-1)
        for place, expected in zip(places, kept, strict=True):
            entry = entries[place]
            assert ids[place] in entry
            others = torch.tensor(list(entry))
            got = torch.tensor(list(entry.values()))
            torch.testing.assert_close(got, expected[others], atol=1e-3, rtol=0)
            assert got[0].item() == pytest.approx(expected.max().item(), abs=1e-3)
