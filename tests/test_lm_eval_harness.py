"""What the evaluation harness keeps of answers, what it is told of the model, and how it knows of it."""

from __future__ import annotations

import functools
import itertools
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval import simple_evaluate
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
    asked,
    assert_close,
    eval_model,
    eval_tokenizer,
    pair,
    task_manager,
)
from support_lm_eval import _quick as _quick  # fixtures, as are the next two
from support_lm_eval import calls as calls
from support_lm_eval import saved as saved
from transformers.utils import logging as transformers_logging

from hf_batchllm import BatchConfig, ConfigError, OptionValueError, UnsupportedModelError, accelerated
from hf_batchllm.bench.harness import main as bench
from hf_batchllm.lm_eval.model import BatchLM
from hf_batchllm.lm_eval.registration import NAME
from hf_batchllm.model.runner import ModelRunner

pytestmark = pytest.mark.xdist_group("lm_eval")  # the harness takes seconds to import


# -- what is kept of the harness -------------------------------------------------------------------------------


def test_answers_are_kept_in_the_cache_of_the_harness(tmp_path: Path, calls: list[str]) -> None:
    lm = pair()[1]
    seen = []
    for _ in range(2):
        result = simple_evaluate(
            model=lm, tasks=NAMES, task_manager=task_manager(), use_cache=str(tmp_path / "cache"), bootstrap_iters=0
        )
        seen.append((result["results"], len(calls)))
    assert seen[0] == seen[1]
    assert len(calls) == 3


def test_what_had_finished_before_an_interrupt_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    _, ours = pair(ours={"max_batch_tokens": 32, "min_shared_tokens": 8})
    kept: list[Any] = []
    monkeypatch.setattr(ours.cache_hook, "add_partial", lambda kind, asked, answer: kept.append((kind, asked, answer)))
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
    for kind, request, answer in kept:
        assert kind == "loglikelihood"
        assert_close([answer], [expected[requests.index(request)]])


def test_chats_go_through_the_template() -> None:
    lm = pair()[1]
    lm.tokenizer.chat_template = "{% for m in messages %}<turn>{{ m.content }}{% endfor %}"
    try:
        results = [
            simple_evaluate(
                model=each,
                tasks=["hb_choices"],
                task_manager=task_manager(),
                apply_chat_template=True,
                bootstrap_iters=0,
            )["results"]["hb_choices"]
            for each in pair()
        ]
    finally:
        lm.tokenizer.chat_template = None
    assert results[0] == results[1]


def test_a_model_with_an_adapter(tmp_path: Path, saved: Path) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(5)
    model = type(eval_model()).from_pretrained(saved)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    peft.get_peft_model(model, config).save_pretrained(tmp_path)
    given = {"pretrained": str(saved), "peft": str(tmp_path), "device": "cpu", "dtype": "float32"}
    theirs, ours = pair(**given)
    found = asked(ours, "loglikelihood", PAIRS[:6])
    assert_close(found, asked(theirs, "loglikelihood", PAIRS[:6]))
    assert [each for each, _ in found] != pytest.approx(
        [each for each, _ in asked(pair()[1], "loglikelihood", PAIRS[:6])]
    )


def test_an_adapter_is_chosen_by_name(saved: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(5)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(type(eval_model()).from_pretrained(saved), config, adapter_name="writer")
    model.add_adapter("judge", config)
    model.eval()
    given = {"pretrained": model, "tokenizer": eval_tokenizer()}
    asks = [("The dog", {"max_gen_toks": 6, "until": []}), ("Bees", {"max_gen_toks": 6, "until": ["."]})]
    found = {}
    for name in ("judge", "writer", None):  # "writer" is active
        lm = BatchLM(**given, adapter=name)
        found[name] = asked(lm, "loglikelihood", PAIRS[:6]), asked(lm, "generate_until", asks)
        lm.close()
    for name in ("writer", "judge"):
        model.set_adapter(name)
        theirs = HFLM(**given)
        assert_close(found[name][0], asked(theirs, "loglikelihood", PAIRS[:6]))
        assert found[name][1] == asked(theirs, "generate_until", asks)
    assert len({str(each) for each in found.values()}) == 3
    with pytest.raises(OptionValueError, match="did you mean 'judge'"):
        BatchLM(**given, adapter="juge")
    with pytest.raises(ConfigError, match=r"`adapter` chooses.*as `peft`"):
        BatchLM("no/such-model", adapter="judge")
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"is a PEFT adapter and no model: use peft=.*judge,pretrained="):
        BatchLM(str(tmp_path / "judge"))


def test_mixed_precision() -> None:
    theirs, ours = pair(mixed_precision_dtype="bfloat16", softmax_dtype="float32")
    expected = asked(theirs, "loglikelihood", PAIRS[:6])
    found = asked(ours, "loglikelihood", PAIRS[:6])
    assert [each for each, _ in found] == pytest.approx([each for each, _ in expected], rel=0.05)
    assert [each for each, _ in found] != [each for each, _ in asked(pair()[1], "loglikelihood", PAIRS[:6])]


def test_it_is_made_with_the_fields_of_a_config(caplog: pytest.LogCaptureFixture) -> None:
    _, ours = pair(backend="causal", ours={"kv_memory": "3MiB", "keep_prefixes": 2})
    assert ours.generator.config == BatchConfig(kv_memory="3MiB", keep_prefixes=2)
    lm = BatchLM(
        pretrained=eval_model(), tokenizer=eval_tokenizer(), backend="torch", batch_config=BatchConfig(page_size=8)
    )
    assert lm.generator.config == BatchConfig(page_size=8, backend="torch")
    caplog.clear()
    pair(batch_size="auto:4")
    assert any("batch_size has no effect" in each.message for each in caplog.records)
    lm.close()
    with pytest.raises(RuntimeError, match="closed"):
        asked(lm, "loglikelihood", PAIRS[:1])


