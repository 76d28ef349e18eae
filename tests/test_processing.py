"""Every processor works on a row as ``model.generate`` has it work on that prompt alone.

The scores of each step are compared, along the tokens that were picked here, for prompts of different lengths.
"""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from chance import brief
from families import build, random_prompts
from harness import NEAR_TIE, pages_of_memory
from transformers import GenerationConfig, LogitsProcessor, SynthIDTextWatermarkingConfig, WatermarkingConfig
from transformers.generation import logits_process as processors

from hf_batchllm import BatchGenerator, BatchResult, call
from hf_batchllm.device_sampling import why_not
from hf_batchllm.errors import OptionValueError
from hf_batchllm.options import resolve_options
from hf_batchllm.request import Request
from hf_batchllm.sampling import Sampler

FAMILY = "llama"
MANY_EOS = list(range(0, 101, 9))
SAMPLED = {"do_sample": True}
PAGE = {"min_shared_tokens": 4, "page_size": 8}
NEW_TOKENS = 10


def prompts(count: int = 5) -> list[list[int]]:
    shared = random_prompts(random.Random(3), 97, "prefix", 4)
    repeating = [7, 8, 9, 7, 8, 9, 7, 8, 9, 7, 8]
    return [shared[0], [5], repeating, *shared[1:], [5]][:count]


@dataclass
class Trace:
    """What each sequence's tokens were picked from."""

    logits: dict[tuple[int, int], list[torch.Tensor]] = field(default_factory=dict)
    scores: dict[tuple[int, int], list[torch.Tensor]] = field(default_factory=dict)

    def __call__(self, requests: Sequence[Request], logits: torch.Tensor, scores: torch.Tensor) -> None:
        assert logits.shape == scores.shape == (len(requests), 101)
        assert logits.dtype == scores.dtype == torch.float32
        for row, request in enumerate(requests):
            key = request.index, request.sample
            assert len(self.scores.setdefault(key, [])) == len(request.generated)
            self.scores[key].append(scores[row].clone())
            self.logits.setdefault(key, []).append(logits[row].clone())

    @property
    def changed(self) -> int:
        """Sequences in which some score is not the logit that it was."""
        return sum(
            any(
                not torch.equal(logits, scores)
                for logits, scores in zip(self.logits[key], self.scores[key], strict=True)
            )
            for key in self.scores
        )


@pytest.fixture
def trace(monkeypatch: pytest.MonkeyPatch) -> Trace:
    trace = Trace()
    monkeypatch.setattr(call, "Sampler", lambda *args, **given: Sampler(*args, **given, record=trace))
    return trace


def alone(prompt: Sequence[int], tokens: Sequence[int], **options: Any) -> tuple[list[int], torch.Tensor]:
    """What ``generate`` does for one prompt: its new tokens, and the scores [steps, vocabulary] of each.

    Where it samples, it draws ``tokens``.
    """
    model: Any = build(FAMILY)
    ids, drawn = torch.tensor([list(prompt)]), iter(tokens)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "multinomial", lambda *_, **__: torch.tensor([[next(drawn)]]))
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            **{"pad_token_id": 0, "max_new_tokens": NEW_TOKENS, "do_sample": False}
            | {**options, "num_return_sequences": 1, "return_dict_in_generate": True, "output_scores": True},
        )
    return out.sequences[0, len(prompt) :].tolist(), torch.cat(out.scores)


def assert_each_as_alone(
    result: BatchResult, trace: Trace, options_of: Callable[[int, int], dict[str, Any]], least: float = 0.8
) -> None:
    """``options_of``: for ``generate``, by the row and the prompt."""
    whole = 0
    for row, generation in enumerate(result):
        options = options_of(row, generation.index)
        tokens, expected = alone(generation.prompt_token_ids, generation.token_ids, **options)
        best = expected.topk(2, dim=-1).values
        ties = (best[:, 0] - best[:, 1] < NEAR_TIE).nonzero()[:, 0].tolist()
        sure = len(tokens) if options.get("do_sample") or not ties else ties[0] + 1
        found = torch.stack(trace.scores[generation.index, generation.sample])
        torch.testing.assert_close(found[:sure], expected[:sure], rtol=1e-4, atol=2e-4)
        if sure == len(tokens):
            assert generation.token_ids == tokens, f"row {row}"
            whole += 1
    assert whole >= least * len(result), "too many near ties to prove anything"


