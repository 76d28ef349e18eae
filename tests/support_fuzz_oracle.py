"""A row of a case beside ``model.generate`` for its prompt alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import support_fuzz_models as models
import torch
from support_families import logits_of_rows
from support_fuzz_calls import Mismatch, expect
from support_fuzz_cases import Ask, Case
from support_fuzz_options import Options
from transformers import LogitsProcessor

from hf_batchllm import Generation
from hf_batchllm.inputs.seeds import noise_key
from hf_batchllm.kernels.reference.sample_torch import exponential

NEAR_TIE = 1e-4  # of the reference's two best scores: rounding decides
CLOSE = 1e-3  # log-probabilities and scores of beams
# Transformers' own delta rule gives a tiny model log-probabilities up to 3e-3 from those in float64, in one pass and
# token by token. With an adapter everywhere hidden states come to 2,000, and log-probabilities to 1e-2 from those in
# float64. Token by token, ``generate`` gives Nemotron-H logits up to 4e-3 from those in float64; one pass gives 6e-6,
# and this library 2e-6. All limits are so many times as wide.
_ROUGH = {"qwen3_next": 20.0, "nemotron_h": 20.0, "peft:everywhere": 10.0}
_JITTERS = 6  # in some of which what is left to rounding comes out otherwise
_NOT_OF_GENERATE = ("logprobs", "prompt_logprobs")
_TRIES = 20  # of a draw that may find nothing left to draw from


def roughness(family: str) -> float:
    return _ROUGH.get(family, 1.0)


class _CannotCome(Mismatch):
    """A token that ``generate`` has no chance of drawing."""


class Oracle:
    """``model``: another than the family's, which ``generate`` is run of."""

    def __init__(self, case: Case, model: Any = None) -> None:
        self.case = case
        self._model = model
        self._rough = roughness(case.family)

    def check(self, index: int, ask: Ask, rows: Sequence[Generation]) -> int:
        """How many of the prompt's rows rounding decides. ``index``: the place that its seed is for."""
        if models.HALVED:
            return 0
        options = self._options(ask)
        with models.as_its_user_runs_it(self.case.family, self.case.device, ask.adapter, self._model) as model:
            if options.get("num_beams", 1) > 1:
                # The noise of a search that draws is not laid out as in ``generate``: other calls are compared.
                return 0 if options.get("do_sample") else _check_beams(model, ask, rows, options, self._rough)
            expect(len(rows) == options.pop("num_return_sequences", 1), f"{len(rows)} rows")
            if options.get("do_sample"):
                seeds: Any = self.case.one_seed if self.case.one_seed is not None else [ask.seed]
                place = index if self.case.one_seed is not None else 0
                return sum(not _check_sampled(model, ask, row, options, seeds, place, self._rough) for row in rows)
            return sum(not _check_greedy(model, ask, row, options, self._rough) for row in rows)

    def raises(self, asks: Sequence[Ask]) -> bool:
        """Whether ``generate`` raises for some prompt; where it draws, in one of several tries."""
        return any(self._raises(ask) for ask in asks)

    def _raises(self, ask: Ask) -> bool:
        options = self._options(ask)
        with models.as_its_user_runs_it(self.case.family, self.case.device, ask.adapter, self._model) as model:
            for _ in range(_TRIES if options.get("do_sample") else 1):
                try:
                    with torch.random.fork_rng(), pytest.MonkeyPatch.context() as patch:
                        patch.setattr(torch, "multinomial", as_on_a_cpu(torch.multinomial))
                        _generate(model, ask.ids, options)
                except Exception:
                    return True
        return False

    def _options(self, ask: Ask) -> Options:
        options = {name: value for name, value in self.case.options_of(ask).items() if name not in _NOT_OF_GENERATE}
        return options | ({"tokenizer": models.letters()} if "stop_strings" in options else {})


def as_on_a_cpu(draw: Callable[..., Any]) -> Callable[..., Any]:
    """An error where there is nothing to draw from: a GPU ends the process with a failed assertion."""

    def checked(shares: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not bool((shares.isfinite() & (shares >= 0)).all() and (shares.sum(-1) > 0).all()):
            raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
        return draw(shares, *args, **kwargs)

    return checked


def _generate(model: Any, ids: Sequence[int], options: Options) -> Any:
    prompt = torch.tensor([list(ids)], device=model.device)
    wanted = {"pad_token_id": 0, **options, "return_dict_in_generate": True, "output_scores": True}
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), **wanted)


