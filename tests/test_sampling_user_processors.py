"""Processors, factories of them and prefix functions of the user's own, each with rows of one sequence."""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support_distributions import brief
from support_families import build, random_prompts
from support_generate_alone import (
    BIAS,
    FAMILY,
    PAGE,
    SAMPLED,
    SYNTH_ID,
    Trace,
    as_alone,
    prompts,
)
from support_generate_alone import trace as trace  # a fixture
from support_parity import pages_of_memory
from transformers import GenerationConfig, LogitsProcessor
from transformers.generation import logits_process as processors

from hf_batchllm import BatchGenerator
from hf_batchllm.sampling.host_sampler import HostSampler


def allowed_tokens(batch_id: int, ids: torch.Tensor) -> list[int]:
    assert ids.dtype == torch.long and ids.ndim == 1
    return list(range((batch_id * 7 + len(ids)) % 50, 101, 1 + batch_id % 3))


def test_prefix_allowed_tokens_fn_knows_the_row_of_the_result(trace: Trace) -> None:
    options = {**SAMPLED, "top_k": 0, "num_return_sequences": 3}

    def theirs(row: int, _: int) -> dict[str, Any]:
        return {**options, "prefix_allowed_tokens_fn": lambda _, ids: allowed_tokens(row, ids)}

    as_alone(trace, {**options, "prefix_allowed_tokens_fn": allowed_tokens}, theirs)


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


class Warmer(processors.TemperatureLogitsWarper):
    """Derived from a class that takes all rows, and looks at a row's length: it has to say itself what it takes."""

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.roll(ids.shape[1] % 5, dims=1)


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
    "a call of its own": lambda: [Warmer(2.0)],
}


@pytest.mark.some_cases
@pytest.mark.parametrize(("name", "factory"), [*((name, False) for name in USERS), ("of transformers", True)])
@pytest.mark.parametrize("options", [{"no_repeat_ngram_size": 2}, {**SAMPLED, "num_return_sequences": 2}], ids=brief)
def test_processors_of_the_user(name: str, factory: bool, options: dict[str, Any], trace: Trace) -> None:
    given: Any = (lambda index, ids: USERS[name]()) if factory else USERS[name]()
    as_alone(trace, {**options, "logits_processor": given}, lambda *_: {**options, "logits_processor": USERS[name]()})


def test_a_factory_is_called_once_for_each_sequence(trace: Trace) -> None:
    calls: Counter[tuple[int, tuple[int, ...]]] = Counter()

    def factory(index: int, prompt_token_ids: list[int]) -> list[Any]:
        assert type(index) is int and all(type(token) is int for token in prompt_token_ids)
        calls[index, tuple(prompt_token_ids)] += 1
        return [] if index == 1 else [Counting()] if index % 2 else [Odd(), Counting(), processors.TopKLogitsWarper(9)]

    options = {**SAMPLED, "num_return_sequences": 3, "top_k": 20, "temperature": 1.3}
    as_alone(
        trace,
        {**options, "logits_processor": factory},
        lambda _, index: {**options, "logits_processor": factory(index, [])},
    )
    ours = {key: count for key, count in calls.items() if key[1]}
    assert ours == {(index, tuple(prompt)): 3 for index, prompt in enumerate(prompts())}


@pytest.mark.some_cases
@pytest.mark.parametrize(
    "options",
    [
        {"logits_processor": lambda index, ids: [Counting()]},
        {"watermarking_config": SYNTH_ID, "renormalize_logits": True},
        {"guidance_scale": 1.5, "encoder_no_repeat_ngram_size": 2},
    ],
    ids=["factory", "SynthID", "guidance"],
)
@pytest.mark.filterwarnings("ignore:`guidance_scale`")
def test_state_outlives_preemption(options: dict[str, Any], trace: Trace) -> None:
    def theirs(*_: int) -> dict[str, Any]:
        own = {"logits_processor": [Counting()]} if "logits_processor" in options else {}
        return {**options, **own, "max_new_tokens": 24}

    memory = pages_of_memory(build(FAMILY), 20, 8)
    # With an EOS answers may end at any time, so fewer tokens are expected than there are; this one never comes.
    given = {"max_new_tokens": 24, "eos_token_id": 1000, **options}
    asked = random_prompts(random.Random(6), 97, "distinct", 8)
    result = as_alone(trace, given, theirs, asked, least=0.7, kv_memory=memory)
    assert result.report.preemptions > 0


