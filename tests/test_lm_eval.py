"""The evaluation harness gives the same numbers and texts with ``hf-batchllm`` as with its own ``hf`` model."""

from __future__ import annotations

import functools
import itertools
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval import tasks as harness_tasks
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils_hf import stop_sequences_criteria
from support_families import REFUSED
from support_lm_eval import (
    EOS,
    EXAMPLES,
    NAMES,
    PAD,
    PAIRS,
    ROOT,
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
from support_lm_eval import _quick as _quick  # fixtures, as are the next two
from support_lm_eval import calls as calls
from support_lm_eval import saved as saved
from support_quick_python import run as run_quickly
from transformers import GenerationConfig

from hf_batchllm import (
    BatchConfig,
    ConfigError,
    OptionValueError,
    PromptError,
    UnsupportedModelError,
    UnsupportedOptionError,
    accelerated,
)
from hf_batchllm.lm_eval import NAME, BatchLM, main
from hf_batchllm.model.runner import ModelRunner

pytestmark = pytest.mark.xdist_group("lm_eval")  # the harness takes seconds to import

CONTEXTS = ["the dog sat", "One, two,", f"{EXAMPLES}Köln", "<bos>Bees", "東", EXAMPLES * 4, "the cat\n", "wet, and"]
SPLIT = [("the dog sat", " on the mat"), ("the dog sat on the", " mat"), ("the dog sat on", " the cat")]


def settings(**given: Any) -> dict[str, Any]:
    return {"max_gen_toks": 14, "do_sample": False, **given}


def both(kind: str, requests: list[Any], models: tuple[HFLM, BatchLM] | None = None, **given: Any) -> list[Any]:
    """What both models answer, which is the same."""
    theirs, ours = models or pair(**given)
    found, expected = (asked(each, kind, requests) for each in (ours, theirs))
    if kind == "generate_until":
        assert found == expected
    elif kind == "loglikelihood":
        assert_close(found, expected)
    else:
        assert found == pytest.approx(expected, rel=1e-5)
    return found


def texts_of(contexts: list[str], each: dict[str, Any], **given: Any) -> list[str]:
    return both("generate_until", [(context, dict(each)) for context in contexts], **given)


# -- whole evaluations -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_length", [300, 48])
def test_an_evaluation_gives_what_it_gives_with_hf(saved: Path, max_length: int, calls: list[str]) -> None:
    arguments = f"pretrained={saved},dtype=float32,max_length={max_length}"
    theirs, ours = (
        simple_evaluate(
            model=name, model_args=f"{arguments}{more}", tasks=NAMES, device="cpu", task_manager=task_manager(),
            bootstrap_iters=0, batch_size=1,
        )
        for name, more in (("hf", ""), (NAME, ",kv_memory=4MiB,page_size=8,backend=torch"))
    )  # fmt: skip
    assert sorted(calls) == ["score", "score", "stream"]  # one for each kind of request, whatever the tasks
    for task in NAMES:
        expected = {name: value for name, value in theirs["results"][task].items() if isinstance(value, float)}
        assert expected
        assert {name: ours["results"][task][name] for name in expected} == pytest.approx(expected, rel=1e-5)
        for sample, other in zip(ours["samples"][task], theirs["samples"][task], strict=True):
            assert sample["doc"] == other["doc"]
            flat, other_flat = ([each for some in one["resps"] for each in some] for one in (sample, other))
            if task == "hb_words":
                assert flat == other_flat
            elif task == "hb_pages":
                assert flat == pytest.approx(other_flat, rel=1e-5)
            else:
                assert_close(flat, other_flat)
    assert len({each for sample in ours["samples"]["hb_words"] for some in sample["resps"] for each in some}) > 1


def test_its_own_command_line(saved: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, calls: list[str]) -> None:
    quick = functools.partial(harness_tasks.TaskManager, include_defaults=False)  # there are thousands
    monkeypatch.setattr(harness_tasks, "TaskManager", quick)
    monkeypatch.setattr("lm_eval.__main__.setup_logging", lambda: None)
    monkeypatch.setattr(sys, "argv", before := ["pytest"])
    task = f"--tasks hb_choices --include_path {TASKS} --limit 2 --device cpu --batch_size auto --model_args"
    assert main([*task.split(), f"pretrained={saved}", "max_batch_tokens=64"]) == 0
    assert sys.argv is before and calls == ["score"]
    shown = capsys.readouterr().out
    assert shown.startswith(NAME) and "|hb_choices|" in shown
    assert main([*task.split(), "pretrained=x,kv_memory=much"]) == 1
    assert "kv_memory" in capsys.readouterr().err


def test_the_model_runs_if_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", lambda: seen.append(sys.argv[1:]))
    ours = ["--model", NAME]
    for given in (["--tasks", "x"], ["run", "--tasks", "x"]):
        assert main(given) == 0 and seen.pop() == [*given, *ours]
    for given in (["ls", "tasks"], ["--model=hf", "-t", "x"], ["-M", "hf"], ["--config", "x.yaml"], ["--help"], []):
        assert main(given) == 0 and seen.pop() == given


def test_answers_are_kept_in_the_cache_of_the_harness(tmp_path: Path, calls: list[str]) -> None:
    given = {"tasks": NAMES, "task_manager": task_manager(), "use_cache": str(tmp_path / "cache"), "bootstrap_iters": 0}
    lm = pair()[1]
    first, again = (simple_evaluate(model=lm, **given)["results"] for _ in range(2))
    assert first == again and len(calls) == 3


def test_what_had_finished_before_an_interrupt_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    _, ours = pair(ours={"max_batch_tokens": 32, "min_shared_tokens": 8})
    kept: list[Any] = []
    monkeypatch.setattr(ours.cache_hook, "add_partial", lambda *given: kept.append(given))
    forward, runs = ModelRunner.forward, itertools.count()

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if next(runs) == 5:
            raise KeyboardInterrupt
        return forward(*args, **kwargs)

    requests = [(f"{each} dog sat on the mat, and the {each}", " cat") for each in range(40)]
    monkeypatch.setattr(ModelRunner, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        asked(ours, "loglikelihood", requests)
    monkeypatch.undo()
    assert 0 < len(kept) < 40
    expected = asked(pair()[1], "loglikelihood", requests)
    assert {kind for kind, _, _ in kept} == {"loglikelihood"}
    assert_close([answer for _, _, answer in kept], [expected[requests.index(request)] for _, request, _ in kept])


def test_chats_go_through_the_template() -> None:
    models = pair()
    models[1].tokenizer.chat_template = "{% for m in messages %}<turn>{{ m.content }}{% endfor %}"
    given = {"tasks": ["hb_choices"], "task_manager": task_manager(), "apply_chat_template": True, "bootstrap_iters": 0}
    try:
        theirs, ours = (simple_evaluate(model=each, **given)["results"] for each in models)
    finally:
        models[1].tokenizer.chat_template = None
    assert ours == theirs


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
    """With its cache of logits, ``hf`` gives one text that is split in two ways the number of other tokens."""
    pairs = [*PAIRS, *SPLIT] if given.get("logits_cache") is False else PAIRS
    found = both("loglikelihood", pairs, **given)
    assert len({round(each, 3) for each, _ in found}) > 15


def test_greedy_answers_are_told() -> None:
    theirs, ours = pair(bos=False)
    ids = eval_tokenizer(bos=False)("the dog sat on", return_tensors="pt").input_ids
    most_likely = eval_model().generate(ids, max_new_tokens=3, do_sample=False)[0, ids.shape[1] :].tolist()
    other = [most_likely[0], (most_likely[1] + 1) % 300 + 50, most_likely[2]]
    requests = [(None, ids[0].tolist(), each) for each in (most_likely, most_likely[:1], other, other[:2])]
    found, expected = (each._loglikelihood_tokens(requests, disable_tqdm=True) for each in (ours, theirs))
    assert [greedy for _, greedy in found] == [True, True, False, False]
    assert_close(found, expected)


@pytest.mark.parametrize("max_length", [300, 32, 5])
def test_texts_are_rolled_through_as_windows(max_length: int, calls: list[str]) -> None:
    texts = [(EXAMPLES * 3,), ("",), ("x",), (EXAMPLES,), ("the dog",), ("<bos>the dog",)]
    both("loglikelihood_rolling", texts, max_length=max_length, batch_size=3)
    assert calls == ["score"]


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
    assert not {"scores", "prompts"} & set(re.findall(r"\w+", capsys.readouterr().err))  # one bar is enough


# -- answers ---------------------------------------------------------------------------------------------------


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
        settings(num_beams=3, until=["a"]),
        settings(num_beams=2, until=["t", "e", "on", "  "], length_penalty=2.0),
        settings(num_beams=4, until=["u", "o"], early_stopping=True),
        settings(eos_token_id=[EOS, 40, 41, 42, 43, 44, 45, 46, 47, 48]),
    ],
    ids=str,
)
def test_answers(each: dict[str, Any]) -> None:
    found = texts_of(CONTEXTS, each)
    assert len(set(found)) > 2
    if "num_beams" in each and "until" in each:  # a string in the best beam ends the search
        free = asked(pair()[1], "generate_until", [(context, {**each, "until": []}) for context in CONTEXTS])
        assert found != free