@pytest.mark.parametrize(
    ("given", "error", "why"),
    [
        ({"kv_memry": 5}, ConfigError, "did you mean `kv_memory`"),
        ({"page_size": 0}, ConfigError, "page_size"),
        ({"softmax_dtype": "float64"}, ConfigError, "softmax_dtype"),
        ({"tp_plan": "auto"}, UnsupportedModelError, "tp_plan"),
        ({"backend": "seq2seq"}, UnsupportedModelError, "encoder-decoder"),
        ({"pefft": "x"}, ConfigError, "did you mean `peft`"),
        ({"low_cpu_mem_usage": True}, ConfigError, "`low_cpu_mem_usage` is not an argument.*model object"),
        ({"peft": "x/y"}, ConfigError, "`peft` is 'x/y', and would be ignored.*load the adapter into the model first"),
        ({"delta": "x/y"}, ConfigError, "`delta`.*ignored"),
        ({"gptqmodel": True}, ConfigError, "`gptqmodel`.*ignored"),
        ({"parallelize": True}, ConfigError, "`parallelize`.*ignored"),
        ({"dtype": "float16"}, ConfigError, "`dtype` is float16.*in float32"),
        ({"dtype": torch.bfloat16}, ConfigError, "`dtype` is bfloat16"),
        ({"device": "meta"}, ConfigError, "`device` is meta.*on cpu"),
        ({"revision": "v2"}, ConfigError, "`revision` is 'v2', and nothing is loaded"),
        ({"adapter": "judge"}, OptionValueError, "`adapter` is 'judge', and the model has no adapters"),
    ],
    ids=str,
)
def test_what_is_refused(given: dict[str, Any], error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why):
        BatchLM(pretrained=eval_model(), tokenizer=eval_tokenizer(), **given)


def test_what_a_model_object_is_anyhow_passes() -> None:
    given = {"dtype": "float32", "device": "cpu", "peft": None, "parallelize": False, "revision": "main"}
    BatchLM(pretrained=eval_model(), tokenizer=eval_tokenizer(), **given)
    BatchLM(pretrained=eval_model(), tokenizer=eval_tokenizer(), dtype=torch.float32).close()


def test_an_encoder_decoder_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match=r"^t5 is an encoder-decoder"):
        BatchLM(pretrained=REFUSED["t5"](), tokenizer=eval_tokenizer())


def test_the_bench_runs(saved: Path, capsys: Any) -> None:
    verbosity = transformers_logging.get_verbosity()
    small = "--questions 3 --shots 1 --choices 2 --runs 1 --batch-sizes 1,2 --device cpu --dtype float32"
    try:
        for more in ([], ["--letters", "--sampler", "default", "--rival-questions", "2"]):
            assert bench(["--model", str(saved), *small.split(), *more]) == 0
            shown = capsys.readouterr().out
            assert "hf, batches of " in shown
            assert ", is_greedy in 0 of" in shown
            apart = float(re.search(r"differ by (\S+) at most", shown)[1])
            assert apart < 1e-4
    finally:
        transformers_logging.set_verbosity(verbosity)


# -- its own model, in batches -----------------------------------------------------------------------------------

CONTEXTS = ["the dog sat", "One, two,", f"{EXAMPLES}Köln", "<bos>Bees", "東", "the cat\n", "wet, and", "mat"]


@pytest.mark.parametrize("until", [["a"], ["\n"], ["t", "e", "on", "  "], ["u", "o"], []], ids=str)
def test_hf_with_batches_runs_on_the_engine(until: list[str], calls: list[str]) -> None:
    lm = HFLM(pretrained=eval_model(), tokenizer=eval_tokenizer(), batch_size=4)
    requests = [(context, {"until": until, "max_gen_toks": 14, "do_sample": False}) for context in CONTEXTS]
    expected = asked(lm, "generate_until", requests)
    assert not calls
    with warnings.catch_warnings(), accelerated(lm.model):
        warnings.simplefilter("error")
        assert asked(lm, "generate_until", requests) == expected
        assert lm.model.last_report is not None
    assert calls == ["generate"] * 2


@pytest.mark.parametrize(
    ("until", "ends"),
    [(["a"], EOS), (["i", "N"], EOS), (["a"], [EOS, *range(200, 240)])],
    ids=["a", "i or N", "a, and many ends"],
)
def test_a_batch_ends_where_the_harness_ends_it(until: list[str], ends: Any) -> None:
    """Token by token: once a string was found in all rows. Those that have ended go on with padding ("<pad>")."""
    model, tokenizer = eval_model(), eval_tokenizer()
    lengths = set()
    for first, second in itertools.pairwise([*CONTEXTS, *reversed(CONTEXTS)]):
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


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_an_import_makes_it_known_and_loads_nothing() -> None:
    assert get_model(NAME) is BatchLM
    run(
        "import sys, hf_batchllm.lm_eval\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
        "from lm_eval.api.registry import model_registry\n"
        "assert {'hf-batchllm', 'hf', 'vllm'} <= set(model_registry)\n"
    )


def test_without_the_harness_it_says_what_to_install() -> None:
    run(
        "import sys\n"
        "sys.modules['lm_eval'] = None\n"
        "try:\n    import hf_batchllm.lm_eval\n"
        "except ModuleNotFoundError as error:\n    assert 'hf-batchllm[lm-eval]' in str(error), error\n"
        "else:\n    raise AssertionError\n"
    )
