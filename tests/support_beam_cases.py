"""Beam searches at random, and what ``generate`` gives for each prompt alone. Run by hand, it tries many:

python tests/support_beam_cases.py 300 [seed] [references] [tight] [turns]

``references``: over the references of kernels, as on a GPU. ``tight``: memory for little more than one prompt.
``turns``: groups take turns, as many of them do on a GPU.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from support_calls import noted
from support_device_loop import run_over_references
from support_families import build
from support_parity import cache_of, prove_caches

from hf_batchllm import BatchGenerator, BatchResult
from hf_batchllm.engine import picking
from hf_batchllm.engine.beams import scheduler
from hf_batchllm.engine.loop import Engine
from hf_batchllm.model.states.state_storage import StateStorage

NEAR = 2e-5  # scores that are no further apart may be told apart by rounding alone
# With a cache and without one, transformers' own delta rule gives this tiny model log-probabilities up to 5e-4 apart,
# llama up to 2e-5: one goes on token by token, the other in chunks, and both round to float32 in a float64 model, too.
ROUGH = {"qwen3_next": 1e-3}
# One list of prompts for tests of all sorts.
FAMILY = "llama"
RNG = random.Random(5)
PREFIX = [RNG.randrange(101) for _ in range(23)]
PROMPTS = [PREFIX + [RNG.randrange(101) for _ in range(RNG.randrange(1, 9))] for _ in range(4)] + [[7, 8], PREFIX]
STOPS = [45, 50, 51, 67, 82]  # which come up
OPTIONS: dict[str, Any] = {"num_beams": 4, "max_new_tokens": 8, "num_return_sequences": 2}
CARRYING = ("qwen3_next", "falcon_h1", "lfm2", "jamba")  # layers of theirs carry a state from token to token
FAMILIES = ("llama", "gpt2", "qwen3", "gemma2", "gemma3", "gpt_oss", "mixtral", *CARRYING)


@dataclass
class Case:
    family: str
    prompts: list[list[int]]
    options: dict[str, Any]
    config: dict[str, Any] = field(default_factory=dict)  # fields of BatchConfig
    pages: int = 0  # of the KV cache; 0: as many as it likes
    slots: int = 0  # for states, beside these pages, those of one prompt with beams and prefixes not counted

    def __str__(self) -> str:
        lengths = [len(prompt) for prompt in self.prompts]
        return f"{self.family} {lengths} {self.options} {self.config} pages={self.pages}"


def expected(model: Any, prompt: Sequence[int], **options: Any) -> Any:
    ids = torch.tensor([list(prompt)], device=model.device)
    asked = {"return_dict_in_generate": True, "output_scores": True, **options}
    with torch.no_grad():
        return model.generate(ids, attention_mask=torch.ones_like(ids), **asked)


def without_filling(row: Sequence[int], indices: Sequence[int]) -> list[int]:
    """The tokens that a search made, of a row of new ones."""
    return list(row[: sum(index >= 0 for index in indices)])


def assert_as_generate(case: Case, model: Any, result: BatchResult) -> int:
    """Every answer is that of ``generate``. Returns how many prompts were left to rounding."""
    options, near, apart = case.options, 0, ROUGH.get(case.family, NEAR)
    samples = options.get("num_return_sequences", 1)
    assert len(result) == samples * len(case.prompts)
    for index, prompt in enumerate(case.prompts):
        mine = result[index * samples : (index + 1) * samples]
        out = expected(model, prompt, **options)
        scores = out.sequences_scores.tolist()
        rows = out.sequences[:, len(prompt) :].tolist()
        rows = [without_filling(row, own) for row, own in zip(rows, out.beam_indices.tolist(), strict=True)]
        same = [g.token_ids for g in mine] == rows
        pairs = zip(mine, scores, strict=True)
        close = all(math.isclose(g.score, score, rel_tol=apart, abs_tol=apart) for g, score in pairs)
        if not same and (close or any(map(math.isnan, scores))):  # 0 times infinity, of penalties that meet
            near += 1
            continue
        assert same and close, (
            f"{case}: prompt {index}\n{[(g.token_ids, g.score) for g in mine]}\n{list(zip(rows, scores, strict=True))}"
        )
        for sample, g in enumerate(mine):
            assert (g.index, g.sample, g.prompt_token_ids) == (index, sample, list(prompt))
    return near


def random_prompts(rng: random.Random, vocabulary: int, most: int = 6, longest: int = 30) -> list[list[int]]:
    """Some of which begin alike, and some twice in the list."""
    prompts: list[list[int]] = []
    for _ in range(rng.randrange(1, most + 1)):
        begin = rng.choice(prompts)[: rng.randrange(longest)] if prompts and rng.random() < 0.6 else []
        own = [rng.randrange(vocabulary) for _ in range(rng.randrange(0 if begin else 1, longest))]
        prompts.append(begin + own if begin + own else [1])
    return prompts


def random_options(rng: random.Random, vocabulary: int) -> dict[str, Any]:
    width = rng.randrange(2, 9)
    options: dict[str, Any] = {"num_beams": width, "max_new_tokens": rng.randrange(1, rng.choice([4, 16, 16, 30]))}
    if rng.random() < 0.6:
        options["num_return_sequences"] = rng.randrange(1, width + 1)
    if rng.random() < 0.7:
        options["early_stopping"] = rng.choice([False, True, "never"])
    if rng.random() < 0.7:
        options["length_penalty"] = rng.choice([0.0, 0.5, 1.0, 2.0, -1.0, -0.3, 5.0])
    if rng.random() < 0.8:
        # Of a vocabulary of about a hundred, so many that some come.
        options["eos_token_id"] = rng.sample(range(vocabulary), rng.choice([1, 1, 2, 3, 20]))
        options["pad_token_id"] = rng.choice([0, 3])
    for chance, more in (
        (0.15, {"repetition_penalty": 1.3}),
        (0.15, {"no_repeat_ngram_size": 2}),
        (0.1, {"bad_words_ids": [[5], [6, 7]]}),
        (0.15, {"min_new_tokens": 3}),
        (0.1, {"min_length": 12}),
        (0.1, {"forced_eos_token_id": 9}),
        (0.1, {"suppress_tokens": [1, 2, 3]}),
        (0.1, {"begin_suppress_tokens": [4]}),
        (0.1, {"sequence_bias": {(8,): 2.0}}),
        (0.1, {"exponential_decay_length_penalty": (2, 1.2)}),
        (0.1, {"encoder_repetition_penalty": 1.2}),
        (0.1, {"encoder_no_repeat_ngram_size": 2}),
        (0.1, {"renormalize_logits": True}),
        (0.1, {"remove_invalid_values": True}),
    ):
        if rng.random() < chance and not ("exponential_decay_length_penalty" in more and "eos_token_id" not in options):
            options |= more
    return options


def random_case(rng: random.Random, families: Sequence[str] = FAMILIES, tight: bool = False) -> Case:
    family = rng.choice(families)
    vocabulary = build(family).config.get_text_config().vocab_size
    options = random_options(rng, vocabulary)
    config: dict[str, Any] = {"page_size": rng.choice([1, 2, 3, 4, 7, 16, 64])}
    if rng.random() < 0.5:
        config["max_batch_tokens"] = rng.choice([1, 2, 3, 5, 8, 20, 64])
    case = Case(family, random_prompts(rng, vocabulary), options, config)
    if tight or rng.random() < 0.5:
        size, new = config["page_size"], options["max_new_tokens"] - 1
        least = max(-(-len(prompt) // size) for prompt in case.prompts) - options["num_beams"] * (-new // size)
        case.pages = least + rng.choice([0, 0, 1, 3, 10])
        case.slots = rng.choice([0, 0, 1, 5, 20])
    return case


def groups_of(engine: Any) -> list[Any]:
    """Of each prompt of a beam search."""
    return [*engine.collector.groups.values()]


@contextmanager
def proved() -> Iterator[list[int]]:
    """The cache is proved whole after every step, over memory that holds NaN. Gives the pages held after each."""
    step, state_of, held = Engine._launch, StateStorage.of, []

    def checked(self: Engine, given: Any) -> Any:
        result = step(self, given)
        cache = cache_of(self.scheduler)
        groups = [group for group in groups_of(self) if not group.root.done]
        cache.check_integrity([unit for group in groups for unit in (group.root, *group.beams) if unit.in_use])
        held.append(cache.num_pages - cache.free_pages)
        return result

    def poisoned_states(self: StateStorage, call: int, *given: Any) -> torch.Tensor:
        new = call == len(self._states)
        states = state_of(self, call, *given)
        return states.fill_(float("nan")) if new else states

    with pytest.MonkeyPatch.context() as patch:
        prove_caches(patch)
        patch.setattr(Engine, "_launch", checked)
        patch.setattr(StateStorage, "of", poisoned_states)
        yield held


def clock_of(patch: pytest.MonkeyPatch, each_step: float = 0.0) -> list[float]:
    """The clock of time limits, in a list of one: it stands still but for so many seconds of each step."""
    now = [0.0]
    for place in ("sampling.stopping", "engine.call"):
        patch.setattr(f"hf_batchllm.{place}.time.time", lambda: now[0])

    def note(*_: Any) -> None:
        now[0] += each_step

    noted(patch, Engine, "_launch", note)
    return now


def take_turns(patch: pytest.MonkeyPatch) -> None:
    """From here on there are two steps on their way, however few rows they have."""
    patch.setitem(picking.DEPTH, "cpu", 2)
    patch.setattr(scheduler, "TURNS_FROM", 1)


def memory_of(case: Case, model: Any) -> int:
    """``kv_memory`` for the pages and slots of a case."""
    architecture = BatchGenerator(model).architecture
    alone = 1 + case.options.get("num_beams", 1) + len(case.prompts)  # prefixes lie in each other, each in a prompt
    pages = case.pages * case.config["page_size"] * architecture.kv_bytes_per_token
    return pages + (alone + case.slots) * architecture.slot_bytes


def run(case: Case, model: Any = None) -> tuple[BatchResult, int]:
    model = model or build(case.family)
    config = dict(case.config)
    if case.pages:
        config["kv_memory"] = memory_of(case, model)
    with proved(), BatchGenerator(model, **config) as generator:
        result = generator.generate(case.prompts, progress=False, **case.options)
    return result, assert_as_generate(case, model, result)


def main(count: int, seed: int) -> None:
    rng = random.Random(seed)
    torch.set_num_threads(1)
    prompts = near = preempted = failed = again = 0
    for number in range(count):
        case = random_case(rng, tight="tight" in sys.argv)
        try:
            result, close = run(case)
        except Exception as error:
            failed += 1
            print(f"[{number}] {type(error).__name__}: {str(error)[:1500]}\n  {case}", flush=True)
            continue
        again += result.report.recomputed_tokens
        prompts, near = prompts + len(case.prompts), near + close
        preempted += result.report.preemptions if result.report else 0
    print(f"{count} cases, {prompts} prompts, {near} left to rounding, {failed} failed")
    print(f"{preempted} preemptions, {again} tokens computed again")


def check(prompts: Any = PROMPTS, family: str = FAMILY, config: dict[str, Any] | None = None, **options: Any) -> Any:
    case = Case(family, prompts, OPTIONS | options, {"page_size": 4} if config is None else config)
    result, near = run(case)
    assert near <= len(prompts) // 4
    return result


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patched:
        if "references" in sys.argv:
            run_over_references(patched)
        if "turns" in sys.argv:
            take_turns(patched)
        main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
