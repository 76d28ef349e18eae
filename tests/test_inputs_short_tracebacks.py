"""An error of an argument comes without the library's frames; frames of the user's own code stay."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest
from support_families import build
from support_word_tokenizer import word_tokenizer

from hf_batchllm import BatchGenerator, plan_prompts, run_file

FAMILY = "llama"


@pytest.fixture(scope="module")
def generator() -> BatchGenerator:
    return BatchGenerator(build(FAMILY), word_tokenizer())


WRONG: dict[str, Callable[[BatchGenerator], Any]] = {
    "an unknown option": lambda gen: gen.generate(["w5"], temprature=1),
    "a wrong value": lambda gen: gen.generate(["w5"], max_new_tokens=-1),
    "a value that transformers refuses": lambda gen: gen.generate(["w5"], max_new_tokens=1, do_sample=True, min_p=2.0),
    "a bad prompt": lambda gen: gen.generate([[]], max_new_tokens=1),
    "no prompts": lambda gen: gen.generate(5, max_new_tokens=1),
    "a stream": lambda gen: gen.stream(["w5"], temprature=1),
    "scores": lambda gen: gen.score(["w5"]),
    "a plan": lambda gen: gen.plan([[]]),
    "a plan without a model": lambda gen: plan_prompts(5),
    "a generator": lambda gen: BatchGenerator(gen.model, kv_memry="1GiB"),
    "a file": lambda gen: run_file(gen, "/nowhere/in.jsonl", "/nowhere/out.jsonl"),
}


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG)
def test_the_way_down_to_the_line_that_found_it_is_left_out(
    call: Callable[[BatchGenerator], Any], generator: BatchGenerator
) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        call(generator)
    frames = [frame for frame, _ in traceback.walk_tb(caught.value.__traceback__)]
    ours = [frame for frame in frames if frame.f_code.co_filename != __file__]
    assert len(ours) == 1
    assert ours[0].f_locals.get("__tracebackhide__") is True, "IPython and pytest leave out this one, too"
    assert len("".join(traceback.format_exception(caught.value)).splitlines()) < 20


def test_frames_of_the_users_own_code_stay(generator: BatchGenerator) -> None:
    def factory(index: int, prompt_token_ids: list[int]) -> list[Any]:
        raise ValueError("of the factory")

    with pytest.raises(ValueError, match="of the factory") as caught:
        generator.generate(["w5"], max_new_tokens=1, logits_processor=factory)
    names = [frame.f_code.co_name for frame, _ in traceback.walk_tb(caught.value.__traceback__)]
    assert names[-1] == "factory" and len(names) > 3


def test_an_error_that_no_argument_caused_comes_whole(
    generator: BatchGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*given: Any, **more: Any) -> None:
        raise RuntimeError("a mistake of the library")

    monkeypatch.setattr("hf_batchllm.engine.calls.Call.begin", broken)
    with pytest.raises(RuntimeError, match="a mistake") as caught:
        generator.generate(["w5"], max_new_tokens=1)
    assert len(list(traceback.walk_tb(caught.value.__traceback__))) > 4


def test_a_notebook_shows_the_cell_and_the_message(
    generator: BatchGenerator, capsys: pytest.CaptureFixture[str]
) -> None:
    interactive = pytest.importorskip("IPython.core.interactiveshell")
    config = pytest.importorskip("traitlets.config").Config()
    config.HistoryManager.enabled = False
    shell = interactive.InteractiveShell.instance(config=config)
    try:
        shell.user_ns["gen"] = generator
        shell.run_line_magic("colors", "nocolor")
        shell.run_cell("rows = 1\ngen.generate(['w5'], temprature=1)")
        shown = capsys.readouterr().out
        assert "----> 2 gen.generate(['w5'], temprature=1)" in shown
        assert "UnsupportedOptionError: `temprature` is not an option of generate; did you mean `temperature`?" in shown
        assert "hf_batchllm" not in shown and "Unexpected" not in shown
    finally:
        interactive.InteractiveShell.clear_instance()