def _check_greedy(model: Any, ask: Ask, row: Generation, options: Options, rough: float) -> bool:
    """False if rounding decides somewhere in the row, so that it was looked at up to there only."""
    out = _generate(model, ask.ids, options | {"output_logits": True})
    expected, scores = out.sequences[0, len(ask.ids) :].tolist(), torch.cat(out.scores)
    best = scores.topk(2, dim=-1).values
    gaps = best[:, 0] - best[:, 1]
    close = (~(gaps >= rough * NEAR_TIE)).nonzero()  # NaN, too: nothing is left to choose from
    sure = int(close[0]) if len(close) else len(expected)
    if row.token_ids != expected:
        differ = next(
            (at for at, pair in enumerate(zip(row.token_ids, expected, strict=False)) if pair[0] != pair[1]), None
        )
        at = min(len(row.token_ids), len(expected)) if differ is None else differ
        expect(at >= sure, f"{row.token_ids} and generate gives {expected}: they differ at token {at}")
    raw = torch.cat(out.logits)[:sure].float().log_softmax(dim=-1)
    _check_logprobs(model, row, raw, sure, rough)
    if sure == len(expected):
        _check_finish(model, row, ask, options)
    return sure == len(expected)


def _check_sampled(
    model: Any, ask: Ask, row: Generation, options: Options, seeds: Any, index: int, rough: float
) -> bool:
    try:
        return _check_draws(model, ask, row, options, seeds, index, rough)
    except _CannotCome:
        processors = options.get("logits_processor", [])
        for seed in range(_JITTERS):  # of equals that a filter leaves one of, any may stay
            try:
                jitter = options | {"logits_processor": [*processors, _Jitter(seed, rough)]}
                _check_draws(model, ask, row, jitter, seeds, index, rough)
                return False
            except Mismatch:
                pass
        raise


def _check_draws(model: Any, ask: Ask, row: Generation, options: Options, seeds: Any, index: int, rough: float) -> bool:
    """``generate`` is run along the row's tokens, and asked at each what it would have drawn from."""
    sure, step = [], 0

    def along_the_row(probabilities: torch.Tensor, num_samples: int) -> torch.Tensor:
        nonlocal step
        if step == len(row.token_ids):
            raise Mismatch(f"the row ended after {step} tokens, and generate goes on: {row.token_ids}")
        token, shares = row.token_ids[step], probabilities[0].double().cpu()
        if not float(shares[token]) > 0:
            raise _CannotCome(f"token {step} of {row.token_ids} cannot come")
        found = _drawn(shares, token, noise_key(seeds, index), row.sample, step, rough)
        expect(found is not None, f"token {step} of {row.token_ids} is not what its noise picks")
        sure.append(found)
        step += 1
        return torch.tensor([[token]], device=probabilities.device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "multinomial", along_the_row)
        out = _generate(model, ask.ids, options | {"output_logits": True})
    tokens = out.sequences[0, len(ask.ids) :].tolist()
    expect(tokens == row.token_ids, f"generate ends after {tokens} and the row is {row.token_ids}")
    _check_logprobs(model, row, torch.cat(out.logits).float().log_softmax(dim=-1), len(tokens), rough)
    _check_finish(model, row, ask, options)
    return all(sure)


def _drawn(shares: torch.Tensor, token: int, key: tuple[int, int], sample: int, step: int, rough: float) -> bool | None:
    """Whether this token is the best after its noise: surely, hardly (False), or not (None)."""
    seed, number = key
    signed = seed - 2**64 if seed >= 2**63 else seed
    where = (torch.tensor([each]) for each in (signed, number, sample, step))
    scores = shares.log() - exponential(torch.arange(len(shares)), *where).log()
    behind = float(scores.max() - scores[token])
    if behind > rough * NEAR_TIE:
        return None
    two = scores.topk(2).values
    return bool(two[0] - two[1] > rough * NEAR_TIE)


class _Jitter(LogitsProcessor):
    """As large as rounding."""

    def __init__(self, seed: int, rough: float) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._size = rough * NEAR_TIE

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(scores.shape, generator=self._generator) - 0.5
        return scores + (self._size * noise).to(scores.device)