def test_beams_and_settings_of_several_tasks_run_together(calls: list[str]) -> None:
    some = [settings(until=["a"]), settings(until=["N", "\n"], max_gen_toks=5), {"max_gen_toks": 3}]
    both("generate_until", [(context, dict(some[place % 3])) for place, context in enumerate(CONTEXTS)])
    assert calls == ["stream"]
    (text,) = texts_of(["the dog sat"], settings())
    some = [settings(num_beams=2, until=["a"]), settings(until=["N"]), settings(num_beams=3, max_gen_toks=5)]
    some.append(settings(until=[f"t{text[0]}"]))  # begins in the context
    both("generate_until", [(context, dict(each)) for each in some for context in CONTEXTS])


def test_a_string_that_begins_in_the_context_ends_nothing(calls: list[str]) -> None:
    """An answer is looked at by itself."""
    (text,) = texts_of(["the dog sat"], settings())
    until = f"t{text[0]}"
    assert until not in text
    calls.clear()
    assert texts_of(["the dog sat", "Bees"], settings(until=[until]))[0] == text
    assert calls == ["stream", "stream"]


@pytest.mark.parametrize(("max_length", "truncation"), [(24, False), (60, False), (60, True)])
def test_lengths_count_the_context(max_length: int, truncation: bool) -> None:
    texts_of(CONTEXTS, settings(until=["a"]), max_length=max_length, truncation=truncation)
    found = texts_of(["the dog sat", "the dog sat on the mat"], settings(max_length=14))
    assert len(found[0]) > len(found[1])