BIAS = [[[5], -9.0], [[7, 8], 30.0], [[8, 9], -30.0], [[3, 4, 5], 10.0]]
WATERMARKS = {
    "lefthash": WatermarkingConfig(bias=2.5),
    "selfhash": WatermarkingConfig(bias=4.0, seeding_scheme="selfhash", context_width=2, greenlist_ratio=0.4),
    "SynthID": SynthIDTextWatermarkingConfig(keys=[654, 400, 836, 123, 340], ngram_len=3),
}


@pytest.mark.parametrize(
    "options",
    [
        {"no_repeat_ngram_size": 2},
        {"no_repeat_ngram_size": 1, "renormalize_logits": True},
        {"encoder_repetition_penalty": 2.5},
        {"encoder_no_repeat_ngram_size": 2, "repetition_penalty": 0.7},
        {"bad_words_ids": [[7], [8, 9], [5, 5]]},
        {"sequence_bias": BIAS},
        {"forced_bos_token_id": 12},
        {"forced_eos_token_id": [4, 6], "eos_token_id": [4, 6]},
        {"exponential_decay_length_penalty": (2, 1.6), "eos_token_id": MANY_EOS},
        {"suppress_tokens": list(range(40))},
        {"begin_suppress_tokens": list(range(50)), "forced_bos_token_id": 12},
        {"remove_invalid_values": True, "suppress_tokens": [3], "renormalize_logits": True},
        {
            "repetition_penalty": 1.3,
            "no_repeat_ngram_size": 3,
            "bad_words_ids": [[8, 9]],
            "min_new_tokens": 4,
            "eos_token_id": MANY_EOS,
            "suppress_tokens": [1, 2],
            "sequence_bias": BIAS,
            "renormalize_logits": True,
        },
        {**SAMPLED, "top_h": 0.4},
        {**SAMPLED, "typical_p": 0.6, "top_k": 0},
        {**SAMPLED, "epsilon_cutoff": 0.02, "top_k": 0},
        {**SAMPLED, "eta_cutoff": 0.03, "temperature": 1.7},
        {
            **SAMPLED,
            "temperature": 1.5,
            "top_k": 40,
            "top_p": 0.95,
            "min_p": 0.001,
            "typical_p": 0.9,
            "epsilon_cutoff": 0.001,
            "eta_cutoff": 0.001,
            "renormalize_logits": True,
            "no_repeat_ngram_size": 2,
            "encoder_no_repeat_ngram_size": 3,
        },
    ],
    ids=brief,
)
def test_options_mean_what_they_mean_to_each_prompt_alone(options: dict[str, Any], trace: Trace) -> None:
    count = 3 if options.get("do_sample") else 1
    result = BatchGenerator(build(FAMILY), **PAGE).generate(
        prompts(), max_new_tokens=NEW_TOKENS, seed=5, num_return_sequences=count, **options
    )
    assert len(result) == 5 * count
    assert trace.changed
    assert_each_as_alone(result, trace, lambda *_: options)


@pytest.mark.parametrize("name", WATERMARKS)
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_watermarks(name: str, sampled: bool, trace: Trace) -> None:
    options = {"do_sample": sampled, "watermarking_config": WATERMARKS[name], "renormalize_logits": True}
    count = 2 if sampled else 1
    result = BatchGenerator(build(FAMILY), **PAGE).generate(
        prompts(), max_new_tokens=NEW_TOKENS, seed=5, num_return_sequences=count, **options
    )
    assert_each_as_alone(result, trace, lambda *_: options)


# -- guidance --------------------------------------------------------------------------------------------------

NEGATIVE = torch.randint(97, (5, 6), generator=torch.Generator().manual_seed(2))
MASK = torch.tensor([[0, 0, 1, 1, 1, 1], *[[1] * 6] * 3, [0, 1, 1, 1, 1, 1]])


@pytest.mark.parametrize("negative", [None, NEGATIVE], ids=["", "negative prompts"])
@pytest.mark.parametrize("options", [{}, {**SAMPLED, "num_return_sequences": 2, "top_k": 9}], ids=brief)
def test_guidance(negative: torch.Tensor | None, options: dict[str, Any], trace: Trace) -> None:
    generator, given = BatchGenerator(build(FAMILY), **PAGE), {"guidance_scale": 1.8, **options}
    rows = {} if negative is None else {"negative_prompt_ids": negative, "negative_prompt_attention_mask": MASK}
    with pytest.warns(UserWarning, match="`guidance_scale` has transformers run the model once more"):
        result = generator.generate(prompts(), max_new_tokens=6, seed=1, **given, **rows)

    def options_of(_: int, index: int) -> dict[str, Any]:
        own = {name: tensor[index : index + 1] for name, tensor in rows.items()}
        return {"max_new_tokens": 6, **given, **own}

    assert_each_as_alone(result, trace, options_of)


