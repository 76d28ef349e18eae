"""``hf-batchllm run``: its results, what it says, and its exit codes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support_accelerated import word_tokenizer
from support_command import raising, refused, results
from support_command import runs as runs  # a fixture
from support_command import saved as saved  # a fixture
from support_command import written as written  # a fixture
from support_families import build
from support_file_stand_ins import Runs

from hf_batchllm import BatchGenerator
from hf_batchllm.cli import main
from hf_batchllm.errors import OutputWriteError


def test_a_log_file_gets_lines_of_progress(
    saved: str, written: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Where stderr is no terminal, transformers' own bars are off, and the run's lines come nevertheless."""
    written(*({"prompt": f"w{number}"} for number in range(40)))
    command = ["run", "in.jsonl", "out.jsonl", "--model", saved, "--max-new-tokens", "2"]
    assert main(command) == 0
    said = capsys.readouterr().err.splitlines()
    assert said[0].endswith(f"loading {saved}") and len(said) < 8
    assert any(re.search(r"40 / 40 done", line) for line in said[1:-1]), said
    assert main([*command, "--restart", "--quiet"]) == 0
    assert not re.search(r"done", capsys.readouterr().err)


def test_a_finished_run_needs_no_model_folder(
    written: Callable[..., str], saved: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written({"prompt": "w5"})
    shutil.copytree(saved, tmp_path / "model")
    run = ["run", "in.jsonl", "out.jsonl", "--max-new-tokens", "2", "--model", str(tmp_path / "model")]
    assert main(run) == 0
    shutil.rmtree(tmp_path / "model")
    assert main(run) == 0
    capsys.readouterr()
    assert "there is no such folder" in refused(capsys, *run, "--restart")
    assert len(results()) == 1


def test_a_run(runs: Runs, written: Callable[..., str], saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    written({"id": "a", "q": "w5 w6", "label": 1}, {"q": "w7", "max_new_tokens": 2}, {"q": None})
    options = "--prompt-field q --keep label --max-new-tokens 3 --page-size 16 --no-fuse --token-ids --seed 5"
    options += " --set repetition_penalty=1.5 --window 1MiB --limit 3 --fsync never --dtype float32"
    code = main(["run", "in.jsonl", "out.jsonl", "--model", saved, *options.split()])
    out, err = capsys.readouterr()
    assert code == 3
    assert not out
    assert err == "done\n"
    with BatchGenerator(build("llama"), word_tokenizer()) as generator:
        expected = generator.generate(["w5 w6"], max_new_tokens=3, repetition_penalty=1.5)[0]
    first, second, third = results()
    assert (first["id"], first["label"], first["text"]) == ("a", 1, expected.text)
    assert first["token_ids"] == expected.token_ids
    assert second["new_tokens"] == 2
    assert third["error"] == "line 3: has nothing in 'q' (it has q)"
    (call,) = runs.calls
    options = call["options"]
    assert (options.seed, options.window_bytes, options.fsync, options.limit) == (5, 1 << 20, "never", 3)
    assert call["identity"] == {
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


def test_settings_of_the_command_line(runs: Runs, written: Callable[..., str], tmp_path: Path) -> None:
    written({"prompt": "w5"})

    empty = tmp_path / "model"
    empty.mkdir()
    (empty / "config.json").write_text("{}")

    def options(*arguments: str) -> dict[str, Any]:
        runs.calls.clear()
        assert main(["run", "in.jsonl", "out.jsonl", "--model", str(empty), "--quiet", *arguments]) == 2
        return dict(runs.calls[0]["reader"].base.options)

    assert options() == {}
    assert options("--temperature", "0.5", "--stop", "\\n", "--stop", "x") == {
        "temperature": 0.5,
        "do_sample": True,
        "stop_strings": ["\n", "x"],
    }
    assert options("-n", "3", "--set", "max_tokens=4") == {"num_return_sequences": 3, "max_new_tokens": 4}
    config = {"temperature": 0.6, "top_p": 0.9, "do_sample": True, "eos_token_id": [1, 2], "transformers_version": "5"}
    (tmp_path / "generation_config.json").write_text(json.dumps({**config, "_from_model_config": True}))
    given = options("--generation-config", str(tmp_path), "--top-p", "0.5")
    assert given == {"temperature": 0.6, "top_p": 0.5, "do_sample": True, "eos_token_id": [1, 2]}
    assert options("--generation-config", str(tmp_path), "--temperature", "0") == {
        "do_sample": False,
        "eos_token_id": [1, 2],
    }


def test_a_batch_file_of_openais(runs: Runs, written: Callable[..., str], saved: str, capsys: Any) -> None:
    body = {"model": "gpt-x", "messages": [{"role": "user", "content": "w5"}], "max_tokens": 2}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    written(line, line)
    assert main(["run", "in.jsonl", "out.jsonl", "--model", saved]) == 3
    assert "requests name the model 'gpt-x'; all of them are answered by" in capsys.readouterr().err
    good, bad = results()
    assert good["response"]["status_code"] == 200
    assert bad["response"]["status_code"] == 400
    assert "which line 1 has already" in bad["response"]["body"]["error"]["message"]


def test_a_table(runs: Runs, written: Callable[..., str], saved: str) -> None:
    written("context,question,max_new_tokens", "w5,w6,2", "w5,,", name="in.csv")
    arguments = ["--template", "{context}\\n{question}", "--chat", "--max-new-tokens", "3", "--quiet"]
    assert main(["run", "in.csv", "out.jsonl", "--model", saved, *arguments]) == 0
    first, second = results()
    assert (first["new_tokens"], second["new_tokens"]) == (2, 3)
    assert first["prompt_tokens"] == 4  # with the template's own


def test_exit_codes_of_runs_that_stop(
    runs: Runs, written: Callable[..., str], saved: str, capsys: pytest.CaptureFixture[str]
) -> None:
    written({"prompt": "w5"})
    run = ["run", "in.jsonl", "out.jsonl", "--model", saved, "--max-new-tokens", "2"]

    def stops(how: Callable[[Any], Any]) -> tuple[int, str]:
        runs.fail = how
        before = signal.getsignal(signal.SIGTERM)
        code = main(run)
        assert signal.getsignal(signal.SIGTERM) is before
        return code, capsys.readouterr().err

    assert stops(raising(KeyboardInterrupt())) == (130, "hf-batchllm: error: interrupted.\n")
    Path("out.jsonl").write_text("{}\n")
    code, said = stops(raising(OutputWriteError("the disk is full", 3)))
    assert (code, said) == (1, "hf-batchllm: error: the disk is full\n")
    code, said = stops(raising(RuntimeError("shapes do not fit")))
    assert (code, said) == (
        1,
        "hf-batchllm: error: the run was stopped by RuntimeError: shapes do not fit (--traceback shows where). "
        "The finished results are in out.jsonl: the same command continues from them\n",
    )
    code, said = stops(raising(KeyboardInterrupt()))
    assert code == 130
    assert said == (
        "hf-batchllm: error: interrupted. The finished results are in out.jsonl: the same command continues from them\n"
    )
    code, said = stops(lambda generator: os.kill(os.getpid(), signal.SIGTERM))
    assert code == 143
    nohup = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        code, said = stops(lambda generator: os.kill(os.getpid(), signal.SIGHUP))
        assert code == 0  # whoever ignores it, as nohup does, wants the run to go on
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        code, said = stops(lambda generator: os.kill(os.getpid(), signal.SIGHUP))
        assert code == 129
    finally:
        signal.signal(signal.SIGHUP, nohup)
    runs.fail = raising(RuntimeError("shapes do not fit"))
    assert main([*run, "--traceback"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_run_that_is_refused_or_interrupted_leaves_no_files(
    written: Callable[..., str], saved: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    written({"prompt": "w5"})
    folder = Path("in.jsonl").resolve().parent
    for target in ("out.jsonl", "out.csv"):
        run = ["run", "in.jsonl", target, "--model", saved, "--max-new-tokens", "2"]
        capsys.readouterr()
        with monkeypatch.context() as patched:
            patched.setattr("hf_batchllm.cli.loading.load_model", raising(KeyboardInterrupt()))
            assert main(run) == 130
            assert capsys.readouterr().err == f"hf-batchllm: loading {saved}\nhf-batchllm: error: interrupted.\n"
        assert main([*run, "--tokenizer", "./nowhere"]) == 2
        assert sorted(path.name for path in folder.iterdir()) == ["in.jsonl"]
    run[2] = "out.jsonl"
    Path("out.jsonl").touch()  # the user's own, which stays
    assert main([*run, "--tokenizer", "./nowhere"]) == 2
    assert sorted(path.name for path in folder.iterdir()) == ["in.jsonl", "out.jsonl"]
    assert main(run) == 0
    before = Path("out.jsonl").read_bytes(), Path("out.jsonl.run.json").read_bytes()
    written({"prompt": "w5"}, {"prompt": "w6"})
    capsys.readouterr()
    with monkeypatch.context() as patched:
        patched.setattr("hf_batchllm.cli.loading.load_model", raising(KeyboardInterrupt()))
        assert main(run) == 130
        assert capsys.readouterr().err == (
            f"hf-batchllm: 1 of 2 results are there; loading {saved}\nhf-batchllm: error: interrupted. "
            "The finished results are in out.jsonl: the same command continues from them\n"
        )
        patched.setattr("hf_batchllm.cli.run.first_records", raising(KeyboardInterrupt()))
        assert main(run) == 130
        assert "Nothing was changed: earlier results are in out.jsonl" in capsys.readouterr().err
    assert Path("out.jsonl").read_bytes() == before[0]
    assert main(run) == 0
    assert "1 of 2 results are there; loading" in capsys.readouterr().err


def test_it_speaks_of_its_own_options(
    written: Callable[..., str], saved: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = written({"prompt": "w5 w6"})
    assert main(["run", name, "out.jsonl", "--model", saved, "--top-p", "0.5"]) == 0
    err = capsys.readouterr().err
    assert "--top-p has no effect on greedy decoding: set a --temperature above 0 to sample" in err
    assert "Set --max-new-tokens" in err and "`" not in err
    assert "out.jsonl: 1 result in " in err and " · 2 prompt tokens (0 % shared) · 20 new (" in err
    assert "-n is 2, and greedy decoding gives one" in refused(capsys, "run", name, "o.jsonl", "-m", saved, "-n", "2")
    # What a line says keeps the line's own name.
    name = written({"prompt": "w5 w6", "top_p": 0.5}, name="line.jsonl")
    assert main(["run", name, "other.jsonl", "--model", saved, "--max-new-tokens", "2"]) == 0
    assert "`top_p` has no effect on greedy decoding" in capsys.readouterr().err


def test_a_text_file(written: Callable[..., str], saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    name = written("w5 w6", "", "w7", name="in.txt")
    assert main(["run", name, "out.jsonl", "--model", saved, "--max-new-tokens", "2"]) == 0
    assert [each["prompt_tokens"] for each in results()] == [2, 1]
    assert main(["plan", name, "--tokenizer", saved]) == 0
    assert "prompts                            2" in capsys.readouterr().out
