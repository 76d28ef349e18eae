"""RankGenerator: what ranks of torchrun run together. The cases are in rank_script.py, which each rank runs."""

from __future__ import annotations

import itertools
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support_families import build
from support_ranks import run_ranks

from hf_batchllm import BatchGenerator, ConfigError, GenerationInterrupted, RankGenerator, run_file
from hf_batchllm.errors import OutputBusyError
from hf_batchllm.files.journal import lock
from hf_batchllm.notices import Notices
from hf_batchllm.pool import ranks

pytestmark = pytest.mark.xdist_group("pool_ranks")  # which share what two ranks found
SCRIPT = "rank_script.py"
GOOD = ("same_answers", "same_scores", "a_seed_for_all", "bad_prompts", "too_long_for_memory", "even_parts")
MORE = ("a_file", "on_the_first_alone", "many_calls", "other_prompts", "other_weights", "other_options", "one_fails")
LAST = (
    *("in_small_words", "one_fails_at_length", "interrupted_before_it_began", "one_is_interrupted"),
    *("a_step_hangs", "one_is_gone"),
)
SAYS = [  # on each of two ranks
    ("bad_prompts", "prompt 1 is empty.*prompt 2 has token id 400", ""),
    ("too_long_for_memory", *["prompt 28 has 3,000 tokens"] * 2),
    ("a_file", "^RunChangedError.*seed was 3 and is 4", "^RunChangedError.*it happened on rank 0"),
    ("one_fails", "^ZeroDivisionError: no luck.*it happened on rank 1", "^ZeroDivisionError: no luck"),
    ("one_is_interrupted", "^PoolError: rank 1 was interrupted.*of 60 results had finished", "^GenerationInterrupted"),
    ("interrupted_before_it_began", "^PoolError: rank 1 was interrupted", "^GenerationInterrupted"),
    ("a_step_hangs", "rank 1 has not got on for", ""),
    ("one_is_gone", "rank 1 has given no sign of life", ""),
]
IS = [  # the one has results alone that asked for them; long words are sent
    ("on_the_first_alone", [28, 0]),
    ("one_fails_at_length", [9_000_000, 9_000_000]),
]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(SCRIPT, tmp_path_factory.mktemp("two"), 2, *GOOD, *MORE, *LAST)


def test_answers_are_those_of_one_process(two: list[dict[str, Any]], tmp_path: Path) -> None:
    report = two[0]["same_answers"]
    assert "rank 0: " in report and "rank 1: " in report and "s of sending" in report
    three = run_ranks(SCRIPT, tmp_path, 3, "without_a_group", "same_answers", "even_parts")
    assert [each["without_a_group"] for each in three] == [True] * 3
    assert "rank 2: " in three[2]["same_answers"] and len(three[0]["even_parts"]) == 3


def test_a_seed_that_nobody_gives_is_the_first_ranks(two: list[dict[str, Any]]) -> None:
    assert two[0]["a_seed_for_all"] == two[1]["a_seed_for_all"]


def test_bad_prompts_are_told_on_each_rank(two: list[dict[str, Any]]) -> None:
    # Whichever rank finds them first says so, and the other may hear of it before it has looked at its own.
    said = [each["bad_prompts"].partition(" ['it happened on rank")[0] for each in two]
    assert said[0] == said[1]


@pytest.mark.parametrize(("case", "of_first", "of_second"), SAYS)
def test_what_each_rank_is_told(case: str, of_first: str, of_second: str, two: list[dict[str, Any]]) -> None:
    """Of what was found on one of them, both are."""
    assert re.search(of_first, two[0][case], re.DOTALL), two[0][case]
    assert re.search(of_second, str(two[1].get(case)), re.DOTALL), two[1][case]


@pytest.mark.parametrize(("case", "found"), IS)
def test_what_each_rank_has(case: str, found: list[Any], two: list[dict[str, Any]]) -> None:
    assert [each[case] for each in two] == found


def test_ranks_have_as_much_to_run(two: list[dict[str, Any]]) -> None:
    one, other = two[0]["even_parts"]
    assert one == pytest.approx(other, rel=0.1)