def _check_beams(model: Any, ask: Ask, rows: Sequence[Generation], options: Options, rough: float) -> int:
    mine = [row.token_ids for row in rows]
    expected, scores = _searched(model, ask, options)
    expect(len(expected) == len(mine), f"{len(mine)} answers, and generate gives {len(expected)}")
    if mine == expected:
        for row, score in zip(rows, scores, strict=True):
            near = rough * CLOSE
            close = row.score == score or math.isclose(row.score or 0.0, score, rel_tol=near, abs_tol=near)
            expect(close or math.isnan(score), f"the score {row.score} and generate's {score}")
        return 0
    if any(map(math.isnan, scores)):  # all are equally good
        return len(rows)
    if model.device.type != "cpu" and _real(mine, [row.score or 0.0 for row in rows]) == _real(expected, scores):
        return len(rows)  # a GPU's topk says nothing of the order of equals, and fillers are equal
    processors = options.get("logits_processor", [])
    for seed in range(_JITTERS):
        jitter = options | {"logits_processor": [*processors, _Jitter(seed, rough)]}
        if _searched(model, ask, jitter)[0] != expected:
            return len(rows)
    found = list(zip(mine, (row.score for row in rows), strict=True))
    raise Mismatch(f"beams gave\n    {found}\nand generate\n    {list(zip(expected, scores, strict=True))}")


def _real(answers: list[list[int]], scores: Iterable[float]) -> list[list[int]]:
    """Without those that fill a search's places where it has found too few: their scores are about -1e9."""
    return [answer for answer, score in zip(answers, scores, strict=True) if score > -1e8]


def _searched(model: Any, ask: Ask, options: Options) -> tuple[list[list[int]], list[float]]:
    out = _generate(model, ask.ids, options)
    rows = out.sequences[:, len(ask.ids) :].tolist()
    made = [sum(place >= 0 for place in places) for places in out.beam_indices.tolist()]
    return [row[:count] for row, count in zip(rows, made, strict=True)], out.sequences_scores.tolist()


def _check_logprobs(model: Any, row: Generation, logprobs: torch.Tensor, sure: int, rough: float) -> None:
    """``logprobs`` [tokens, vocabulary]: of the reference's own logits."""
    if row.logprobs is not None:
        expect(len(row.logprobs) == len(row.token_ids), f"{len(row.logprobs)} log-probabilities")
        for step, token in enumerate(row.token_ids[:sure]):
            _same_values(row.logprobs[step], logprobs[step], token, f"token {step}", rough)
    if row.prompt_logprobs is not None:
        ids = row.prompt_token_ids
        expect(len(row.prompt_logprobs) == len(ids) and row.prompt_logprobs[0] is None, "prompt_logprobs are too many")
        of_prompt = logits_of_rows(model, [ids])[0].float().log_softmax(dim=-1)
        for step, token in enumerate(ids[1:], 1):
            _same_values(
                row.prompt_logprobs[step] or {}, of_prompt[step - 1], token, f"token {step} of the prompt", rough
            )


def _same_values(found: dict[int, float], expected: torch.Tensor, token: int, what: str, rough: float) -> None:
    expect(token in found, f"{what}: its own log-probability is missing")
    for each, value in found.items():
        close = math.isclose(value, float(expected[each]), abs_tol=rough * CLOSE)
        expect(close, f"{what}: the log-probability of {each} is {value}, and {float(expected[each])} by generate")
    if len(found) > 1:
        best = expected.topk(len(found) - 1).values.tolist()
        for value, other in zip(sorted(found.values(), reverse=True), best, strict=False):
            close = math.isclose(value, other, abs_tol=rough * CLOSE)
            expect(close, f"{what}: {value} is among the most likely, not {other}")


def _check_finish(model: Any, row: Generation, ask: Ask, options: Options) -> None:
    new, total = options.get("max_new_tokens"), options.get("max_length")
    limit = new if new is not None else total - len(ask.ids) if total is not None else 20
    eos = options.get("eos_token_id", model.generation_config.eos_token_id)
    stops = set(eos if isinstance(eos, list) else [] if eos is None else [eos])
    length = len(row.token_ids)
    expect(0 < length <= limit, f"{length} new tokens, and the limit is {limit}")
    if length < limit or row.token_ids[-1] in stops:
        expect(row.finish_reason == "stop", f"{row.finish_reason}, and it stopped: {row.token_ids}")
    elif "stop_strings" not in options and "stopping_criteria" not in options:
        expect(row.finish_reason == "length", f"{row.finish_reason}, and the limit of {limit} was reached")