def test_what_belongs_to_a_sequence_goes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    samplers: list[HostSampler] = []
    most, original = 0, HostSampler.without_waiting

    def watched(self: HostSampler, *args: Any) -> torch.Tensor:
        nonlocal most
        tokens = original(self, *args)
        most = max(most, len(self._chains._own))
        samplers.append(self)
        return tokens

    monkeypatch.setattr(HostSampler, "without_waiting", watched)
    model: Any = build(FAMILY)
    generator = BatchGenerator(model, kv_memory=pages_of_memory(model, 12, 8), **PAGE)
    generator.generate([*prompts(6)] * 6, max_new_tokens=4, logits_processor=lambda *_: [Counting()])
    assert 0 < most < 30, "of 36"


class AfterTheLatest(LogitsProcessor):
    """Bans tokens by the latest one, in place."""

    def __init__(self, add: int = 1) -> None:
        self.add = add
        self.shapes: list[tuple[int, ...]] = []

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.shapes.append((*ids.shape, len(scores)))
        banned = (torch.arange(scores.shape[1]) + ids[:, -1:] + self.add) % 3 == 0
        return scores.masked_fill_(banned, -torch.inf)


class SaysSo(AfterTheLatest):
    supports_continuous_batching = True


WAYS: list[dict[str, Any]] = [{}, {**SAMPLED, "repetition_penalty": 1.2}, {"num_beams": 2}]


@pytest.mark.parametrize("options", WAYS, ids=brief)
@pytest.mark.filterwarnings("ignore:.*keep state", "ignore:.*no effect")
def test_one_that_says_so_gets_all_rows_at_once(options: dict[str, Any]) -> None:
    generator = BatchGenerator(build(FAMILY), **PAGE)
    asked = {"max_new_tokens": 6, "seed": 2, **options}
    one_by_one = generator.generate(prompts(), logits_processor=[AfterTheLatest()], **asked)
    together = SaysSo()
    result = generator.generate(prompts(), logits_processor=[together], **asked)
    assert result.token_ids == one_by_one.token_ids
    assert all(width == 1 for _, width, _ in together.shapes)
    assert max(rows for rows, _, _ in together.shapes) > 4
    # Those that a factory makes serve a sequence each.
    each = generator.generate(prompts(), logits_processor=lambda index, _: [SaysSo(index)], **asked)
    alone = generator.generate(prompts(), logits_processor=lambda index, _: [AfterTheLatest(index)], **asked)
    assert each.token_ids == alone.token_ids != result.token_ids


@pytest.mark.filterwarnings("ignore:.*keep state")
def test_it_is_called_once_for_a_step_whose_scores_are_wanted() -> None:
    together = SaysSo()
    ids = torch.tensor([[5, 6, 7], [8, 9, 10]])
    output = BatchGenerator(build(FAMILY), **PAGE).generate(
        input_ids=ids, max_new_tokens=5, do_sample=True, top_k=2, seed=1, logits_processor=[together],
        output_scores=True, return_dict_in_generate=True,
    )  # fmt: skip
    assert len(together.shapes) == 5
    drawn = output.sequences[:, 3:]
    scores = torch.stack(output.scores, dim=1)
    assert torch.isfinite(scores.gather(2, drawn[:, :, None])).all()


def test_its_error_says_whose_it_is() -> None:
    class Bad(SaysSo):
        def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            raise KeyError("no")

        supports_continuous_batching = True

    with pytest.raises(KeyError) as caught:
        BatchGenerator(build(FAMILY), **PAGE).generate(prompts(), max_new_tokens=2, logits_processor=[Bad()])
    assert "raised in your code, in the logits processor Bad" in caught.value.__notes__


# -- errors and warnings ---------------------------------------------------------------------------------------


def test_the_users_own_errors_come_out_as_they_are() -> None:
    class OwnError(Exception):
        pass

    def fails(*_: Any) -> Any:
        raise OwnError("mine")

    generator = BatchGenerator(build(FAMILY))
    for given in ({"logits_processor": [fails]}, {"logits_processor": fails}, {"prefix_allowed_tokens_fn": fails}):
        with pytest.raises(OwnError) as caught:
            generator.generate(prompts(), max_new_tokens=3, **given)
        assert str(caught.value) == "mine"
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
