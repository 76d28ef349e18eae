"""What each rank runs in the tests of ``RankGenerator``: the cases named on the command line, into a file of its own.

torchrun --nproc-per-node 2 rank_script.py FOLDER CASE ...
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
from support_cases import SOME
from support_families import build, random_prompts
from support_letter_tokenizers import letter_tokenizer
from transformers import GenerationConfig, LogitsProcessor, MaxTimeCriteria

from hf_batchllm import BatchGenerator, RankGenerator, run_file
from hf_batchllm.pool import ranks

RANK = int(os.environ["RANK"])
PROMPTS = {
    kind: random_prompts(random.Random(4), 97, kind, 30)[:28] for kind in ("prefix", "nested", "mixed", "distinct")
}
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 1.5, "top_k": 20}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {**SAMPLED, "seed": 5},
    "samples": {**SAMPLED, "seed": 6, "num_return_sequences": 3},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "logprobs": {"logprobs": 2, "prompt_logprobs": 1},
    "seeds": {**SAMPLED, "seed": list(range(28))},
}
Case = Callable[[RankGenerator, BatchGenerator], Any]


def same_answers(gen: RankGenerator, one: BatchGenerator) -> Any:
    kinds = PROMPTS if len(gen) == 2 else {"nested": PROMPTS["nested"]}
    for place, (kind, prompts) in enumerate(kinds.items()):
        for number, (name, options) in enumerate(OPTIONS.items()):
            if SOME and len(kinds) > 1 and (place + number) % 2:  # each kind with half of the options, and vice versa
                continue
            given: dict[str, Any] = {"max_new_tokens": 7, "progress": False, **options}
            ours, wanted = gen.generate(prompts, **given), one.generate(prompts, **given)
            assert [row.token_ids for row in ours] == [row.token_ids for row in wanted], (kind, name)
            assert [row.prompt_token_ids for row in ours] == [row.prompt_token_ids for row in wanted], (kind, name)
            assert ours.texts == wanted.texts
            assert ours.report is not None and wanted.report is not None
            assert ours.report.new_tokens == wanted.report.new_tokens
            assert len(ours.report.workers) == len(gen) and ours.report.finished == wanted.report.finished
    return str(ours.report)


def same_scores(gen: RankGenerator, one: BatchGenerator) -> Any:
    contexts = [[1, 2, 3, number] for number in range(20)]
    ours, wanted = (each.score(contexts, choices=[[5, 6], [7]], progress=False) for each in (gen, one))
    assert [(row.index, row.choice, row.token_ids) for row in ours] == [
        (row.index, row.choice, row.token_ids) for row in wanted
    ]
    assert all(abs(mine.logprob - its.logprob) < 1e-4 for mine, its in zip(ours, wanted, strict=True))
    column = pd.Series(contexts[:3], index=[7, 3, 5])
    assert list(gen.generate(column, max_new_tokens=2).to_pandas().index) == [7, 3, 5]
    assert list(gen.score(column, choices=[[3], [4]]).to_pandas().index) == [7, 7, 3, 3, 5, 5]


def a_seed_for_all(gen: RankGenerator, one: BatchGenerator) -> Any:
    torch.manual_seed(RANK)
    out = gen.generate(PROMPTS["mixed"], max_new_tokens=9, progress=False, **SAMPLED)
    assert out.report is not None
    again = one.generate(PROMPTS["mixed"], max_new_tokens=9, progress=False, seed=out.report.seed, **SAMPLED)
    assert out.token_ids == again.token_ids
    return out.token_ids


def bad_prompts(gen: RankGenerator, one: BatchGenerator) -> Any:
    prompts = [[1, 2], [], [3, 400], [5]]
    ours, wanted = (each.generate(prompts, max_new_tokens=2, on_error="record", progress=False) for each in (gen, one))
    assert ours == wanted
    return error_of(lambda: gen.generate(prompts, max_new_tokens=2))


def too_long_for_memory(gen: RankGenerator, one: BatchGenerator) -> Any:
    small = BatchGenerator(gen.model, kv_memory=200_000, page_size=16)
    with RankGenerator(gen.model, kv_memory=200_000, page_size=16) as several:
        given = [*PROMPTS["nested"], [3] * 3000]
        ours, wanted = (
            each.generate(given, max_new_tokens=2, on_error="record", progress=False) for each in (several, small)
        )
        assert [row.token_ids for row in ours] == [row.token_ids for row in wanted]
        assert [bool(row.error) for row in ours] == [bool(row.error) for row in wanted] == [False] * 28 + [True]
        return error_of(lambda: several.generate(given, max_new_tokens=2, progress=False))


def even_parts(gen: RankGenerator, one: BatchGenerator) -> Any:
    """Each rank has as much to run, and a group of prompts that begin alike stays on one."""
    groups = [[7 + group] * (40 * (1 + group % 3)) for group in range(12)]
    prompts = [[*start, number] for start in groups for number in range(2, 6)]
    configs = [GenerationConfig(max_new_tokens=20 if number % 16 < 8 else 5) for number in range(len(prompts))]
    out, wanted = (each.generate(prompts, configs, eos_token_id=None, progress=False) for each in (gen, one))
    assert out.token_ids == wanted.token_ids
    assert out.report is not None and out.report.parted_tokens == 0
    return [worker.read_tokens + worker.new_tokens for worker in out.report.workers]


def on_the_first_alone(gen: RankGenerator, one: BatchGenerator) -> Any:
    with RankGenerator(gen.model, letter_tokenizer(97), everywhere=False) as several:
        out = several.generate(PROMPTS["prefix"], max_new_tokens=5, progress=False)
    assert out.report is not None and out.report.finished == 28
    return len(out)


def other_prompts(gen: RankGenerator, one: BatchGenerator) -> Any:
    found = [error_of(lambda: gen.generate([[1, 2, 3 + RANK]], max_new_tokens=2))]
    found.append(error_of(lambda: gen.generate([[1, 2]], max_new_tokens=2 + RANK)))
    found.append(error_of(lambda: gen.generate([[1, 2]], max_new_tokens=2, seed=RANK, do_sample=True)))
    found.append(error_of(lambda: gen.generate([[1, 2]], max_new_tokens=-1 if RANK else 2)))
    assert gen.generate([[1, 2]], max_new_tokens=2, progress=False).report is not None
    return found


def other_weights(gen: RankGenerator, one: BatchGenerator) -> Any:
    def rows(model: Any) -> None:
        model.lm_head.weight.data[30:33] *= 2

    def buffer(model: Any) -> None:
        next(each for name, each in model.named_buffers() if name.endswith("inv_freq")).mul_(1.5)

    def config(model: Any) -> None:
        rows(model)
        model.config.rms_norm_eps = 0.01

    found = []
    for change in (lambda model: torch.nn.init.ones_(model.lm_head.weight), rows, buffer, config):
        model = copy.deepcopy(gen.model)
        if RANK:
            change(model)
        with RankGenerator(model) as several:
            found.append(error_of(lambda several=several: several.generate([[1, 2]], max_new_tokens=2)))
    return found


class Fails(LogitsProcessor):
    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if RANK == 1 and ids.shape[1] > 20:
            raise ZeroDivisionError("no luck")
        time.sleep(0.01)
        return scores


def one_fails(gen: RankGenerator, one: BatchGenerator) -> Any:
    found = error_of(
        lambda: gen.generate([[5] * 12] * 40, max_new_tokens=100_000, logits_processor=[Fails()], progress=False)
    )
    assert gen.generate(PROMPTS["prefix"], max_new_tokens=2, progress=False).report is not None
    return found


def one_is_interrupted(gen: RankGenerator, one: BatchGenerator) -> Any:
    model = copy.deepcopy(gen.model)
    model.register_forward_pre_hook(lambda *given: time.sleep(0.02))
    configs = [GenerationConfig(max_new_tokens=2 + number * 3) for number in range(60)]
    with RankGenerator(model) as several:
        several.generate([[1]], max_new_tokens=1, progress=False)
        if RANK == 1:
            threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
        return error_of(lambda: several.generate([[5, number] for number in range(60)], configs, progress=False))


def a_file(gen: RankGenerator, one: BatchGenerator) -> Any:
    folder = Path(sys.argv[1])
    source, ours, wanted = (folder / name for name in ("in.jsonl", "ours.jsonl", f"wanted-{RANK}.jsonl"))
    given: dict[str, Any] = {"max_new_tokens": 5, "seed": 3, "temperature": 1.5, "token_ids": True, "progress": False}
    if not RANK:
        rows = [{"prompt": row, "max_new_tokens": 2 + n % 4} for n, row in enumerate(PROMPTS["nested"])]
        source.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"prompt": []}]))
    dist.barrier()
    report = run_file(gen, source, ours, **given)
    run_file(one, source, wanted, **given)
    assert ours.read_text() == wanted.read_text()
    assert (report.records, report.written, report.errors, report.before) == (29, 29, 1, 0), report
    assert [each.name for each in folder.iterdir() if "shard" in each.name] == []
    again = run_file(gen, source, ours, **given)
    assert again.before == 29 and not again.written
    dist.barrier()
    lines = ours.read_text().splitlines(keepends=True)
    dist.barrier()
    if not RANK:
        ours.write_text("".join(lines[:20]))
    dist.barrier()
    assert run_file(gen, source, ours, **given).written == 9, "the first rank goes on"
    assert ours.read_text() == wanted.read_text()
    return error_of(lambda: run_file(gen, source, ours, **{**given, "seed": 4}))


def one_is_gone(gen: RankGenerator, one: BatchGenerator) -> Any:
    """It ends without a word, and whoever has started it lets the others go on. They hear of it within their part."""
    ranks._GONE_AFTER = 3.0  # type: ignore[misc]
    model, steps = copy.deepcopy(gen.model), []
    model.register_forward_pre_hook(lambda *given: steps.append(time.sleep(0.02)))
    with RankGenerator(model) as made:
        if RANK == 1:
            threading.Timer(1.0, os._exit, (0,)).start()
        found = error_of(
            lambda: made.generate([[5, number] for number in range(60)], max_new_tokens=900, progress=False)
        )
        assert len(steps) < 900
        return found


def other_options(gen: RankGenerator, one: BatchGenerator) -> Any:
    def ask(**options: Any) -> str:
        return error_of(lambda: gen.generate([[1, 2], [3, 4]], max_new_tokens=2, progress=False, **options))

    found = [ask(logprobs=2 if RANK else None), ask(logits_processor=[Slow()] if RANK else None)]
    found += [ask(do_sample=True, seed=np.array([RANK, 1])), ask(sequence_bias={(5,): 3.0 + RANK})]
    found.append(error_of(lambda: gen.score([[1, 2, 3]] if RANK else [[1, 2]], [[[4]] if RANK else [[3, 4]]])))
    with RankGenerator(gen.model, everywhere=bool(RANK)) as several:
        found.append(error_of(lambda: several.generate([[1, 2]], max_new_tokens=2)))
    assert ask(sequence_bias={(5,): 3.0}) == "nothing"
    found += [ask(logits_processor=[Slow(seconds=RANK)]), ask(stopping_criteria=[MaxTimeCriteria(9.0 + RANK)])]
    stateful = Slow()
    for _ in range(2):
        assert ask(logits_processor=[stateful], stopping_criteria=[MaxTimeCriteria(90.0)]) == "nothing"
        stateful.seen += RANK
    return found


class Slow(LogitsProcessor):
    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds, self.seen = seconds, 0

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


def in_small_words(gen: RankGenerator, one: BatchGenerator) -> Any:
    ranks._MOST_BYTES = 100  # type: ignore[misc]
    try:
        same_scores(gen, one)
        return a_seed_for_all(gen, one)
    finally:
        ranks._MOST_BYTES = 4 << 20  # type: ignore[misc]


class OwnError(Exception):
    pass


class FailsAtLength(LogitsProcessor):
    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if RANK == 1:
            raise OwnError("x" * 9_000_000)
        time.sleep(0.01)
        return scores


def one_fails_at_length(gen: RankGenerator, one: BatchGenerator) -> Any:
    try:
        gen.generate([[5] * 12] * 40, max_new_tokens=400, logits_processor=[FailsAtLength()], progress=False)
    except OwnError as error:
        return len(str(error))


def interrupted_before_it_began(gen: RankGenerator, one: BatchGenerator) -> Any:
    if RANK == 1:
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    else:
        time.sleep(2.5)
    found = error_of(lambda: gen.generate([[1, 2]] * 40, max_new_tokens=50, progress=False))
    assert gen.generate([[1, 2]], max_new_tokens=2, progress=False).report is not None
    return found


def a_step_hangs(gen: RankGenerator, one: BatchGenerator) -> Any:
    model = copy.deepcopy(gen.model)
    model.register_forward_pre_hook(lambda *given: time.sleep(7.0 if RANK else 0.0))
    with RankGenerator(model, patience=3.0) as several:
        return error_of(lambda: several.generate([[5, 6]] * 40, max_new_tokens=1, progress=False))


def without_a_group(gen: RankGenerator, one: BatchGenerator) -> Any:
    """Neither makes one, nor needs one."""
    assert not dist.is_initialized()
    for _ in range(3):
        with RankGenerator(gen.model) as several:
            several.generate(PROMPTS["nested"], max_new_tokens=2, progress=False)
    assert not dist.is_initialized()
    out = gen.generate(PROMPTS["nested"], max_new_tokens=4, progress=False)
    dist.init_process_group("gloo")
    dist.barrier()
    with RankGenerator(gen.model) as several:
        again = several.generate(PROMPTS["nested"], max_new_tokens=4, progress=False)
    dist.destroy_process_group()
    last = gen.generate(PROMPTS["nested"], max_new_tokens=4, progress=False)
    return out.token_ids == again.token_ids == last.token_ids


def many_calls(gen: RankGenerator, one: BatchGenerator) -> Any:
    """What calls have said does not pile up."""
    store, sizes = gen._ranks._store, []
    for number in range(6):
        gen.generate(PROMPTS["nested"], max_new_tokens=1 + number, progress=False)
        dist.barrier()
        sizes.append(store.num_keys())
        dist.barrier()
    return sizes


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except BaseException as error:
        return f"{type(error).__name__}: {error} {getattr(error, '__notes__', '')}"
    return "nothing"


def main(folder: Path, names: list[str]) -> None:
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a background process ignores
    if names[0] != "without_a_group":
        dist.init_process_group("gloo")
    found: dict[str, Any] = {}
    model = build("llama")
    with (
        RankGenerator(model, letter_tokenizer(97), page_size=16) as gen,
        BatchGenerator(model, letter_tokenizer(97), page_size=16) as one,
    ):
        assert gen.rank == RANK
        for name in names:
            case: Case = globals()[name]
            try:
                found[name] = case(gen, one)
            except BaseException as error:
                found[name] = error_of(lambda error=error: (_ for _ in ()).throw(error))  # type: ignore[misc]
                raise
            finally:
                (folder / str(RANK)).write_bytes(pickle.dumps(found))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
