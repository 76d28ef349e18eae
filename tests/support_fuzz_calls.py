"""One call of the library for a case, and what must be true after every call."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import support_fuzz_models as models
import torch
from support_drafts import always_pay
from support_fuzz_cases import Ask, Case
from support_parity import prove_caches
from transformers import GenerationConfig

from hf_batchllm import BatchGenerator, Generation, PromptError
from hf_batchllm.engine.cost import Times
from hf_batchllm.engine.drafts import assisted
from hf_batchllm.engine.drafts.assisted import Assisted
from hf_batchllm.errors import CacheMemoryError
from hf_batchllm.model.runner import ModelRunner

_MOST_TRIES = 2000
_BLOCK = 32  # rows


class Mismatch(AssertionError):
    """Something is not as it must be."""


def expect(true: bool, what: str) -> None:
    if not true:
        raise Mismatch(what)


SEEN: Counter[str] = Counter()  # what has happened in all calls so far


@contextmanager
def running_as(case: Case) -> Iterator[None]:
    """On a CPU, where the case asks for it, calls run as on a GPU. The cache is proved whole after every step."""
    with pytest.MonkeyPatch.context() as patch:
        prove_caches(patch)
        if case.device_loop:
            _run_as_on_a_gpu(patch)
            if case.config.get("invariant"):
                multiply_in_blocks(patch)
                if not case.exact:
                    patch.setattr("hf_batchllm.engine.look.refuse_by_trial", lambda *_: None)
        yield


def _run_as_on_a_gpu(patch: pytest.MonkeyPatch) -> None:
    from support_device_loop import run_over_references

    run_over_references(patch)


def multiply_in_blocks(patch: pytest.MonkeyPatch) -> None:
    """As a GPU's products are, with ``invariant=True``: a row's bits do not depend on the others."""
    own = torch.nn.functional.linear

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        padded = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % _BLOCK))
        made = [own(some, weight, bias) for some in padded.split(_BLOCK)]
        return torch.cat([rows.new_empty(0, len(weight)), *made])[: len(rows)].view(*x.shape[:-1], len(weight))

    patch.setattr(torch.nn.functional, "linear", linear)
    for module in ("engine.resources", "model.model_in_use"):  # which would refuse that as custom code
        patch.setattr(f"hf_batchllm.{module}.refuse_what_varies", lambda *_: None)
    # Nor are layers to run unfused for its sake.
    patch.setattr("hf_batchllm.model.inspection.own_code._replacing_torchs", lambda: iter(()))


class _Begun(Exception):
    """All checks are over."""


def _begin(*given: Any, **named: Any) -> Any:
    raise _Begun


class Calls:
    """Calls for the prompts of a case. ``model``: another than the family's."""

    def __init__(self, case: Case, model: Any = None) -> None:
        self.case = case
        self.model = models.model_of(case.family, case.device) if model is None else model
        self._dice = random.Random(f"drafts of {case.name}")

    def generator(self, config: dict[str, Any], asks: Sequence[Ask]) -> BatchGenerator:
        config = dict(config)
        more = config.pop("kv_pages", None)
        if more is not None:
            config["kv_memory"] = self._least_memory(config, asks, more)
        return BatchGenerator(self.model, models.words(), **config)

    def _least_memory(self, config: dict[str, Any], asks: Sequence[Ask], more: int) -> int:
        """Bytes of so many pages more than a call for these prompts is not refused with."""
        with BatchGenerator(self.model, **config) as probe:
            page = probe.architecture.kv_bytes_per_token * probe.config.page_size
            page = page or probe.architecture.slot_bytes  # where no layer attends, states are all that takes memory
        longest = max((len(ask.ids) for ask in asks), default=1)
        pages = max(1, longest // config.get("page_size", 64))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ModelRunner, "launch", _begin)
            patch.setattr("hf_batchllm.engine.look.refuse_by_trial", lambda *_: None)
            patch.setattr("hf_batchllm.engine.look.try_wide_passes", lambda *_: None)
            for _ in range(_MOST_TRIES):
                with BatchGenerator(self.model, models.words(), **config, kv_memory=pages * page) as trial:
                    try:
                        trial.generate(**self.arguments(asks))
                    except (PromptError, CacheMemoryError) as error:
                        if "KV cache" not in str(error):
                            raise
                    except _Begun:
                        return (pages + more) * page
                pages += 1 + pages // 16
        raise Mismatch("no amount of memory will do")

    def arguments(self, asks: Sequence[Ask], prompts: Any = None) -> dict[str, Any]:
        """Of ``generate`` and ``stream``. ``prompts``: these, in another form."""
        case = self.case
        given: dict[str, Any] = {"prompts": [ask.ids for ask in asks] if prompts is None else prompts}
        given |= {"progress": False, **case.options}
        if any(ask.own is not None for ask in asks):
            given["generation_config"] = [GenerationConfig(**(ask.own or {})) for ask in asks]
        if any("stop_strings" in case.options_of(ask) for ask in asks):
            given["tokenizer"] = models.letters()
        if case.kind != "greedy":
            given["seed"] = [ask.seed for ask in asks] if case.one_seed is None else case.one_seed
        if case.family.startswith(models.PEFT):
            given["adapter"] = [ask.adapter for ask in asks]
        return given

    def _drafts(self) -> dict[str, Any]:
        """Tokens are guessed in some calls, which changes no answer."""
        if self.case.kind == "beams" or self._dice.random() < 0.5:
            return {}
        if self._dice.random() < 0.4:
            alike = self.case.family, self._dice.choice((0.0, 0.05, 0.05))
            others = ("llama", 0.05), ("gemma3", 0.0), ("gpt2", 0.0)
            family, noise = alike if self._dice.random() < 0.7 else self._dice.choice(others)
            most = self._dice.choice((None, None, 1, 3, 6))
            return {
                "assistant_model": models.assistant_of(family, self.case.device, noise), "num_assistant_tokens": most
            }  # fmt: skip
        return {
            "prompt_lookup_num_tokens": self._dice.choice((*range(1, 10), 16, 25)),
            "max_matching_ngram_size": self._dice.randint(1, 3),
        }

    def rows(
        self, asks: Sequence[Ask], generator: BatchGenerator | None = None, **arguments: Any
    ) -> list[list[Generation]]:
        """The samples of each prompt. ``generator``: one that stays; otherwise it is the case's own, and closed."""
        with nullcontext(generator) if generator else self.generator(self.case.config, asks) as used:
            state = torch.get_rng_state(), random.getstate()
            with pytest.MonkeyPatch.context() as patch:
                # As if steps of any size took as long: drafts always pay.
                patch.setattr(Times, "line", lambda _: (1.0, 0.0))
                always_pay(patch)
                patch.setattr(Assisted, "_may_read", lambda *_: True)
                patch.setattr(assisted, "_SURE", 0.0)
                result = used.generate(**self.arguments(asks), **arguments | self._drafts())
            expect(
                torch.equal(state[0], torch.get_rng_state()) and state[1] == random.getstate(),
                "the call has moved a global random generator",
            )
            check_report(self.case, asks, result)
        return by_ask(asks, result)


def by_ask(asks: Sequence[Ask], result: Sequence[Generation]) -> list[list[Generation]]:
    rows: list[list[Generation]] = [[] for _ in asks]
    for generation in result:
        rows[generation.index].append(generation)
    for ask, row in zip(asks, rows, strict=True):
        expect(bool(row), f"no result for {ask}")
        expect([each.sample for each in row] == list(range(len(row))), f"samples are missing or out of order: {row}")
        for each in row:
            expect(each.error is None and each.finish_reason != "error", f"an error: {each}")
            expect(each.prompt_token_ids == ask.ids, f"the prompt {ask.ids} became {each.prompt_token_ids}")
    return rows


def check_report(case: Case, asks: Sequence[Ask], result: Any) -> None:
    """What went through the model adds up, and no count is below nothing."""
    report = result.report
    for name in ("preemptions", "recomputed_tokens", "cached_tokens", "idle_tokens", "accepted_tokens"):
        SEEN[name] += getattr(report, name)
    SEEN["calls"] += 1
    SEEN["shared_tokens"] += round(report.saving * report.prompt_tokens)
    samples = sum(len(result_row.prompt_token_ids) for result_row in result)
    counts = {name: value for name, value in vars(report).items() if isinstance(value, int | float)}
    del counts["draft_seconds"]  # guesses may cost more than they bring
    expect(all(value >= 0 for value in counts.values()), f"a count is less than nothing: {counts}")
    expect(report.sequences == report.finished == len(result), f"{report.finished} of {report.sequences} finished")
    expect(report.peak_memory <= report.kv_memory, f"{report.peak_memory:,} of {report.kv_memory:,} bytes were used")
    expect(report.computed_tokens + report.cached_tokens <= report.prompt_tokens, f"more computed than asked: {counts}")
    if case.kind == "beams":
        return
    expect(report.prompt_tokens == samples, f"{report.prompt_tokens} prompt tokens and not {samples}")
    decoded = sum(max(len(row.token_ids) - 1, 0) for row in result)
    expect(report.new_tokens == sum(len(row.token_ids) for row in result), f"{report.new_tokens} new tokens")
    parts = report.computed_tokens + report.recomputed_tokens + report.idle_tokens + decoded
    parts += report.drafted_tokens - report.accepted_tokens
    expect(report.model_tokens == parts, f"{report.model_tokens} tokens in the model, and {parts} accounted for")
    spared = 1 - report.computed_tokens / report.prompt_tokens
    expect(spared >= report.saving - 1e-9, f"{report.saving} saved, and {spared} not computed")


def without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in names}
