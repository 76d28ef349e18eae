"""A pool whose workers have a model together with other processes: the same answers as one process with a whole one."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import random
import shutil
import signal
import subprocess
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support_families import build, random_prompts
from support_pool import Load, is_running, none_left_behind
from support_quick_workers import quick_workers
from transformers import GenerationConfig, LogitsProcessor

from hf_batchllm import BatchGenerator, ConfigError, GenerationInterrupted, GeneratorPool, PoolError
from hf_batchllm.cli import main
from hf_batchllm.pool.devices import worker_devices

quick_workers()
pytestmark = [
    pytest.mark.xdist_group("pool_tensor_parallel"),
    pytest.mark.filterwarnings("ignore:.*may grow beyond"),  # answers that would not end in time
]
PROMPTS = random_prompts(random.Random(4), 97, "nested", 24)[:20]
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 1.5, "top_k": 20, "seed": 5}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    whole().save_pretrained(folder)
    return folder


@cache
def whole() -> Any:
    """With an even vocabulary: transformers 5.17 does not spread an odd one."""
    config = copy.deepcopy(build("llama").config)
    config.vocab_size += config.vocab_size % 2
    torch.manual_seed(3)
    model = type(build("llama"))(config)
    torch.nn.init.normal_(model.lm_head.weight, std=1.0)  # ties do not decide
    return model.eval()


def in_parts(saved: Path, models: int = 1, **others: Any) -> GeneratorPool:
    given: dict[str, Any] = {"gpus": ["cpu"] * 2 * models, "tp": 2, "model_options": {"dtype": torch.float32}}
    return GeneratorPool(saved, **given | {"page_size": 16} | others)


@pytest.fixture(scope="module")
def pool(saved: Path) -> Iterator[GeneratorPool]:
    with in_parts(saved) as made:
        yield made


@pytest.fixture(scope="module")
def one() -> Iterator[BatchGenerator]:
    with BatchGenerator(whole(), page_size=16) as made:
        yield made


@pytest.mark.parametrize("options", [{}, SAMPLED, {**SAMPLED, "num_return_sequences": 2}, {"num_beams": 3}], ids=str)
def test_answers_are_those_of_one_process(pool: GeneratorPool, one: BatchGenerator, options: dict[str, Any]) -> None:
    ours, wanted = (gen.generate(PROMPTS, max_new_tokens=6, progress=False, **options) for gen in (pool, one))
    assert ours.token_ids == wanted.token_ids
    assert len(pool) == 1
    assert ours.report is not None and [each.device for each in ours.report.workers] == ["the CPU"]


def test_scores_streams_and_plans(pool: GeneratorPool, one: BatchGenerator) -> None:
    given = PROMPTS[:6], [[[3, 4], [5]] for _ in PROMPTS[:6]]
    ours, wanted = (gen.score(*given, progress=False) for gen in (pool, one))
    for mine, other in zip(ours, wanted, strict=True):
        assert mine.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    streamed = {each.index: each.token_ids for each in pool.stream(PROMPTS, max_new_tokens=4)}
    assert [streamed[index] for index in range(len(PROMPTS))] == one.generate(
        PROMPTS, max_new_tokens=4, progress=False
    ).token_ids
    assert pool.plan(PROMPTS).computed_tokens == one.plan(PROMPTS).computed_tokens


@pytest.mark.usefixtures("interruptible")
def test_a_call_that_is_broken_off_leaves_nothing_behind(pool: GeneratorPool, one: BatchGenerator) -> None:
    """An interrupt, a stream that is left, and a bad prompt."""
    threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(GenerationInterrupted):
        pool.generate([[1, 2]] * 8, max_new_tokens=100_000, progress=False)
    for each in pool.stream(PROMPTS, max_new_tokens=50):
        assert each.token_ids
        break
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        pool.generate([[1, 2], []], max_new_tokens=4)
    ours, wanted = (gen.generate(PROMPTS, max_new_tokens=4, progress=False) for gen in (pool, one))
    assert ours.token_ids == wanted.token_ids


@dataclass
class OnOne(LogitsProcessor):
    """Of no use on one of the ranks: it cannot be opened there, or raises on the first."""

    rank: int
    opens: bool = True

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if not self.opens and os.environ.get("RANK") == str(self.rank):
            raise ValueError("not here")

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if os.environ.get("RANK") == str(self.rank):
            raise ValueError("not this")
        return scores


@pytest.mark.parametrize("options", [{}, {"do_sample": True}], ids=str)
def test_what_fails_in_one_of_the_processes_ends_the_call_alone(
    pool: GeneratorPool, one: BatchGenerator, options: dict[str, Any]
) -> None:
    """Also before the call: the other one had waited for it for ever. The first alone opens what is the user's."""
    for processor in OnOne(0), OnOne(0, opens=False):
        with pytest.raises(ValueError, match="not this" if processor.opens else "not here"):
            pool.generate(PROMPTS[:4], max_new_tokens=4, logits_processor=[processor], progress=False, **options)
    there: dict[str, Any] = {"logits_processor": [OnOne(1, opens=False)]}
    ours, wanted = (gen.generate(PROMPTS[:4], max_new_tokens=4, progress=False, **there) for gen in (pool, one))
    assert ours.token_ids == wanted.token_ids


