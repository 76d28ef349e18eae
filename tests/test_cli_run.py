"""``hf-batchllm run``: its results, what it says, and its exit codes."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support_command import raising, refused, results
from support_command import saved as saved  # a fixture
from support_command import written as written  # a fixture
from support_families import build
from support_word_tokenizer import word_tokenizer

from hf_batchllm import BatchGenerator
from hf_batchllm.cli import main
from hf_batchllm.errors import OutputWriteError

Written, Capture = Callable[..., str], pytest.CaptureFixture[str]
FILES = ["run", "in.jsonl", "out.jsonl"]


def command(saved: str, *more: str) -> list[str]:
    return [*FILES, "--model", saved, "--max-new-tokens", "2", *more]


def test_a_run(written: Written, saved: str, capsys: Capture) -> None:
    written({"id": "a", "q": "w5 w6", "label": 1}, {"q": "w7", "max_new_tokens": 2}, {"q": None})
    options = "--prompt-field q --keep label --max-new-tokens 3 --page-size 16 --no-fuse --token-ids --seed 5"
    options += " --repetition-penalty 1.5 --window 1MiB --limit 3 --dtype float32"
    assert main([*FILES, "--model", saved, *options.split()]) == 3
    out, err = capsys.readouterr()
    assert not out and re.search(r"^out.jsonl: 3 results in .* · 3 prompt tokens \(0 % shared\) · 5 new \(", err, re.M)
    with BatchGenerator(build("llama"), word_tokenizer()) as generator:
        expected = generator.generate(["w5 w6"], max_new_tokens=3, repetition_penalty=1.5)[0]
    first, second, third = results()
    assert (first["id"], first["label"], first["text"]) == ("a", 1, expected.text)
    assert first["token_ids"] == expected.token_ids
    assert second["new_tokens"] == 2 and third["error"] == "line 3: has nothing in 'q' (it has q)"
    record = json.loads(Path("out.jsonl.run.json").read_text())
    assert record["seed"] == 5
    assert record["settings"] == {
        "model": os.path.realpath(saved),
        "dtype": "float32",
        "dialect": "plain",
        "prompt_field": "q",
        "line_settings": True,
        "keep": ["label"],
        "token_ids": True,
        "max_new_tokens": 3,
        "repetition_penalty": 1.5,
    }


def test_other_kinds_of_files(written: Written, saved: str, capsys: Capture) -> None:
    written("context,question,max_new_tokens", "w5,w6,2", "w5,,", name="in.csv")
    chats = ["--template", "{context}\\n{question}", "--chat", "--max-new-tokens", "3", "--model", saved]
    assert main(["run", "in.csv", "table.jsonl", *chats]) == 0
    first, second = results("table.jsonl")
    assert (first["new_tokens"], second["new_tokens"], first["prompt_tokens"]) == (2, 3, 4)  # with the template's own
    written("w5 w6", "", "w7", name="in.txt")
    assert main(["run", "in.txt", "text.jsonl", "--max-new-tokens", "2", "--model", saved]) == 0
    assert [each["prompt_tokens"] for each in results("text.jsonl")] == [2, 1]
    body = {"model": "gpt-x", "messages": [{"role": "user", "content": "w5"}], "max_tokens": 2}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    written(line, line)
    capsys.readouterr()
    assert main([*FILES, "--model", saved]) == 3
    assert "requests name the model 'gpt-x'; all of them are answered by" in capsys.readouterr().err
    good, bad = (each["response"] for each in results())
    assert (good["status_code"], bad["status_code"]) == (200, 400)
    assert "which line 1 has already" in bad["body"]["error"]["message"]
    assert "--chat does not go with a file of OpenAI's requests" in refused(capsys, *command(saved, "--chat"))


def test_a_log_file_gets_lines_of_progress(saved: str, written: Written, capsys: Capture) -> None:
    """Where stderr is no terminal, transformers' own bars are off, and the run's lines come nevertheless."""
    written(*({"prompt": f"w{number}"} for number in range(40)))
    assert main(command(saved)) == 0
    said = capsys.readouterr().err.splitlines()
    assert said[0].endswith(f"loading {saved}") and len(said) < 8
    assert any(re.search(r"40 / 40 done", line) for line in said[1:-1]), said
    assert main(command(saved, "--restart", "--quiet")) == 0
    assert not re.search(r"done", capsys.readouterr().err)


def test_a_finished_run_needs_no_model(written: Written, saved: str, tmp_path: Path, capsys: Capture) -> None:
    written({"prompt": "w5"})
    run = command(shutil.copytree(saved, str(tmp_path / "model")))
    assert main(run) == 0
    shutil.rmtree(tmp_path / "model")
    assert main(run) == 0
    capsys.readouterr()
    assert "there is no such folder" in refused(capsys, *run, "--restart")
    assert len(results()) == 1


def test_warnings_are_lines(written: Written, saved: str, capsys: Capture) -> None:
    written({"prompt": "w5 w6"})
    assert main([*FILES, "--model", saved, "--top-p", "0.5"]) == 0
    err = capsys.readouterr().err
    assert "hf-batchllm: warning: `top_p` has no effect on greedy decoding" in err
    assert err.count("Set `max_new_tokens`") == 1 and "Traceback" not in err and ".py:" not in err
    assert "`num_return_sequences` is 2, and greedy decoding gives one" in refused(
        capsys, *command(saved, "-n", "2", "--restart")
    )


@pytest.mark.parametrize(
    ("lines", "more", "said"),
    [
        (
            [{"question": "a"}, {"question": "b"}],
            [],
            "line 1: has no `prompt` and no `messages` (it has question): name its field with "
            "--prompt-field, or pass a --template (and so with all of them)",
        ),
        ([{"question": "a"}], ["--template", "{q}"], "line 1: has no field 'q', which the template names"),
        (
            [{"question": "a"}],
            ["--prompt-field", "question", "--keep", "label"],
            "--keep label: the records have no such field; they have question",
        ),
    ],
)
def test_what_makes_all_lines_bad_is_said_once(
    lines: list[Any], more: list[str], said: str, written: Written, capsys: Capture
) -> None:
    written(*lines)
    assert refused(capsys, *FILES, "--model", "m", *more).startswith(said)
    assert not Path("out.jsonl").exists()


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        (raising(OutputWriteError("the disk is full", 3)), 1, "the disk is full"),
        (
            raising(RuntimeError("shapes do not fit")),
            1,
            "the run was stopped by RuntimeError: shapes do not fit (--traceback shows where). 1 of 2 results are in "
            "out.jsonl: run the same again, and it goes on from them\n",
        ),
        (raising(KeyboardInterrupt()), 130, "interrupted: 1 of 2 results are in out.jsonl: run the same again"),
        (lambda *given, **named: os.kill(os.getpid(), signal.SIGTERM), 130, "interrupted: 1 of 2"),
        (lambda *given, **named: os.kill(os.getpid(), signal.SIGHUP), 130, "interrupted: 1 of 2"),
    ],
)
def test_exit_codes_of_runs_that_stop(
    how: Any,
    code: int,
    said: str,
    written: Written,
    saved: str,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    written({"prompt": "w5"}, {"prompt": "w6"})
    assert main(command(saved, "--limit", "1", "--quiet")) == 0
    hangup = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored
    request.addfinalizer(lambda: signal.signal(signal.SIGHUP, hangup))
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(BatchGenerator, "stream", how)
    assert main(command(saved, "--quiet")) == code
    assert capsys.readouterr().err.startswith(f"hf-batchllm: error: {said}")
    assert signal.getsignal(signal.SIGTERM) is before
    assert main(command(saved, "--quiet", "--traceback")) == code
    assert ("Traceback" in capsys.readouterr().err) == (code == 1)
    assert len(results()) == 1


def test_under_nohup_a_run_goes_on(written: Written, saved: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written({"prompt": "w5"})
    stream = BatchGenerator.stream

    def hung_up(*given: Any, **named: Any) -> Any:
        os.kill(os.getpid(), signal.SIGHUP)
        return stream(*given, **named)

    monkeypatch.setattr(BatchGenerator, "stream", hung_up)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert main(command(saved)) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_run_that_is_refused_or_interrupted_leaves_no_files(
    written: Written, saved: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    written({"prompt": "w5"})

    def files() -> list[str]:
        return sorted(path.name for path in Path().iterdir())

    def interrupted(target: str = "out.jsonl") -> str:
        with monkeypatch.context() as patched:
            patched.setattr("transformers.AutoModelForCausalLM.from_pretrained", raising(KeyboardInterrupt()))
            assert main(["run", "in.jsonl", target, *command(saved)[3:]]) == 130
        return capsys.readouterr().err

    for target in ("out.jsonl", "out.csv"):
        said = f"hf-batchllm: loading {saved}\nhf-batchllm: error: interrupted.\n"
        assert interrupted(target) == said and files() == ["in.jsonl"]
    Path("out.jsonl").touch()  # the user's own, which stays
    refused(capsys, *command(saved, "--tokenizer", "./nowhere"))
    assert files() == ["in.jsonl", "out.jsonl"]
    assert main(command(saved)) == 0
    before = Path("out.jsonl").read_bytes()
    written({"prompt": "w5"}, {"prompt": "w6"})
    capsys.readouterr()
    assert interrupted() == (
        f"hf-batchllm: 1 of 2 results are there; loading {saved}\nhf-batchllm: error: interrupted: 1 of 2 results are "
        "in out.jsonl: run the same again, and it goes on from them.\n"
    )
    assert Path("out.jsonl").read_bytes() == before
    with open("out.jsonl", "ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert "is writing to" in refused(capsys, *command(saved))
    assert main(command(saved)) == 0
    assert "1 of 2 results are there; loading" in capsys.readouterr().err and len(results()) == 2