def test_negative_prompts_must_fit_the_prompts() -> None:
    generator = BatchGenerator(build(FAMILY))

    def generate(**options: Any) -> None:
        generator.generate(prompts(), max_new_tokens=2, **options)

    with pytest.raises(OptionValueError, match="`negative_prompt_ids` has 4 rows and there are 5 prompts"):
        generate(guidance_scale=2.0, negative_prompt_ids=NEGATIVE[:4])
    with pytest.raises(OptionValueError, match="`negative_prompt_ids` must be a 2-D tensor, with a row for each"):
        generate(guidance_scale=2.0, negative_prompt_ids=NEGATIVE[0])
    with pytest.raises(OptionValueError, match="must have the shape of `negative_prompt_ids`"):
        generate(guidance_scale=2.0, negative_prompt_ids=NEGATIVE, negative_prompt_attention_mask=MASK[:, 1:])
    with pytest.raises(OptionValueError, match="is given without `negative_prompt_ids`"):
        generate(guidance_scale=2.0, negative_prompt_attention_mask=MASK)
    with pytest.warns(UserWarning, match="`negative_prompt_ids` has no effect without `guidance_scale`"):
        generate(negative_prompt_ids=NEGATIVE)


# -- what users bring along ------------------------------------------------------------------------------------


def allowed_tokens(batch_id: int, ids: torch.Tensor) -> list[int]:
    assert ids.dtype == torch.long and ids.ndim == 1
    return list(range((batch_id * 7 + len(ids)) % 50, 101, 1 + batch_id % 3))


def test_prefix_allowed_tokens_fn_knows_the_row_of_the_result(trace: Trace) -> None:
    options = {**SAMPLED, "top_k": 0, "num_return_sequences": 3}
    result = BatchGenerator(build(FAMILY), **PAGE).generate(
        prompts(), max_new_tokens=NEW_TOKENS, seed=2, prefix_allowed_tokens_fn=allowed_tokens, **options
    )

    def options_of(row: int, _: int) -> dict[str, Any]:
        return {**options, "prefix_allowed_tokens_fn": lambda _, ids: allowed_tokens(row, ids)}

    assert_each_as_alone(result, trace, options_of)


def test_prefix_allowed_tokens_fn_counts_rows_where_numbers_of_samples_differ() -> None:
    counts, seen = [1, 3, 2, 1], set()
    configs = [GenerationConfig(do_sample=True, num_return_sequences=count, max_new_tokens=2) for count in counts]

    def of(batch_id: int, ids: torch.Tensor) -> list[int]:
        seen.add((batch_id, len(ids)))
        return [batch_id]

    result = BatchGenerator(build(FAMILY)).generate(
        [*prompts(2), [], [9, 8]], configs, seed=1, on_error="record", prefix_allowed_tokens_fn=of
    )
    rows = [row for row, generation in enumerate(result) if generation.error is None]
    assert rows == [0, 1, 2, 3, 6]  # those of the prompt that cannot be run keep their places
    assert [generation.token_ids for generation in result] == [[r, r] if r in rows else [] for r in range(7)]


def test_a_prefix_function_that_allows_nothing_is_an_error_that_names_the_row() -> None:
    with pytest.raises(ValueError, match=r"`prefix_allowed_tokens_fn` gave no token for batch_id 1 \(after 1 tokens\)"):
        BatchGenerator(build(FAMILY)).generate(
            prompts(2), max_new_tokens=3, prefix_allowed_tokens_fn=lambda row, ids: [] if row else [1]
        )
    with pytest.raises(OptionValueError, match="must be a function of"):
        BatchGenerator(build(FAMILY)).generate(prompts(2), max_new_tokens=3, prefix_allowed_tokens_fn=[1])


class Odd(LogitsProcessor):
    """Looks at the whole history, works in place, and keeps nothing."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert input_ids.dtype == torch.long and input_ids.device == scores.device
        assert scores.dtype == torch.float32 and len(input_ids) == len(scores) == 1
        scores[:, int(input_ids.sum()) % 2 :: 2] -= 4
        return scores


class Counting(LogitsProcessor):
    """Keeps what it has seen of one sequence, and checks that it is one."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        ids = input_ids[0].tolist()
        assert not self.seen or ids[:-1] == self.seen, "it is not called once for each token of one sequence"
        self.seen = ids
        return scores + 3 * torch.sin(torch.arange(scores.shape[1]) * (len(ids) + ids[-1]))


