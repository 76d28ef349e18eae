"""The masks of a call: which tokens a grammar allows next, what a sequence has had, and which tokens must come."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from support_grammars import END_OF_BYTES, letters, of_bytes
from support_letter_tokenizers import EOS, letter_tokenizer, letter_tokens
from transformers import PreTrainedTokenizerFast

from hf_batchllm.errors import OptionValueError
from hf_batchllm.inputs.grammar_options import Grammar, checked_grammar
from hf_batchllm.planning.requests_and_prefixes import FinishReason, Request
from hf_batchllm.sampling import compiled_grammars
from hf_batchllm.sampling.call_grammars import CallGrammars
from hf_batchllm.sampling.compiled_grammars import CompiledGrammars, grammars_for
from hf_batchllm.sampling.grammar_masks import GrammarError, GrammarMasks, TokenMasks

TOKENS = letter_tokens()
IDS = {token: index for index, token in enumerate(TOKENS)}
CHOICE = Grammar("choice", '["abc", "abcde", "f"]')
VOCABULARY = 130  # wider than the tokenizer's


def masks_of(grammars: Sequence[Grammar | None], ends: Sequence[int] = (EOS,), **given: Any) -> GrammarMasks:
    compiled = grammars_for(letters()[1], VOCABULARY, "choice", [EOS])
    return GrammarMasks(grammars, compiled, [frozenset(ends)] * len(grammars), **given)


def requests_of(count: int) -> list[Request]:
    return [Request(index, np.array([1, 2], dtype=np.int32), 40) for index in range(count)]


def allowed(made: TokenMasks, row: int = 0) -> set[str] | None:
    """The tokens that may come, or None for a free row. Ids beyond the tokenizer's stand for themselves."""
    line = row if made.line is None else int(made.line[row])
    if line < 0:
        return None
    bits = np.unpackbits(made.bits[line].numpy().copy().view(np.uint8), bitorder="little")
    return {TOKENS[token] if token < len(TOKENS) else str(token) for token in np.flatnonzero(bits).tolist()}