def test_what_calls_have_said_is_forgotten(two: list[dict[str, Any]]) -> None:
    sizes = two[0]["many_calls"]
    assert abs(sizes[-1] - sizes[2]) < 10


def test_what_a_slow_rank_has_not_heard_yet_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one has failed in that call, and in further ones since."""
    store, made = dist.HashStore(), []  # type: ignore[attr-defined]
    for rank in range(2):
        monkeypatch.setattr(ranks, "_store", lambda rank=rank: (store, rank, 2))
        monkeypatch.setattr(ranks, "_made", itertools.count())
        made.append(ranks.Ranks(60.0, Notices()))
    slow, fast = made

    def run() -> None:
        with slow.call():
            for error in (ValueError("the first"), ValueError("the second"), ValueError("the third")):
                with suppress(ValueError), fast.call():
                    raise error
            slow.moved()

    with pytest.raises(ValueError, match="the first"):
        run()
    for each in made:
        each.close()


def test_ranks_that_do_not_agree(two: list[dict[str, Any]]) -> None:
    for each in two:
        prompts, length, seed, refused = each["other_prompts"]
        assert all("rank 1 was asked for something else than rank 0" in said for said in (prompts, length, seed))
        assert "max_new_tokens" in refused
        differ = ["other weights", "other weights", "other buffers", "other weights and another config"]
        for said, other in zip(each["other_weights"], differ, strict=True):
            assert f"rank 1 has {other} than rank 0" in said
    assert "it happened on rank 1" in two[0]["other_prompts"][3]


def test_ranks_with_other_options(two: list[dict[str, Any]]) -> None:
    for each in two:
        assert len(each["other_options"]) == 8
        assert all("rank 1 was asked for something else" in said for said in each["other_options"])


def test_long_words_go_in_pieces(two: list[dict[str, Any]]) -> None:
    assert two[0]["in_small_words"] == two[1]["in_small_words"]


def test_a_rank_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As where the script is started without a launcher."""
    monkeypatch.delenv("RANK", raising=False)
    with RankGenerator(build("llama")) as alone, BatchGenerator(build("llama")) as one:
        assert len(alone) == 1 and alone.rank == 0
        prompts = [[5, 6, number] for number in range(20)]
        for options in ({}, {"do_sample": True, "seed": 4}):
            ours, wanted = (
                each.generate(prompts, max_new_tokens=4, progress=False, **options) for each in (alone, one)
            )
            assert ours == wanted
        alone.generate(prompts, max_new_tokens=4, progress=True)
        assert "20 / 20 done" in capsys.readouterr().err
        with pytest.raises(AttributeError, match="no attribute 'stream': results come in the end"):
            alone.stream(prompts)
        with pytest.raises(ConfigError, match="`patience` is 0"):
            RankGenerator(build("llama"), patience=0)


def test_an_interrupt_leaves_no_frame_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such frames hold the KV cache, for as long as the error is kept."""
    monkeypatch.delenv("RANK", raising=False)

    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    with RankGenerator(build("llama")) as alone:
        with pytest.raises(GenerationInterrupted) as caught:
            alone.generate([[5, 6]], max_new_tokens=4, logits_processor=[interrupt], progress=False)
        context = caught.value.__context__
        assert context is None or context.__traceback__ is None
        left = alone.interrupted
        with pytest.raises(GenerationInterrupted):
            alone.generate((interrupt() for _ in range(2)), progress=False)
        assert left is not None and alone.interrupted is left  # that call had read no prompt


def test_processes_without_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("SLURM_NTASKS", "4")
    with pytest.raises(ConfigError, match="there are 4 processes here by SLURM_NTASKS, and no RANK"):
        RankGenerator(build("llama"))


def test_ranks_that_each_write_one_file_are_told_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    (tmp_path / "in.jsonl").write_text('{"prompt": [1, 2]}\n')
    with (tmp_path / "out.jsonl").open("wb") as other, BatchGenerator(build("llama")) as gen:
        lock(other.fileno(), "out.jsonl")
        with pytest.raises(OutputBusyError, match="RankGenerator in BatchGenerator's place"):
            run_file(gen, tmp_path / "in.jsonl", tmp_path / "out.jsonl", max_new_tokens=1)