@pytest.mark.parametrize(
    "own",
    [{"max_new_tokens": 6}, {"repetition_penalty": 1.5}, {"do_sample": True, "temperature": 0.5}, {"max_length": 9}],
)
def test_what_the_model_has_set_for_itself_counts(own: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eval_model(), "generation_config", GenerationConfig(eos_token_id=EOS, **own))
    texts_of(CONTEXTS[:4], settings(until=["c"]))


def test_thoughts_are_cut_off() -> None:
    tokenizer = eval_tokenizer()
    ids = tokenizer("the dog sat", return_tensors="pt").input_ids
    end = int(eval_model().generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] + 3])
    each = settings(max_gen_toks=8, until=[])
    (whole,) = texts_of(["the dog sat"], each)
    for think_end_token in (end, str(end), tokenizer.decode([end])):
        (text,) = texts_of(["the dog sat"], each, think_end_token=think_end_token)
        assert text != whole and whole.endswith(text)
    with pytest.raises(ValueError, match="think_end_token is required"):
        pair(enable_thinking=True)
    with pytest.raises(ValueError, match="not compatible with loglikelihood"):
        asked(pair(enable_thinking=True, think_end_token=THINK)[1], "loglikelihood", [("a", "b")])


def test_samples_differ_and_repeat_with_the_seed_of_torch() -> None:
    requests = [("the dog sat", settings(do_sample=True, temperature=1.5, max_gen_toks=8))] * 4
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        runs.append(asked(pair()[1], "generate_until", requests))
    assert runs[0] == runs[1] and len(set(runs[0])) > 1


# -- what the model is made of ---------------------------------------------------------------------------------


