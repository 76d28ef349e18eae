"""Tokens for which a grammar leaves no choice are run together: the same tokens in fewer steps."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from support_calls import told
from support_families import build, random_prompts
from support_grammars import END_OF_BYTES, letters, of_bytes
from support_letter_tokenizers import EOS, letter_tokens
from support_parity import pages_of_memory

from hf_batchllm import BatchGenerator, BatchResult
from hf_batchllm.inputs.grammar_options import Grammar
from hf_batchllm.inputs.resolve_options import resolve_options
from hf_batchllm.planning.requests_and_prefixes import FinishReason, Request
from hf_batchllm.planning.scheduler import QueueScheduler
from hf_batchllm.sampling.compiled_grammars import grammars_for
from hf_batchllm.sampling.forced_tokens import ForcedTokens
from hf_batchllm.sampling.grammar_masks import GrammarMasks
from hf_batchllm.sampling.stop_rules import StopRules

SCHEMA = {
    "type": "object",
    "properties": {"first name": {"type": "string", "maxLength": 6}, "mood": {"enum": ["so happy", "so sad"]}},
    "required": ["first name", "mood"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
REGEX = "(abcdef){2}(a|b|fc)(fedcba){2}[ab]"
PROMPTS = random_prompts(random.Random(5), 97, "mixed", 6)[:6]
SAMPLED = {"do_sample": True, "seed": 3, "num_return_sequences": 2}


def both(given: Any, monkeypatch: pytest.MonkeyPatch, config: Any = None, **options: Any) -> list[BatchResult]:
    """With jumps, and without."""
    results = []
    for jumps in (True, False):
        monkeypatch.setattr(QueueScheduler, "takes_jumps", jumps)
        with BatchGenerator(*given, **{"min_shared_tokens": 4, "page_size": 8, **(config or {})}) as generator:
            results.append(generator.generate(PROMPTS, **options))
    return results


def steps_of(results: list[BatchResult]) -> tuple[int, int]:
    jumped, plain = results
    assert told(jumped) == told(plain)
    ours, theirs = jumped.report, plain.report
    for name in ("new_tokens", "finished", "sequences"):
        assert getattr(ours, name) == getattr(theirs, name)
    if not ours.preemptions + theirs.preemptions:
        assert ours.computed_tokens == theirs.computed_tokens and ours.model_tokens <= theirs.model_tokens
        assert ours.recomputed_tokens == theirs.recomputed_tokens == 0
    return ours.steps, theirs.steps


@pytest.mark.some_cases
@pytest.mark.parametrize("scheduler", ["groups", "fifo"])
@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_the_same_tokens_in_fewer_steps(scheduler: str, options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"schema": SCHEMA, "max_new_tokens": 60, "eos_token_id": END_OF_BYTES, **options}
    results = both(of_bytes(), monkeypatch, {"scheduler": scheduler}, **given)
    jumped, plain = steps_of(results)
    assert jumped < 0.8 * plain
    assert all(row.text.startswith('{"first name":"') for row in results[0])


@pytest.mark.some_cases
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3_next"])
def test_layers_of_every_kind(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window, and a state that is carried from token to token."""
    free = [REGEX if place % 3 else None for place in range(6)]
    options = {"regex": free, "max_new_tokens": 30, "eos_token_id": EOS}
    jumped, plain = steps_of(both((build(family), letters()[1]), monkeypatch, **options))
    assert jumped <= plain


def test_tokens_up_to_the_limit_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    results = both(letters(), monkeypatch, regex="abcdefabcdefabc", max_new_tokens=7, eos_token_id=EOS)
    assert steps_of(results) == (1, 7)
    assert {row.finish_reason for row in results[0]} == {"length"}


def test_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"kv_memory": pages_of_memory(letters()[0], 22, 8)}
    options = {"regex": f"({REGEX}){{3}}", "max_new_tokens": 60, "eos_token_id": EOS}
    results = both(letters(), monkeypatch, config, **options)
    assert results[0].report.preemptions > 0
    jumped, plain = steps_of(results)
    assert jumped < plain


@pytest.mark.some_cases
@pytest.mark.parametrize(
    "options",
    [{"logprobs": 0}, {"stop_strings": "da"}, {"bad_words_ids": [[50, 51]]}, {"no_repeat_ngram_size": 40}],
    ids=lambda options: next(iter(options)),
)
def test_what_looks_at_each_token_sees_it(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"regex": REGEX, "max_new_tokens": 30, "eos_token_id": EOS, **options}
    jumped, plain = steps_of(both(letters(), monkeypatch, **given))
    assert jumped == plain


def jump(stops: set[int], most: int, **options: Any) -> Request:
    model, tokenizer = letters()
    compiled = grammars_for(tokenizer, 101, "regex", [EOS])
    masks = GrammarMasks([Grammar("regex", "abcdef(a|b)")], compiled, [frozenset([EOS])])
    resolved = resolve_options(model, None, {"max_new_tokens": most, "eos_token_id": EOS, **options})
    request = Request(0, np.array([1], dtype=np.int32), most)
    request.computed, request.generated = 1, [0]
    before = len(request.generated)
    count = ForcedTokens(masks, [StopRules(frozenset(stops))], [resolved])(request)
    assert count == len(request.generated) - before
    return request


def test_how_far_it_jumps() -> None:
    text = "".join(letter_tokens()[token] for token in jump(set(), 20).generated)
    assert "abcdef".startswith(text) and len(text) > 3
    assert jump({3}, 20).generated == [0, 1, 2], "a stop token is sampled, and ends the answer"
    ended = jump(set(), 3)
    assert ended.generated == [0, 1, 2] and ended.finish_reason is FinishReason.LENGTH
    assert jump(set(), 20, suppress_tokens=[90]).generated == [0]