def plain(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores.roll(int(input_ids[0, -1]) % 3, dims=-1)


USERS: dict[str, Callable[[], list[Any]]] = {
    "in place": lambda: [Odd()],
    "a function": lambda: [plain],
    "of transformers": lambda: [
        processors.MinLengthLogitsProcessor(30, 7),
        processors.SuppressTokensLogitsProcessor([4, 5]),
        processors.NoRepeatNGramLogitsProcessor(2),
        processors.RepetitionPenaltyLogitsProcessor(1.4, prompt_ignore_length=1),
    ],
    "instead of transformers'": lambda: [processors.TopKLogitsWarper(3), processors.NoRepeatNGramLogitsProcessor(3)],
    "a cut, then a suppression": lambda: [
        processors.TopKLogitsWarper(20),
        processors.SuppressTokensLogitsProcessor(list(range(0, 101, 3))),
    ],
}


@pytest.mark.parametrize("name", USERS)
@pytest.mark.parametrize("factory", [False, True], ids=["list", "factory"])
@pytest.mark.parametrize("options", [{"no_repeat_ngram_size": 2}, {**SAMPLED, "num_return_sequences": 2}], ids=brief)
def test_processors_of_the_user(name: str, factory: bool, options: dict[str, Any], trace: Trace) -> None:
    given: Any = USERS[name]()
    result = BatchGenerator(build(FAMILY), **PAGE).generate(
        prompts(),
        max_new_tokens=NEW_TOKENS,
        seed=2,
        logits_processor=(lambda index, ids: USERS[name]()) if factory else given,
        **options,
    )
    assert_each_as_alone(result, trace, lambda *_: {**options, "logits_processor": USERS[name]()})


def test_a_factory_is_called_once_for_each_sequence(trace: Trace) -> None:
    calls: Counter[tuple[int, tuple[int, ...]]] = Counter()

    def factory(index: int, prompt_token_ids: list[int]) -> list[Any]:
        assert type(index) is int and all(type(token) is int for token in prompt_token_ids)
        calls[index, tuple(prompt_token_ids)] += 1
        return [] if index == 1 else [Counting()] if index % 2 else [Odd(), Counting(), processors.TopKLogitsWarper(9)]

    options = {**SAMPLED, "num_return_sequences": 3, "top_k": 20, "temperature": 1.3}
    result = BatchGenerator(build(FAMILY), **PAGE).generate(
        prompts(), max_new_tokens=NEW_TOKENS, seed=2, logits_processor=factory, **options
    )
    assert calls == {(index, tuple(prompt)): 3 for index, prompt in enumerate(prompts())}

    def options_of(_: int, index: int) -> dict[str, Any]:
        return {**options, "logits_processor": factory(index, [])}

    assert_each_as_alone(result, trace, options_of)


@pytest.mark.parametrize(
    "options",
    [
        {"logits_processor": lambda index, ids: [Counting()]},
        {"watermarking_config": WATERMARKS["SynthID"], "renormalize_logits": True},
        {"guidance_scale": 1.5, "encoder_no_repeat_ngram_size": 2},
    ],
    ids=["factory", "SynthID", "guidance"],
)
@pytest.mark.filterwarnings("ignore:`guidance_scale`")
def test_state_outlives_preemption(options: dict[str, Any], trace: Trace) -> None:
    model: Any = build(FAMILY)
    given = random_prompts(random.Random(6), 97, "distinct", 8)
    memory = pages_of_memory(model, 20, 8)
    result = BatchGenerator(model, kv_memory=memory, **PAGE).generate(
        # With an EOS answers may end at any time, so fewer tokens are expected than there are; this one never comes.
        given,
        max_new_tokens=24,
        eos_token_id=1000,
        **options,
    )
    assert result.report.preemptions > 0

    def options_of(*_: int) -> dict[str, Any]:
        own = {"logits_processor": [Counting()]} if "logits_processor" in options else {}
        return {**options, **own, "max_new_tokens": 24}

    assert_each_as_alone(result, trace, options_of, least=0.7)


def test_what_belongs_to_a_sequence_goes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    samplers: list[Sampler] = []
    most, original = 0, Sampler.__call__

    def watched(self: Sampler, *args: Any) -> list[int]:
        nonlocal most
        tokens = original(self, *args)
        most = max(most, len(self._chains._own))
        samplers.append(self)
        return tokens

    monkeypatch.setattr(Sampler, "__call__", watched)
    model: Any = build(FAMILY)
    generator = BatchGenerator(model, kv_memory=pages_of_memory(model, 12, 8), **PAGE)
    generator.generate([*prompts(6)] * 6, max_new_tokens=4, logits_processor=lambda *_: [Counting()])
    assert 0 < most < 30, "of 36"


# -- errors and warnings ---------------------------------------------------------------------------------------


def nothing(input_ids: torch.Tensor, scores: torch.Tensor) -> None:
    scores -= 1


WRONG: list[tuple[Any, str]] = [
    (Odd(), "is a single Odd: put it into a list"),
    (plain, r"is a single processor \(plain\): put it into a list"),
    (Odd, "is the class Odd: pass a list of instances"),
    ([Odd], "holds the class Odd: make an instance of it"),
    ([5], "holds an int, which is no processor"),
    (5, "must be a list of processors, or a function that gives a list for each sequence, not an int"),
    (lambda index, ids: Odd(), "must give a list of processors, not an Odd"),
    (lambda index, ids: ["x"], "gave a list that holds a string, which is no processor"),
    ([nothing], r"nothing gave None: it must return scores of shape \[1, 101\]"),
    (
        [lambda ids, scores: scores[:, :50]],
        r"gave scores of shape \[1, 50\]: it must return scores of shape \[1, 101\]",
    ),
]


@pytest.mark.parametrize(("given", "message"), WRONG, ids=[message[:30] for _, message in WRONG])
def test_what_is_no_processor_is_an_error_that_says_so(given: Any, message: str) -> None:
    with pytest.raises(OptionValueError, match=f"`logits_processor` .*{message}"):
        BatchGenerator(build(FAMILY)).generate(prompts(), max_new_tokens=3, logits_processor=given)


def test_the_users_own_errors_come_out_as_they_are() -> None:
    class OwnError(Exception):
        pass

    def fails(*_: Any) -> Any:
        raise OwnError("mine")

    generator = BatchGenerator(build(FAMILY))
    for given in ({"logits_processor": [fails]}, {"logits_processor": fails}, {"prefix_allowed_tokens_fn": fails}):
        with pytest.raises(OwnError, match=r"^mine$"):
            generator.generate(prompts(), max_new_tokens=3, **given)
    assert len(generator.generate(prompts(), max_new_tokens=3)) == 5


class Tallying(LogitsProcessor):
    def __init__(self) -> None:
        self.inner = {"calls": 0}

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.inner["calls"] += 1
        return scores


class Preparing(LogitsProcessor):
    """Makes something at its first call, which is not state."""

    mask: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.mask is None:
            self.mask = torch.zeros_like(scores)
        return scores + self.mask


def test_state_in_a_list_for_all_is_warned_of_once() -> None:
    generator = BatchGenerator(build(FAMILY))
    with pytest.warns(UserWarning, match=r"Tallying seems to keep state .*`inner` changes.*Pass a factory"):
        generator.generate(prompts(), max_new_tokens=4, logits_processor=[Tallying()])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generator.generate(prompts(), max_new_tokens=4, logits_processor=[Tallying()])


@pytest.mark.filterwarnings("error")
def test_what_keeps_no_state_is_not_warned_of() -> None:
    generator = BatchGenerator(build(FAMILY))
    for given in ([Preparing(), Odd()], lambda *_: [Tallying()], [processors.SequenceBiasLogitsProcessor(BIAS)]):
        generator.generate(prompts(), max_new_tokens=4, logits_processor=given)
    generator.generate(prompts(1), max_new_tokens=4, logits_processor=[Tallying()])  # there is but one sequence


# -- different settings ----------------------------------------------------------------------------------------


def configs() -> list[GenerationConfig]:
    kinds: list[dict[str, Any]] = [
        {"no_repeat_ngram_size": 2, "max_new_tokens": 7},
        {**SAMPLED, "num_return_sequences": 3, "temperature": 0.8, "top_k": 9, "max_new_tokens": NEW_TOKENS},
        {**SAMPLED, "num_return_sequences": 2, "typical_p": 0.7, "repetition_penalty": 1.2, "max_new_tokens": 5},
        {"min_new_tokens": 3, "max_new_tokens": 9},
    ]
    made = [GenerationConfig(**{"do_sample": False, "eos_token_id": MANY_EOS, **kind}) for kind in kinds]
    return [made[at] for at in (0, 1, 3, 2, 1, 0)]


def test_each_prompt_has_its_own_settings(trace: Trace) -> None:
    own, generator = configs(), BatchGenerator(build(FAMILY), **PAGE)
    result = generator.generate(prompts(6), own, seed=8)
    assert [(g.index, g.sample) for g in result] == [
        (index, sample) for index, config in enumerate(own) for sample in range(config.num_return_sequences or 1)
    ]

    def options_of(_: int, index: int) -> dict[str, Any]:
        chosen = own[index].to_diff_dict()
        chosen.pop("num_return_sequences", None)
        chosen.pop("transformers_version", None)
        return chosen

    assert_each_as_alone(result, trace, options_of)


def test_settings_of_others_change_no_tokens() -> None:
    own, generator = configs(), BatchGenerator(build(FAMILY), **PAGE)
    result = generator.generate(prompts(6), own, seed=8)
    for config in dict.fromkeys(own):
        for generation in generator.generate(prompts(6), config, seed=8):
            if own[generation.index] is config:
                mixed = next(g for g in result if (g.index, g.sample) == (generation.index, generation.sample))
                assert mixed.token_ids == generation.token_ids


def test_rows_with_the_same_settings_are_processed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    for kind in (processors.TemperatureLogitsWarper, processors.SuppressTokensLogitsProcessor):
        original = kind.__call__

        def counted(self: Any, ids: Any, scores: torch.Tensor, original: Any = original) -> torch.Tensor:
            rows.append(len(scores))
            return original(self, ids, scores)

        monkeypatch.setattr(kind, "__call__", counted)
    kinds = [GenerationConfig(do_sample=True, temperature=t, suppress_tokens=[4], max_new_tokens=3) for t in (0.5, 2.0)]
    model: Any = build(FAMILY)
    resolved = [resolve_options(model, kind, {}) for kind in kinds]
    sampler = Sampler(model, resolved * 20, 3)
    requests = [Request(index, np.arange(1, 2 + index % 5, dtype=np.int32), 3) for index in range(40)]
    sampler(torch.randn(40, 101), requests)
    assert rows == [20] * 4


# -- what is told of it ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, SAMPLED, {**SAMPLED, "top_k": 0, "top_p": 0.8, "repetition_penalty": 1.2}], ids=brief
)
def test_to_be_told_of_scores_changes_no_token(options: dict[str, Any]) -> None:
    model: Any = build(FAMILY)
    resolved = [resolve_options(model, None, {"max_new_tokens": 5, **options})] * 9
    requests = [Request(index, np.arange(1, 2 + index, dtype=np.int32), 5) for index in range(9)]
    logits, told = torch.randn(9, 5000, generator=torch.Generator().manual_seed(1)) * 3, []
    tokens = Sampler(model, resolved, 1)(logits, requests)
    assert Sampler(model, resolved, 1, record=lambda *given: told.append(given))(logits, requests) == tokens
    assert [request for requests, _, _ in told for request in requests] == requests
    scores = torch.cat([scores for _, _, scores in told])
    assert torch.equal(torch.cat([raw for _, raw, _ in told]), logits)
    assert (scores[range(9), tokens] > -torch.inf).all()
    if options:
        assert (scores == -torch.inf).any()


@pytest.mark.parametrize(
    "given",
    [
        {"logits_processor": [processors.MinLengthLogitsProcessor(3, 1)]},
        {"logits_processor": lambda index, ids: pytest.fail("it was called")},
        {"prefix_allowed_tokens_fn": allowed_tokens},
        {"guidance_scale": 1.5},
        {"watermarking_config": WATERMARKS["lefthash"]},
        {"watermarking_config": WATERMARKS["SynthID"]},
        {"encoder_repetition_penalty": 1.5},
        {"no_repeat_ngram_size": 2},
    ],
    ids=str,
)
def test_the_device_leaves_to_the_host_what_it_cannot_do(given: dict[str, Any]) -> None:
    model: Any = build(FAMILY)
    reason = why_not(resolve_options(model, None, {"max_new_tokens": 3, **given}), model)
    assert reason is not None and f"`{next(iter(given))}`" in reason
    assert why_not(resolve_options(model, None, {"max_new_tokens": 3, "logits_processor": []}), model) is None