def test_of_two_models_one_goes_on_without_the_other(saved: Path, one: BatchGenerator) -> None:
    """The second part of one of them is killed: the other model has the rest. In the end it loses a part, too."""
    wanted = one.generate(PROMPTS, max_new_tokens=6, progress=False).token_ids
    with none_left_behind() as started, in_parts(saved, models=2) as gen:
        gen.wait()
        result = gen.generate(PROMPTS, max_new_tokens=6, progress=False)
        assert result.token_ids == wanted
        assert result.report is not None and len(result.report.workers) == 2
        groups = [[worker.process_id, *children_of(worker.process_id)] for worker in gen._crew.workers]
        assert [len(each) for each in groups] == [2, 2]
        started += [each for group in groups for each in group]
        lengths = [GenerationConfig(max_new_tokens=2 + 7 * place) for place in range(len(PROMPTS))]
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            rows = gen.stream(PROMPTS, lengths)
            found = [next(rows)]
            os.kill(groups[1][1], signal.SIGKILL)
            found += rows
        wanted = one.generate(PROMPTS, lengths, progress=False).token_ids
        assert [row.token_ids for row in sorted(found, key=lambda row: row.index)] == wanted
        assert "part 2 of the model was killed (SIGKILL)" in " ".join(str(each.message) for each in told)
        assert len(gen) == 1
        threading.Timer(0.5, os.kill, (groups[0][1], signal.SIGKILL)).start()
        with pytest.raises(PoolError, match=r"no process of the pool is left: .*part 2 of the model was killed"):
            gen.generate([[1, 2]] * 8, max_new_tokens=100_000, progress=False)


def test_what_cannot_be_is_refused(saved: Path) -> None:
    with pytest.raises(ConfigError, match=r"the function that loads the model returned a whole model: pass `distrib"):
        GeneratorPool(Load(), gpus=["cpu", "cpu"], tp=2)
    with pytest.raises(ConfigError, match="`tp` is 2: a model takes so many GPUs, and 3 cannot be divided by it"):
        in_parts(saved, gpus=["cpu"] * 3)
    with pytest.raises(ConfigError, match="`tp` is the number of GPUs that have a model together, 1 or more, not 0"):
        in_parts(saved, tp=0)


def test_the_command(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    given = ["run", str(source), "--model", str(saved), "--max-new-tokens", "6"]
    for name, more in (("one", ["--device", "cpu"]), ("parts", ["--gpus", "cpu,cpu", "--tp", "2"])):
        assert main([*given[:2], str(tmp_path / f"{name}.jsonl"), *given[2:], *more]) == 0, capsys.readouterr().err
    assert (tmp_path / "one.jsonl").read_bytes() == (tmp_path / "parts.jsonl").read_bytes()
    for more, why in (
        (["--tp", "2"], "pass --gpus, too"),
        (["--gpus", "cpu,cpu,cpu", "--tp", "2"], "3 cannot be divided"),
    ):
        assert main([*given[:2], str(tmp_path / "none.jsonl"), *given[2:], *more]) == 2
        assert why in capsys.readouterr().err


def test_a_file_goes_on_with_the_same_parts_alone(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, folder = tmp_path / "in.jsonl", tmp_path / "model"
    source.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    shutil.copytree(saved, folder)
    given = ["run", str(source), str(tmp_path / "out.jsonl"), "--model", str(folder), "--max-new-tokens", "2"]
    given += ["--gpus", "cpu,cpu", "--tp", "2"]
    assert main([*given, "--limit", "5"]) == 0, capsys.readouterr().err
    model = copy.deepcopy(whole())
    model.lm_head.weight.data[-9:] *= 2  # which the second process has
    model.save_pretrained(folder)
    assert main(given) != 0
    assert "was begun with other weights" in capsys.readouterr().err


def test_which_gpus_have_a_model_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_batchllm.pool.devices._gpus_there", lambda: 8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,6,5,4,3,2,1,0")
    devices = worker_devices(None, 4)
    assert [each.name for each in devices] == ["GPUs 0, 1, 2 and 3", "GPUs 4, 5, 6 and 7"]
    assert [each.environment(8)["CUDA_VISIBLE_DEVICES"] for each in devices] == ["7,6,5,4", "3,2,1,0"]
    assert [each.name for each in worker_devices([0, 3], 2)] == ["GPUs 0 and 3"]
    with pytest.raises(ConfigError, match="`gpus` has GPU 1 twice"):
        worker_devices([0, 1, 1], 3)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus(saved: Path) -> None:
    with BatchGenerator(copy.deepcopy(whole()).to("cuda"), page_size=16) as one:
        wanted = one.generate(PROMPTS, max_new_tokens=40, progress=False)
    with none_left_behind() as started, in_parts(saved, gpus=2) as gen:
        result = gen.generate(PROMPTS, max_new_tokens=40, progress=False)
        assert result.token_ids == wanted.token_ids
        assert result.report is not None and [each.device for each in result.report.workers] == ["GPUs 0 and 1"]
        (worker,) = gen._crew.workers
        started += [worker.process_id, *children_of(worker.process_id)]
        threading.Timer(1.0, os.kill, (started[1], signal.SIGKILL)).start()
        with pytest.raises(PoolError, match="part 2 of the model was killed"):
            gen.generate([[1, 2]] * 8, max_new_tokens=100_000, progress=False)


def children_of(process_id: int) -> list[int]:
    with contextlib.suppress(subprocess.CalledProcessError):
        said = subprocess.run(["pgrep", "-P", str(process_id)], capture_output=True, text=True, check=True).stdout
        return [each for each in map(int, said.split()) if is_running(each)]
    return []
