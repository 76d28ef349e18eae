"""The command line of ``hf-batchllm``: its help, its options, and what is said of one that cannot be used."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support_command import ROOT, refused

import hf_batchllm
from hf_batchllm import BatchConfig
from hf_batchllm.cli import main
from hf_batchllm.cli.arguments import run_parser
from hf_batchllm.cli.values import settings_from
from hf_batchllm.files.settings import NAMES
from hf_batchllm.inputs.option_table import PROMPT_OPTIONS

RUN = "run in out.jsonl --model m"


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("command", [[], ["run"], ["merge"], ["plan"], ["check"]])
def test_help_fits_and_names_the_exit_codes(
    command: list[str], columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main([*command, "--help"]) == 0
    out, err = capsys.readouterr()
    assert not err and out.startswith(" ".join(["usage: hf-batchllm", *command]))
    assert max(map(len, out.splitlines())) <= columns
    assert "xit codes" in out
    if command == ["run"]:
        assert all(f"--{field.name.replace('_', '-')}" in out for field in dataclasses.fields(BatchConfig))
        assert "tokens in a page of the KV cache. Default: 64\n" in out and "object" not in out.partition("engine")[2]


def test_help_and_refusals_come_without_torch(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "w5"}\n')
    (tmp_path / "ids.jsonl").write_text('{"prompt": [5, 6]}\n')
    code = (
        "import sys; from hf_batchllm.cli import main\n"
        "assert main(['run', '--help']) == main(['plan', '--help']) == main(['--help']) == main(['--version']) == 0\n"
        "assert main(['plan', 'ids.jsonl', '--json']) == 0\n"
        "run = ['run', 'in.jsonl', 'out.jsonl', '--model']\n"
        "assert main(['run', '/nowhere/in.jsonl', 'out.jsonl', '--model', 'm']) == 2\n"
        "assert main(['run', 'in.jsonl', 'nowhere/out.jsonl', '--model', 'm']) == 2\n"
        "assert main([*run, './nowhere']) == main([*run, 'in.jsonl']) == 2\n"
        "assert main([*run, 'm', '--tokenizer', './nowhere']) == main([*run, 'm', '--top-p', '3']) == 2\n"
        "assert main(['plan', 'in.jsonl', '--tokenizer', './nowhere']) == 2\n"
        "assert main(['run', 'in.jsonl', 'out.jsonl', '--modle', 'm']) == 2\n"
        "assert main(['merge', '/nowhere/out.jsonl']) == main(['check', '--only', 'x']) == 2\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    command, env = [sys.executable, "-c", code], {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env, timeout=60)
    assert done.returncode == 0, done.stderr
    for said in (
        "/nowhere/in.jsonl cannot be read: there is no such file",
        "out.jsonl cannot be written: there is no folder",
        "--model ./nowhere: there is no such folder",
        "--model in.jsonl: there is no such folder",
        "--tokenizer ./nowhere: there is no such folder",
    ):
        assert said in done.stderr
    assert '"tokens": 2' in done.stdout and sorted(os.listdir(tmp_path)) == ["ids.jsonl", "in.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("", "no command was given; commands are run, merge, plan, check, bench, lm-eval"),
        ("rum", "there is no command 'rum'; commands are run, merge, plan"),
        ("--model m", "there is no command '--model'; commands are run"),
        ("run in", "the following arguments are required: OUT, -m/--model"),
        ("run in out out2 --model m", "unrecognized arguments: out2"),
        ("run -i in -o out.jsonl --model m", "unrecognized arguments: -i -o"),
        (f"{RUN} --max-new-token 5", "unrecognized arguments: --max-new-token 5"),
        (f"{RUN} --max_new_tokens 5", "unrecognized arguments: --max_new_tokens 5"),
        ("run in out.jsonl --modle m", "the following arguments are required: -m/--model"),
        ("run --shards 2/8 in out.jsonl --model m", "unrecognized arguments: --shards out.jsonl"),
        (f"{RUN} --device cpu --gpus 2", "argument --gpus: not allowed with argument --device"),
        (f"{RUN} --tp 2", "pass --gpus, too"),
        (f"{RUN} --dtype fp16", "invalid choice: 'fp16' (choose from"),
        (f"{RUN} --limit 0", "argument --limit: it must be a whole number above 0, not '0'"),
        (f"{RUN} --window 5q", "argument --window: it must be a size such as 256MiB, not '5q'"),
        (f"{RUN} --seed x", "`seed` must be a whole number from 0"),
        (f"{RUN} --kv-memory 5x", "`kv_memory` must be a size such as"),
        (f"{RUN} --max-new-tokens 0", "`max_new_tokens` must be at least 1"),
        (f"{RUN} --top-p 3", "`top_p` is 3: it is a probability, from 0 to 1"),
        (f"{RUN} --min-p 2", "`min_p` is 2: it is a probability, from 0 to 1"),
        (f"{RUN} --set n=0", "`n` must be at least 1"),
        (f"{RUN} --max-time 5", "`max_time` is not for files"),
        (f"{RUN} --set temprature=1", "`temprature` is not the name of a setting; did you mean `temperature`?"),
        (f"{RUN} --set foo=1", "`foo` is not a setting"),
        (f"{RUN} --set foo", "takes NAME=VALUE"),
        (f"{RUN} --top-k 5 --set top_k=6", "top_k is given twice, with --set and with its own option"),
        (f"{RUN} -n 5 --set n=6", "`n` contradicts `num_return_sequences`: keep one of them"),
        (f"{RUN} --template x", "the template names no field"),
        (f"{RUN} --template {{x}} --prompt-field x", "not allowed with argument --template"),
        (f"{RUN} --template @/nowhere", "argument --template: /nowhere: No such file"),
        (f"{RUN} --tools nowhere", "argument --tools: it is neither JSON nor a file: nowhere"),
        (
            f"{RUN} --generation-config /nowhere",
            "argument --generation-config: it is neither JSON nor a file: /nowhere",
        ),
        ("run in out.txt --model m", "its name does not say what it is (.jsonl, .ndjson, .json, .csv, .tsv, .parquet)"),
        ("run in out.xyz --model m", "pass the format (`--output-format jsonl`)"),
        (f"{RUN} --output-format xml", "format 'xml': it must be one of jsonl, csv"),
        ("run in - --model m --restart", "`restart` needs an output that can be continued"),
        ("run in /dev/stdout --model m --retry-errors", "`retry_errors` needs an output that can be continued"),
        ("run in - --model m --shard 1/2", "`shard` needs an output that can be continued"),
        (f"{RUN} --shard 0/8", "for the second of eight, not '0/8' (in a Slurm script"),
        (f"{RUN} --image-folder none", "is 'none', and there is no such folder"),
        (f"{RUN} --image-folder . --gpus 2", "images are not supported on several GPUs"),
        ("merge out", "pass the format (`--output-format jsonl`)"),
        ("merge out.jsonl", "out.jsonl has no parts: there is no out.jsonl.shard-1-of-N.jsonl"),
        ("plan in --max-new-tokens 5", "unrecognized arguments: --max-new-tokens 5"),
        ("plan in --html /nowhere/a.html", "/nowhere/a.html: No such file"),
        ("check --only x", "argument --only: invalid choice: 'x'"),
    ],
)
def test_a_command_that_cannot_be_used_says_why(
    arguments: str, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert said in refused(capsys, *arguments.split())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ("", {}),
        (
            "--temperature .5 --stop \\n --stop x",
            {"temperature": 0.5, "do_sample": True, "stop_strings": ["\n", "x"]},
        ),
        ("-n 3 --set max_tokens=4", {"num_return_sequences": 3, "max_new_tokens": 4}),
        ("--n 3 --max-completion-tokens 4", {"num_return_sequences": 3, "max_new_tokens": 4}),
        ("--ignore-eos --no-do-sample --num-beams 2", {"ignore_eos": True, "do_sample": False, "num_beams": 2}),
        ("--stop-token-ids [1,2] --min-p 0.1", {"stop_token_ids": [1, 2], "min_p": 0.1}),
        (
            "--generation-config . --top-p 0.5",
            {"temperature": 0.6, "top_p": 0.5, "do_sample": True, "eos_token_id": [1, 2]},
        ),
        ("--generation-config . --temperature 0", {"do_sample": False, "eos_token_id": [1, 2]}),
    ],
)
def test_settings_of_the_command_line(
    given: str, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = {"temperature": 0.6, "top_p": 0.9, "do_sample": True, "eos_token_id": [1, 2], "transformers_version": "5"}
    Path("generation_config.json").write_text(json.dumps({**config, "_from_model_config": True}))
    assert settings_from(run_parser().parse_args([*RUN.split()[1:], *given.split()])).options == options


def test_forms_of_answers_and_options_of_chats_may_come_from_files(tmp_path: Path) -> None:
    (tmp_path / "given").write_text('{"type": "object"}')
    (tmp_path / "tools").write_text('[{"type": "function"}]')
    for flag, given in (("--schema", tmp_path / "given"), ("--schema", "true"), ("--grammar", tmp_path / "given")):
        found = settings_from(run_parser().parse_args([*RUN.split()[1:], flag, str(given)])).grammar
        assert found is not None and '"type": "object"' in found.text
    chats = ["--tools", str(tmp_path / "tools"), "--chat-template-kwargs", '{"thinking": false}']
    assert settings_from(run_parser().parse_args([*RUN.split()[1:], *chats])).prompt_options == {
        "tools": [{"type": "function"}],
        "chat_template_kwargs": {"thinking": False},
    }


def test_every_setting_is_an_option() -> None:
    asked = vars(run_parser().parse_args(RUN.split()[1:]))
    assert {*NAMES} - {"n", "stop", "max_tokens", "max_completion_tokens", "min_tokens", "adapter"} <= set(asked)
    assert set(PROMPT_OPTIONS) <= set(asked)


def test_other_commands_are_handed_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("hf_batchllm.bench.__main__.main", lambda asked, name: 7 if asked == ["--x"] and name else 1)
    assert main(["bench", "--x"]) == 7
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'hf-batchllm[lm-eval]'" in refused(capsys, "lm-eval", "--tasks", "x")


def test_the_package_is_the_command_too() -> None:
    command = [sys.executable, "-m", "hf_batchllm", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stdout == f"hf-batchllm {hf_batchllm.__version__}\n", done.stderr


def test_a_command_without_stdout() -> None:
    """No file that is opened later is to have its number."""
    code = "from hf_batchllm.cli import main; main(['--version'])"
    command = ["sh", "-c", f'exec "{sys.executable}" -c "{code}" >&-']
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == "hf-batchllm needs open streams: redirect a closed one to /dev/null\n"


def test_an_interrupt_before_a_command_begins(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hf_batchllm.cli.run.run_parser", interrupted)
    assert main(["run", "in.jsonl", "out.jsonl", "--model", "m"]) == 130
    assert capsys.readouterr().err == "hf-batchllm: error: interrupted.\n"