def test_adapters_are_loaded_and_chosen_by_name(saved: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(5)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(type(eval_model()).from_pretrained(saved), config, adapter_name="writer")
    model.add_adapter("judge", config)
    model.eval().save_pretrained(tmp_path)
    given = {"pretrained": model, "tokenizer": eval_tokenizer()}
    answers = [("The dog", {"max_gen_toks": 6, "until": []}), ("Bees", {"max_gen_toks": 6, "until": ["."]})]
    found = {}
    for name in ("judge", "writer", None):  # "writer" is active
        lm = BatchLM(**given, adapter=name)
        found[name] = asked(lm, "loglikelihood", PAIRS[:6]), asked(lm, "generate_until", answers)
        lm.close()
    assert len({str(each) for each in found.values()}) == 3
    for name in ("writer", "judge"):
        model.set_adapter(name)
        theirs = HFLM(**given)
        assert_close(found[name][0], asked(theirs, "loglikelihood", PAIRS[:6]))
        assert found[name][1] == asked(theirs, "generate_until", answers)
    loaded = {"pretrained": str(saved), "peft": str(tmp_path / "judge"), "device": "cpu", "dtype": "float32"}
    assert_close(both("loglikelihood", PAIRS[:6], pair(**loaded)), found["judge"][0])
    with pytest.raises(OptionValueError, match="did you mean 'judge'"):
        BatchLM(**given, adapter="juge")


def test_mixed_precision() -> None:
    theirs, ours = pair(mixed_precision_dtype="bfloat16", softmax_dtype="float32")
    plain, expected, found = (
        [each for each, _ in asked(lm, "loglikelihood", PAIRS[:6])] for lm in (pair()[1], theirs, ours)
    )
    assert found == pytest.approx(expected, rel=0.05) and found != plain


def test_it_is_made_with_the_fields_of_a_config(caplog: pytest.LogCaptureFixture) -> None:
    _, ours = pair(backend="causal", ours={"kv_memory": "3MiB", "keep_prefixes": 2})
    assert ours.generator.config == BatchConfig(kv_memory="3MiB", keep_prefixes=2)
    given = {"pretrained": eval_model(), "tokenizer": eval_tokenizer()}
    lm = BatchLM(**given, backend="torch", batch_config=BatchConfig(page_size=8))
    assert lm.generator.config == BatchConfig(page_size=8, backend="torch")
    caplog.clear()
    pair(batch_size="auto:4")
    assert any("batch_size has no effect" in each.message for each in caplog.records)
    lm.close()
    with pytest.raises(RuntimeError, match="closed"):
        asked(lm, "loglikelihood", PAIRS[:1])
    BatchLM(**given, dtype="float32", device="cpu", peft=None, parallelize=False, revision="main").close()
    BatchLM(**given, dtype=torch.float32).close()


@pytest.mark.parametrize(
    ("given", "error", "why"),
    [
        ({"kv_memry": 5}, ConfigError, "did you mean `kv_memory`"),
        ({"page_size": 0}, ConfigError, "page_size"),
        ({"gpu_memory_utilization": 0.5}, ConfigError, "is called `kv_memory` here"),
        ({"softmax_dtype": "float64"}, ConfigError, "softmax_dtype"),
        ({"tp_plan": "auto"}, UnsupportedModelError, "tp_plan"),
        ({"backend": "seq2seq"}, UnsupportedModelError, "encoder-decoder"),
        ({"pretrained": REFUSED["t5"]}, UnsupportedModelError, "^t5 is an encoder-decoder"),
        ({"pefft": "x"}, ConfigError, "did you mean `peft`"),
        ({"low_cpu_mem_usage": True}, ConfigError, "`low_cpu_mem_usage` is not an argument.*model object"),
        ({"peft": "x/y"}, ConfigError, "`peft` is 'x/y', and would be ignored"),
        ({"delta": "x/y"}, ConfigError, "`delta`.*ignored"),
        ({"gptqmodel": True}, ConfigError, "`gptqmodel`.*ignored"),
        ({"parallelize": True}, ConfigError, "`parallelize`.*ignored"),
        ({"dtype": "float16"}, ConfigError, "`dtype` is float16.*in float32"),
        ({"dtype": torch.bfloat16}, ConfigError, "`dtype` is bfloat16"),
        ({"device": "meta"}, ConfigError, "`device` is meta.*on cpu"),
        ({"revision": "v2"}, ConfigError, "`revision` is 'v2', and would be ignored"),
        ({"adapter": "judge"}, OptionValueError, "`adapter` is 'judge', and the model has no adapters"),
        ({"pretrained": "no/such-model", "adapter": "judge"}, ConfigError, "`adapter` chooses.*as `peft`"),
        ({"pretrained": "no/such-model", "max_lenght": 64}, ConfigError, "did you mean `max_length`"),
    ],
    ids=str,
)
def test_what_is_refused(given: dict[str, Any], error: type[Exception], why: str) -> None:
    made = {"pretrained": eval_model, "tokenizer": eval_tokenizer(), **given}
    if callable(made["pretrained"]):
        made["pretrained"] = made["pretrained"]()
    with pytest.raises(error, match=why):
        BatchLM(**made)


@pytest.mark.parametrize(
    ("kind", "request_", "error", "why"),
    [
        ("loglikelihood", ("dog", ""), PromptError, "^request 1 .*without tokens"),
        ("loglikelihood", ("dog", "s"), PromptError, "^request 1 .*without tokens"),
        ("loglikelihood", ("dog", "the dog " * 40), PromptError, "a continuation of .* max_length is 20"),
        ("generate_until", ("dog", settings(stop=["a"])), UnsupportedOptionError, "`stop` "),
        ("generate_until", ("dog", settings(temprature=1.0)), UnsupportedOptionError, "temperature"),
        ("generate_until", ("dog", settings(max_gen_tok=4)), UnsupportedOptionError, "did you mean `max_gen_toks`"),
        ("generate_until", ("dog", settings(untill=["a"])), UnsupportedOptionError, "did you mean `until`"),
        ("generate_until", ("dog", settings(num_return_sequences=2)), UnsupportedOptionError, "repeats"),
        ("generate_until", ("dog", settings(max_gen_toks=300)), UnsupportedOptionError, "`max_gen_toks` is 300"),
    ],
    ids=str,
)
def test_requests_that_make_no_sense_are_named(kind: str, request_: Any, error: type[Exception], why: str) -> None:
    good = ("a", "b") if kind == "loglikelihood" else ("a", {"max_gen_toks": 2})
    with pytest.raises(error, match=why):
        asked(pair(max_length=20)[1], kind, [good, request_])


# -- the harness's own model, in batches -----------------------------------------------------------------------


@pytest.mark.parametrize("until", [["a"], ["\n"], ["t", "e", "on", "  "], ["u", "o"], []], ids=str)
def test_hf_with_batches_runs_on_the_engine(until: list[str], calls: list[str]) -> None:
    lm = HFLM(pretrained=eval_model(), tokenizer=eval_tokenizer(), batch_size=4)
    requests = [(context, settings(until=until)) for context in CONTEXTS]
    expected = asked(lm, "generate_until", requests)
    assert not calls
    with warnings.catch_warnings(), accelerated(lm.model):
        warnings.simplefilter("error")
        assert asked(lm, "generate_until", requests) == expected
        assert lm.model.last_report is not None
    assert calls == ["generate"] * 2


@pytest.mark.parametrize(
    ("until", "ends"), [(["a"], EOS), (["i", "N"], EOS), (["a"], [EOS, *range(200, 240)])], ids=["a", "i or N", "many"]
)
def test_a_batch_ends_where_the_harness_ends_it(until: list[str], ends: Any) -> None:
    """Token by token: once a string was found in all rows. Those that have ended go on with padding ("<pad>")."""
    model, tokenizer = eval_model(), eval_tokenizer()
    lengths = set()
    for first, second in itertools.pairwise(CONTEXTS):
        inputs = tokenizer([first, second], return_tensors="pt", padding=True, padding_side="left")
        width = inputs.input_ids.shape[1]
        given = {**inputs, "max_length": width + 25, "do_sample": False, "eos_token_id": ends, "pad_token_id": PAD}
        criteria = functools.partial(stop_sequences_criteria, tokenizer, until, width, 2)
        expected = model.generate(**given, stopping_criteria=criteria())
        with warnings.catch_warnings(), accelerated(model):
            warnings.simplefilter("error")
            found = model.generate(**given, stopping_criteria=criteria())
        assert torch.equal(found, expected)
        lengths.add(found.shape[1] - width)
    assert len(lengths) > 2
    with pytest.warns(UserWarning, match="`stopping_criteria` has a MultiTokenEOSCriteria"), accelerated(model):
        model.generate(**given, num_beams=2, stopping_criteria=criteria())  # the harness looks at some beams only


# -- how the harness knows it ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code",
    [
        "import hf_batchllm.lm_eval\n"
        "from lm_eval.api.registry import model_registry\n"
        "assert {'hf-batchllm', 'hf', 'vllm'} <= set(model_registry)",
        "import sys\n"
        "sys.modules['lm_eval'] = None\n"
        "try:\n    import hf_batchllm.lm_eval\n"
        "except ModuleNotFoundError as error:\n    assert 'hf-batchllm[lm-eval]' in str(error), error\n"
        "else:\n    raise AssertionError",
    ],
    ids=["is known", "is not installed"],
)
def test_an_import_makes_it_known(code: str) -> None:
    assert get_model(NAME) is BatchLM
    done = run_quickly([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
