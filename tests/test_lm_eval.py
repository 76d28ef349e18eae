"""The evaluation harness gives the same numbers and texts with ``hf-batchllm`` as with its own ``hf`` model."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval import tasks as harness_tasks
from support_lm_eval import (
    EOS,
    EXAMPLES,
    NAMES,
    PAIRS,
    TASKS,
    THINK,
    TURN,
    asked,
    assert_close,
    eval_model,
    eval_tokenizer,
    instances,
    pair,
    task_manager,
)
from support_lm_eval import _quick as _quick  # a fixture
from support_lm_eval import calls as calls  # a fixture
from support_lm_eval import saved as saved  # a fixture
from transformers import GenerationConfig

from hf_batchllm import ConfigError, PromptError, UnsupportedOptionError
from hf_batchllm.lm_eval import main
from hf_batchllm.lm_eval.command import with_our_model
from hf_batchllm.lm_eval.model import BatchLM
from hf_batchllm.lm_eval.registration import NAME

pytestmark = pytest.mark.xdist_group("lm_eval")  # the harness takes seconds to import


# -- whole evaluations -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_length", [300, 48])
def test_an_evaluation_gives_what_it_gives_with_hf(saved: Path, max_length: int, calls: list[str]) -> None:
    arguments = f"pretrained={saved},dtype=float32,max_length={max_length}"
    results = [
        simple_evaluate(
            model=name, model_args=f"{arguments}{more}", tasks=NAMES, device="cpu", task_manager=task_manager(),
            bootstrap_iters=0, batch_size=1,
        )
        for name, more in (("hf", ""), (NAME, ",kv_memory=4MiB,page_size=8,backend=torch"))
    ]  # fmt: skip
    theirs, ours = results
    assert sorted(calls) == ["score", "score", "stream"]  # one for each kind of request, whatever the tasks
    for task in NAMES:
        expected = {name: value for name, value in theirs["results"][task].items() if isinstance(value, float)}
        assert len(expected) >= 1
        found = {name: ours["results"][task][name] for name in expected}
        assert found == pytest.approx(expected, rel=1e-5)
        for sample, other in zip(ours["samples"][task], theirs["samples"][task], strict=True):
            assert sample["doc"] == other["doc"]
            flat, other_flat = ([each for some in one["resps"] for each in some] for one in (sample, other))
            if task == "hb_words":
                assert flat == other_flat
            elif task == "hb_pages":
                assert flat == pytest.approx(other_flat, rel=1e-5)
            else:
                assert_close(flat, other_flat)
    texts = [each for sample in ours["samples"]["hb_words"] for some in sample["resps"] for each in some]
    assert len(set(texts)) > 1


def test_its_own_command_line(saved: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, calls: list[str]) -> None:
    quick = functools.partial(harness_tasks.TaskManager, include_defaults=False)  # there are thousands
    monkeypatch.setattr(harness_tasks, "TaskManager", quick)
    monkeypatch.setattr("lm_eval.__main__.setup_logging", lambda: None)
    monkeypatch.setattr(sys, "argv", before := ["pytest"])
    arguments = (
        f"--tasks hb_choices --include_path {TASKS} --limit 2 --model_args pretrained={saved} max_batch_tokens=64"
    )
    assert main([*arguments.split(), "--device", "cpu", "--batch_size", "auto"]) == 0
    assert sys.argv is before
    assert calls == ["score"]
    shown = capsys.readouterr().out
    assert shown.startswith(NAME)
    assert "|hb_choices|" in shown
    assert (
        main(["--model_args", "pretrained=x,kv_memory=much", "--tasks", "hb_choices", "--include_path", str(TASKS)])
        == 1
    )
    assert "kv_memory" in capsys.readouterr().err


def test_the_model_runs_if_none_is_named() -> None:
    ours = ["--model", NAME]
    assert with_our_model(["--tasks", "x"]) == ["--tasks", "x", *ours]
    assert with_our_model(["run", "--tasks", "x"]) == ["run", "--tasks", "x", *ours]
    for given in (["ls", "tasks"], ["--model=hf", "-t", "x"], ["-M", "hf"], ["--config", "x.yaml"], ["--help"], []):
        assert with_our_model(given) == given


# -- likelihoods -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"bos": False},
        {"max_length": 40},
        {"max_length": 27, "logits_cache": False, "bos": False},
        {"add_bos_token": False},
        {"prefix_token_id": TURN},
        {"bos": False, "add_bos_token": True, "max_length": 60},
    ],
    ids=str,
)
def test_log_likelihoods(given: dict[str, Any]) -> None:
    theirs, ours = pair(**given)
    found = asked(ours, "loglikelihood", PAIRS)
    assert_close(found, asked(theirs, "loglikelihood", PAIRS))
    assert len({round(each, 3) for each, _ in found}) > 15


def test_greedy_answers_are_told() -> None:
    theirs, ours = pair(bos=False)
    tokenizer = eval_tokenizer(bos=False)
    context = "the dog sat on"
    ids = tokenizer(context, return_tensors="pt").input_ids
    likeliest = eval_model().generate(ids, max_new_tokens=3, do_sample=False)[0, ids.shape[1] :].tolist()
    other = [likeliest[0], (likeliest[1] + 1) % 300 + 50, likeliest[2]]
    requests = [(None, ids[0].tolist(), each) for each in (likeliest, likeliest[:1], other, other[:2])]
    expected = theirs._loglikelihood_tokens(requests, disable_tqdm=True)
    found = ours._loglikelihood_tokens(requests, disable_tqdm=True)
    assert [greedy for _, greedy in found] == [True, True, False, False]
    assert_close(found, expected)


def test_one_text_that_is_split_in_two_ways() -> None:
    """``hf`` without its cache of logits: with it, the shorter one of the two gets the number of other tokens."""
    theirs, ours = pair(logits_cache=False)
    requests = [("the dog sat", " on the mat"), ("the dog sat on the", " mat"), ("the dog sat on", " the cat")]
    assert_close(asked(ours, "loglikelihood", requests), asked(theirs, "loglikelihood", requests))


@pytest.mark.parametrize("max_length", [300, 32, 5])
def test_texts_are_rolled_through_as_windows(max_length: int, calls: list[str]) -> None:
    theirs, ours = pair(max_length=max_length, batch_size=3)
    texts = [(EXAMPLES * 3,), ("",), ("x",), (EXAMPLES,), ("the dog",), ("<bos>the dog",)]
    found = asked(ours, "loglikelihood_rolling", texts)
    assert calls == ["score"]
    assert found == pytest.approx(asked(theirs, "loglikelihood_rolling", texts), rel=1e-5)


def test_ranks_of_a_data_parallel_run(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    theirs, ours = pair(max_length=32)
    texts = [(EXAMPLES,), ("the dog sat",)]
    expected = asked(theirs, "loglikelihood_rolling", texts)
    ours._rank, ours._world_size = 1, 2
    windows: list[int] = []

    def all_gather(count: torch.Tensor) -> torch.Tensor:
        windows.append(int(count))
        return torch.tensor([int(count) + 3, int(count)])  # the other one has more

    monkeypatch.setattr(ours, "all_gather", all_gather)
    assert ours.loglikelihood_rolling(instances("loglikelihood_rolling", texts)) == pytest.approx(expected, rel=1e-5)
    assert windows
    capsys.readouterr()
    ours.loglikelihood(instances("loglikelihood", PAIRS[:3]))
    ours.generate_until(instances("generate_until", [("the dog", {"max_gen_toks": 2})]))
    assert "scores" not in (shown := capsys.readouterr().err)  # one bar is enough
    assert "prompts" not in shown


@pytest.mark.parametrize(
    ("continuation", "why"),
    [("", "without tokens"), ("s", "without tokens"), ("the dog " * 40, "a continuation of .* max_length is 20")],
)
def test_what_cannot_be_scored_is_named(continuation: str, why: str) -> None:
    _, ours = pair(max_length=20)
    with pytest.raises(PromptError, match=f"^request 1 .*{why}"):
        asked(ours, "loglikelihood", [("a", "b"), ("dog", continuation)])


# -- answers ---------------------------------------------------------------------------------------------------

CONTEXTS = ["the dog sat", "One, two,", f"{EXAMPLES}Köln", "<bos>Bees", "東", EXAMPLES * 4, "the cat\n", "wet, and"]


def settings(**given: Any) -> dict[str, Any]:
    return {"max_gen_toks": 14, "do_sample": False, **given}


def both(contexts: list[str], each: dict[str, Any], **given: Any) -> list[str]:
    theirs, ours = pair(**given)
    requests = [(context, dict(each)) for context in contexts]
    found = asked(ours, "generate_until", requests)
    assert found == asked(theirs, "generate_until", requests)
    return found


@pytest.mark.some_cases
@pytest.mark.parametrize(
    "each",
    [
        settings(until=["\n"]),
        settings(until="a"),
        settings(until=["t", "e", "on", "  "]),
        settings(until=[]),
        settings(until=[""]),
        settings(until=["<turn>", "NN"]),
        {"max_new_tokens": 5},
        {"max_tokens": 9, "temperature": 0.0},
        settings(temperature=0.0, repetition_penalty=1.3, until=["c"]),
        settings(temperature=0.7, until=["c"]),  # says that it is not used
        settings(num_beams=2),
        settings(eos_token_id=[EOS, 40, 41, 42, 43, 44, 45, 46, 47, 48]),
    ],
    ids=str,
)
def test_answers(each: dict[str, Any]) -> None:
    found = both(CONTEXTS, each)
    assert len(set(found)) > 2


@pytest.mark.parametrize(
    "each",
    [
        settings(num_beams=3, until=["a"]),
        settings(num_beams=2, until=["t", "e", "on", "  "], length_penalty=2.0),
        settings(num_beams=4, until=["u", "o"], early_stopping=True),
    ],
    ids=str,
)
def test_a_string_in_the_best_beam_ends_the_search(each: dict[str, Any]) -> None:
    found = both(CONTEXTS, each)
    assert found != asked(pair()[1], "generate_until", [(context, {**each, "until": []}) for context in CONTEXTS])


def test_beams_beside_answers_without() -> None:
    theirs, ours = pair()
    some = [settings(num_beams=2, until=["a"]), settings(until=["N", "\n"]), settings(num_beams=3, max_gen_toks=5)]
    (text,) = asked(ours, "generate_until", [("the dog sat", settings())])
    some.append(settings(until=[f"t{text[0]}"]))  # begins in the context
    requests = [(context, dict(each)) for each in some for context in CONTEXTS]
    assert asked(ours, "generate_until", requests) == asked(theirs, "generate_until", requests)


def test_a_length_that_counts_the_context() -> None:
    found = both(["the dog sat", "the dog sat on the mat"], settings(max_length=14))
    assert len(found[0]) > len(found[1])


@pytest.mark.parametrize(("max_length", "truncation"), [(24, False), (60, False), (60, True)])
def test_contexts_of_answers_are_cut_from_the_left(max_length: int, truncation: bool) -> None:
    both(CONTEXTS, settings(until=["a"]), max_length=max_length, truncation=truncation)


def test_settings_of_several_tasks_run_together(calls: list[str]) -> None:
    theirs, ours = pair()
    some = [settings(until=["a"]), settings(until=["N", "\n"], max_gen_toks=5), {"max_gen_toks": 3}]
    requests = [(context, dict(some[place % 3])) for place, context in enumerate(CONTEXTS)]
    assert asked(ours, "generate_until", requests) == asked(theirs, "generate_until", requests)
    assert calls == ["stream"]


def test_a_string_that_begins_in_the_context_ends_nothing(calls: list[str]) -> None:
    """An answer is looked at by itself."""
    _, ours = pair()
    context = "the dog sat"
    (text,) = asked(ours, "generate_until", [(context, settings())])
    until = [f"t{text[0]}"]
    assert until[0] not in text
    calls.clear()
    assert both([context, "Bees"], settings(until=until))[0] == text
    assert calls == ["stream", "stream"]


@pytest.mark.parametrize(
    "own",
    [{"max_new_tokens": 6}, {"repetition_penalty": 1.5}, {"do_sample": True, "temperature": 0.5}, {"max_length": 9}],
)
def test_what_the_model_has_set_for_itself_counts(own: dict[str, Any]) -> None:
    model = eval_model()
    before = model.generation_config
    model.generation_config = GenerationConfig(eos_token_id=EOS, **own)
    try:
        both(CONTEXTS[:4], settings(until=["c"]))
    finally:
        model.generation_config = before


def test_thoughts_are_cut_off() -> None:
    model, tokenizer = eval_model(), eval_tokenizer()
    ids = tokenizer("the dog sat", return_tensors="pt").input_ids
    new = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :].tolist()
    end = new[3]
    whole = both(["the dog sat"], settings(max_gen_toks=8, until=[]))[0]
    for think_end_token in (end, str(end), tokenizer.decode([end])):
        (text,) = both(["the dog sat"], settings(max_gen_toks=8, until=[]), think_end_token=think_end_token)
        assert text != whole
        assert whole.endswith(text)
    with pytest.raises(ValueError, match="think_end_token is required"):
        pair(enable_thinking=True)
    _, ours = pair(enable_thinking=True, think_end_token=THINK)
    with pytest.raises(ValueError, match="not compatible with loglikelihood"):
        asked(ours, "loglikelihood", [("a", "b")])


def test_samples_differ_and_repeat_with_the_seed_of_torch() -> None:
    _, ours = pair()
    requests = [("the dog sat", settings(do_sample=True, temperature=1.5, max_gen_toks=8))] * 4
    torch.manual_seed(3)
    first = asked(ours, "generate_until", requests)
    assert len(set(first)) > 1
    torch.manual_seed(3)
    assert asked(ours, "generate_until", requests) == first


@pytest.mark.parametrize(
    ("each", "error", "why"),
    [
        (settings(stop=["a"]), UnsupportedOptionError, "`stop` "),
        (settings(temprature=1.0), UnsupportedOptionError, "temperature"),
        (settings(max_gen_tok=4), UnsupportedOptionError, "did you mean `max_gen_toks`"),
        (settings(untill=["a"]), UnsupportedOptionError, "did you mean `until`"),
        (settings(num_return_sequences=2, num_beams=2), UnsupportedOptionError, "repeats"),
        (settings(max_gen_toks=300), UnsupportedOptionError, "`max_gen_toks` is 300"),
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_named(each: dict[str, Any], error: type[Exception], why: str) -> None:
    _, ours = pair()
    with pytest.raises(error, match=why):
        asked(ours, "generate_until", [("the dog", each)])


@pytest.mark.parametrize(
    ("typed", "meant"), [("kv_memry=1GiB", "kv_memory"), ("max_lenght=64", "max_length"), ("page_sise=8", "page_size")]
)
def test_an_argument_that_is_misspelt(typed: str, meant: str, saved: Path) -> None:
    with pytest.raises(ConfigError, match=f"did you mean `{meant}`"):
        simple_evaluate(model=NAME, model_args=f"pretrained={saved},{typed}", tasks=NAMES[:1])


def test_a_wrong_folder_of_an_adapter_is_found_before_the_model_is_loaded(tmp_path: Path) -> None:
    for wrong, why in ((tmp_path, "no adapter_config.json"), (tmp_path / "none", "no such folder")):
        with pytest.raises(ConfigError, match=f"`peft` is {wrong}.*{why}"):
            BatchLM("no/such-model", peft=str(wrong))
    with pytest.raises(ConfigError, match=r"`pretrained` is \./no-such, and there is no such folder"):
        BatchLM("./no-such")