def test_a_choice_step_by_step() -> None:
    masks, (request,) = masks_of([CHOICE]), requests_of(1)
    assert allowed(masks.now([request])) == {"a", "ab", "abc", "f"}
    request.generated = [IDS["ab"]]
    assert allowed(masks.now([request])) == {"c", *(token for token in TOKENS if token in ("cd", "cde"))}
    request.generated.append(IDS["c"])
    made = masks.now([request])
    assert allowed(made) == {"d", "de", "</s>"} and made.bits.shape == (1, -(-VOCABULARY // 32))
    request.generated += [IDS["d"], IDS["e"]]  # several at once
    assert allowed(masks.now([request])) == {"</s>"}, "a whole answer is followed by its end alone"
    request.generated.append(EOS)
    assert allowed(masks.now([request])) == {"</s>"}


def test_each_token_is_taken_once_however_often_masks_are_made() -> None:
    masks, (one, other) = masks_of([CHOICE, Grammar("regex", "(ab)+")]), requests_of(2)
    one.generated, other.generated = [IDS["a"]], [IDS["a"]]
    first = [allowed(masks.now([one, other]), row) for row in (0, 1)]
    assert first == [allowed(masks.now([one, other]), row) for row in (0, 1)]
    other.generated += [IDS["b"], IDS["ab"]]
    made = masks.now([other, one])
    assert "a" in (allowed(made) or ()) and "</s>" in (allowed(made) or ()) and allowed(made, 1) == first[0]


def test_samples_of_a_prompt_go_their_own_ways() -> None:
    masks, first = masks_of([CHOICE]), requests_of(1)[0]
    second = Request(0, first.prompt_ids, 40, sample=1)
    first.generated, second.generated = [IDS["f"]], [IDS["abc"]]
    made = masks.now([first, second])
    assert allowed(made) == {"</s>"} and allowed(made, 1) == {"d", "de", "</s>"}


def test_rows_without_a_grammar_have_no_line() -> None:
    masks, requests = masks_of([None, CHOICE, None, CHOICE]), requests_of(4)
    requests[3].generated = [IDS["f"]]
    made = masks.now(requests)
    assert made.line is not None and made.line.tolist() == [-1, 0, -1, 1] and len(made.bits) == 2
    scores = torch.randn(4, VOCABULARY)
    masked = made.apply(scores)
    assert torch.equal(masked[[0, 2]], scores[[0, 2]])
    assert masked[3].isfinite().nonzero().tolist() == [[EOS]]
    assert torch.equal(made.of([3, 0]).apply(scores[[3, 0]]), masked[[3, 0]])
    assert masks.now(requests[:1]).apply(scores[:1]).equal(scores[:1])


@pytest.mark.parametrize("ends", [[EOS, 17, 120], [120], [17]])
def test_the_end_tokens_are_those_of_the_prompt(ends: list[int]) -> None:
    names = {TOKENS[token] if token < len(TOKENS) else str(token) for token in ends}
    masks, (request,) = masks_of([CHOICE], ends), requests_of(1)
    assert not names & (allowed(masks.now([request])) or set())
    request.generated = [IDS["f"]]
    assert allowed(masks.now([request])) == names
    request.generated = [IDS["f"], ends[0]]  # a criterion of the user's lets it go on
    assert allowed(masks.now([request])) == names


def test_an_end_token_comes_only_where_the_answer_is_whole() -> None:
    """``b`` ends answers, and the grammar has it in its midst, too."""
    masks, (request,) = masks_of([Grammar("regex", "(a|b)c?d(b|e)")], [EOS, IDS["b"]]), requests_of(1)
    begin = {"a", "ac", "ad", "bc", "bd", "acd", "adb", "ade", "bcd", "bdb"}
    assert allowed(masks.now([request])) == begin, "tokens that hold it do not end an answer"
    request.generated = [IDS["a"], IDS["d"]]
    assert allowed(masks.now([request])) == {"b", "e"}, "the answer is a whole one with it"
    request.generated.append(IDS["e"])
    assert allowed(masks.now([request])) == {"</s>", "b"}


def test_an_end_token_that_must_come_in_the_midst_is_named() -> None:
    masks, requests = masks_of([None, Grammar("regex", "(a|c)ba")], [IDS["b"]]), requests_of(2)
    requests[1].generated = [IDS["a"]]
    why = rf"the `regex` of prompt 1 cannot be followed after 1 tokens: only token {IDS['b']} can come next, which ends"
    with pytest.raises(GrammarError, match=why):
        masks.now(requests)
    requests[1].end(FinishReason.TIME)
    assert allowed(masks.now(requests), 1) == set(), "nothing is drawn for a row that has ended"


@pytest.mark.parametrize("vocabulary", [70, 97, 128, 200])
def test_logits_may_be_of_more_ids_than_the_masks_or_of_fewer(vocabulary: int) -> None:
    masks, (request,) = masks_of([CHOICE]), requests_of(1)
    left = masks.now([request]).apply(torch.randn(1, vocabulary)).isfinite().nonzero()[:, 1]
    assert {TOKENS[token] for token in left.tolist()} == {"a", "ab", "abc", "f"}


def test_the_kernel_of_a_device_applies_them() -> None:
    masks, (request, free), scores = masks_of([CHOICE, None]), requests_of(2), torch.randn(2, VOCABULARY)
    seen = []

    def kernel(logits: torch.Tensor, bits: torch.Tensor, *, line: torch.Tensor) -> torch.Tensor:
        seen.append((bits.shape[1], line.tolist()))
        return logits

    assert masks.now([request, free]).to(scores.device, kernel).of([1, 0]).apply(scores) is scores
    assert seen == [(-(-VOCABULARY // 32), [-1, 0])]


def test_masks_are_made_on_a_thread_meanwhile() -> None:
    masks, requests = masks_of([CHOICE, None, Grammar("regex", "(ab|c)*")]), requests_of(3)
    at_once = masks_of([CHOICE, None, Grammar("regex", "(ab|c)*")])
    for new in ([IDS["abc"], 5, IDS["c"]], [IDS["d"], 5, IDS["ab"]], [IDS["e"], 5, IDS["c"]]):
        masks.begin(requests)
        made, wanted = masks.wait(), at_once.now(requests)
        assert made.bits.equal(wanted.bits)
        kept = made.bits.clone()
        for request, token in zip(requests, new, strict=True):
            request.generated.append(token)
        masks.begin(requests)
        assert made.bits.equal(kept), "those that were made are valid while the next ones are made"
        masks.wait()
    masks.begin(requests[:1])  # of a step that failed
    masks.begin(requests)
    assert masks.of(requests).bits.equal(at_once.now(requests).bits)
    masks.begin(requests)
    assert masks.of(requests[2:]).bits.equal(at_once.now(requests[2:]).bits), "a step may be cut"
    masks.close()


def test_what_has_ended_is_forgotten() -> None:
    masks, requests = masks_of([CHOICE, CHOICE]), requests_of(2)
    masks.now(requests)
    requests[0].end(FinishReason.TIME)
    masks.now(requests[1:])
    assert list(masks._followers) == requests[1:]


def test_tokens_that_must_come() -> None:
    masks, requests = masks_of([Grammar("regex", "abca(b|c)ff"), None, CHOICE]), requests_of(3)
    ids = [IDS[letter] for letter in "abc"]  # the next one may be a part of a longer token
    assert masks.forced(requests[0]) == ids and masks.forced(requests[1]) == masks.forced(requests[2]) == []
    for token in ids:  # the masks leave the same tokens
        assert allowed(masks.now(requests[:1])) == {TOKENS[token]}
        requests[0].generated.append(token)
    assert masks.forced(requests[0]) == [] and len(allowed(masks.now(requests[:1])) or ()) > 1
    requests[0].generated.append(IDS["ac"])
    assert masks.forced(requests[0]) == [IDS["f"]] * 2
    requests[0].generated += [IDS["f"]] * 2
    assert allowed(masks.now(requests[:1])) == {"</s>"} and masks.forced(requests[0]) == []
    requests[0].generated.append(EOS)
    assert masks.forced(requests[0]) == []


def test_a_token_that_was_not_allowed_names_the_prompt() -> None:
    masks, requests = masks_of([None, CHOICE]), requests_of(2)
    requests[1].generated = [IDS["b"]]
    with pytest.raises(GrammarError, match=r"the `choice` of prompt 1 cannot be followed after 1 tokens: llguidance"):
        masks.now(requests)


# -- compiling ---------------------------------------------------------------------------------------------------------


def test_a_tokenizer_is_prepared_once_and_equal_grammars_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = pickle.loads(pickle.dumps(letters()[1]))
    compiled = grammars_for(tokenizer, 101, "regex", [EOS])
    assert grammars_for(tokenizer, 90, "regex", [EOS]) is compiled
    made: list[Grammar] = []
    compile_it = CompiledGrammars._compile
    monkeypatch.setattr(CompiledGrammars, "_compile", lambda *given: made.append(given[1]) or compile_it(*given))
    for _ in range(3):
        assert compiled.problem(Grammar("regex", "a+b")) is None
        assert compiled.matcher(Grammar("regex", "a+b")).consume_token(IDS["a"])
    assert made == [Grammar("regex", "a+b")]
    before = len(compiled_grammars._PREPARED)
    del tokenizer, compiled
    assert len(compiled_grammars._PREPARED) < before, "it is kept as long as its tokenizer"


def test_a_grammar_of_many_sequences_is_compiled_for_each_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    compiled = grammars_for(pickle.loads(pickle.dumps(letters()[1])), 101, "regex", [EOS])
    made: list[Grammar] = []
    compile_it = CompiledGrammars._compile
    monkeypatch.setattr(CompiledGrammars, "_compile", lambda *given: made.append(given[1]) or compile_it(*given))
    few, many = Grammar("regex", "a+b"), Grammar("regex", "b+a")
    matchers = [compiled.matcher(grammar) for grammar in [few] * 3 + [many] * 40]
    assert made == [few] + [many] * 3
    assert [each.consume_token(IDS["b"]) for each in matchers[3:]] == [True] * 40
    assert not any(each.is_error() for each in matchers)
    monkeypatch.setattr("hf_batchllm.sampling.compiled_grammars._MOST_SECONDS", 0)
    slow = [compiled.matcher(Grammar("regex", "c+a")) for _ in range(40)]
    assert len(made) == 5 and len(slow) == 40


def test_a_tokenizer_that_has_grown_is_prepared_anew() -> None:
    tokenizer = pickle.loads(pickle.dumps(letters()[1]))
    compiled = grammars_for(tokenizer, 101, "regex", [EOS])
    tokenizer.add_tokens(["xyz"])
    grown = grammars_for(tokenizer, 101, "regex", [EOS])
    assert compiled.problem(Grammar("regex", "xyz")) is not None and grown.problem(Grammar("regex", "xyz")) is None


def test_a_tokenizer_that_cannot_be_used_is_named() -> None:
    no_bytes = PreTrainedTokenizerFast(tokenizer_object=letters()[1].backend_tokenizer)
    with pytest.raises(OptionValueError, match="`schema` ends an answer by an EOS token, and this tokenizer has none"):
        grammars_for(no_bytes, 101, "schema", [])
    with pytest.raises(OptionValueError, match=r"`schema` does not work with this tokenizer.*llguidance says"):
        grammars_for(letter_tokenizer(bytes_in_tokens=False), 101, "schema", [EOS])


def test_what_goes_to_another_process_is_the_grammars_alone() -> None:
    model, tokenizer = of_bytes()
    compiled = grammars_for(tokenizer, model.config.vocab_size, "regex", [END_OF_BYTES])
    sent = pickle.loads(pickle.dumps(CallGrammars([Grammar("regex", "a"), None], compiled)))
    assert sent.each == [Grammar("regex", "a"), None] and sent.compiled is None and sent.option == "regex"


@pytest.mark.parametrize("text", ['a"b', "a\\b", "é\n", "\t😀", "\u2028", "</s>", '"', "a|b", "/x/"])
def test_any_text_can_be_a_choice(text: str) -> None:
    model, tokenizer = of_bytes()
    compiled = grammars_for(tokenizer, model.config.vocab_size, "choice", [END_OF_BYTES])
    matcher = compiled.matcher(checked_grammar("choice", [text]))
    assert matcher.consume_tokens(tokenizer(text, split_special_tokens=True).input_ids) and matcher.is_accepting()
