"""The command line of ``hf-batchllm``: its help, its options, and what is said of one that cannot be used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support_command import ROOT, refused

import hf_batchllm
from hf_batchllm import BatchConfig
from hf_batchllm.cli import main
from hf_batchllm.cli.config_flags import field_docs, shortened


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("command", [[], ["run"], ["merge"], ["plan"]])
def test_help_fits_and_names_the_exit_codes(
    command: list[str], columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main([*command, "--help"]) == 0
    out, err = capsys.readouterr()
    assert not err
    assert max(map(len, out.splitlines())) <= columns
    for text in ("exit codes:", "examples:", "finished, and some lines have errors"):
        assert text in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"hf-batchllm {hf_batchllm.__version__}\n"


def test_help_and_refusals_come_without_torch() -> None:
    code = (
        "import sys; from hf_batchllm.cli import main\n"
        "assert main(['run', '--help']) == 0 and main(['--version']) == 0\n"
        "assert main(['run', '/nowhere/in.jsonl', 'out.jsonl', '--model', 'm']) == 2\n"
        "assert main(['run', 'in.jsonl', 'out.jsonl', '--modle', 'm']) == 2\n"
        "assert main(['merge', '/nowhere/out.jsonl']) == 2\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "/nowhere/in.jsonl cannot be read: there is no such file" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("", "no command was given. Commands are run, merge, plan, check, bench, lm-eval"),
        ("rum", "there is no command 'rum'; did you mean run?"),
        ("--model m", "the command comes first"),
        ("run in", "the following arguments are required: OUT, --model/-m"),
        ("run in out out2 --model m", "one argument too many: 'out2'"),
        (
            "run in out.jsonl --model m --max-new-token 5",
            "there is no option --max-new-token; did you mean --max-new-tokens?",
        ),
        ("run in out.jsonl --model m --max_new_tokens 5", "did you mean --max-new-tokens?"),
        ("run in out.jsonl --modle m", "there is no option --modle; did you mean --model?"),
        ("run --modle m", "there is no option --modle; did you mean --model?"),
        ("run in out.jsonl --max-new-tokens 5", "the following arguments are required: --model/-m"),
        ("run in out.jsonl --model m --n 5", "there is no option --n; did you mean -n?"),
        ("run in out.jsonl --model m --temprature=1", "did you mean --temperature?"),
        ("run in out.jsonl --model m --seed x", "argument --seed: 'x' is not a whole number"),
        ("run in out.jsonl --model m --dtype fp16", "did you mean float16?"),
        ("run in out.jsonl --model m --dtype bf16", "did you mean bfloat16?"),
        ("run in out.jsonl --model m --limit 0", "'0' is less than 1"),
        ("run in out.jsonl --model m --kv-memory 5x", "--kv-memory must be a size such as"),
        ("run in out.jsonl --model m --backend trition", '--backend must be "auto", "torch" or "triton"'),
        ("run in out.jsonl --model m --temperature -1", "--temperature must be 0"),
        ("run in out.jsonl --model m --max-new-tokens 0", "--max-new-tokens must be at least 1"),
        ("run in out.jsonl --model m --top-p 3", "--top-p is 3: it is a probability, from 0 to 1"),
        ("run in out.jsonl --model m --top-k -1", "--top-k is -1: pass a whole number above 0, or 0 for none"),
        ("run in out.jsonl --model m --set min_p=2", "--set min_p is 2: it is a probability, from 0 to 1"),
        ("run in out.jsonl --model m --set n=0", "--set n must be at least 1"),
        ("run in out.jsonl --model m -n 0", "-n must be at least 1"),
        ("run in out.jsonl --model m --logprobs -1", "--logprobs must be a whole number of at least 0"),
        ("run in out.txt --model m", "an answer may have several lines, which a .txt cannot hold"),
        ("run in out.jsonl --model m --set temprature=1", "is not the name of a setting; did you mean --temperature?"),
        ("run in out.jsonl --model m --set foo=1", "`foo` is not a setting"),
        ("run in out.jsonl --model m --set stop_sequences=x", "`stop_sequences` is called --stop here"),
        ("run in out.jsonl --model m --set foo", "takes NAME=VALUE"),
        (
            "run in out.jsonl --model m --top-k 5 --set top_k=6",
            "top_k is given twice, with --set and with its own option",
        ),
        ("run in out.jsonl --model m --window 5q", "--window must be a size such as 256MiB, not '5q'"),
        ("run in out.jsonl --model m --template x", "the template names no field"),
        ("run in out.jsonl --model m --template {x} --prompt-field x", "keep one of them"),
        ("run in out.jsonl --model m --template @/nowhere", "--template @/nowhere: No such file"),
        ("run in out.jsonl --model m --generation-config /nowhere", "--generation-config /nowhere: No such file"),
        ("run in out.xyz --model m", "its name does not say what it is"),
        ("run in out.jsonl --model m --output-format xml", "format 'xml': it must be one of jsonl, csv"),
        ("run in - --model m --restart", "--restart needs an output that can be continued"),
        ("run in - --model m --shard 1/2", "--shard needs an output that can be continued"),
        ("run in out.jsonl --model m --shard 0/8", "--shard is '0/8': parts are counted from 1, so the first is 1/8"),
        ("run in out.jsonl --model m --shard 0/8", "#SBATCH --array=1-8"),
        ("run in out.jsonl --model m --shard 9/8", "there is no part 9 of 8. The last one is 8/8"),
        ("run in out.jsonl --model m --shard 1/0", "a file has at least 1 part, and at most 100,000"),
        ("run in out.jsonl --model m --shard 1/100001", "a file has at least 1 part, and at most 100,000"),
        ("run in out.jsonl --model m --shard 2", "--shard says which part of how many, as in 2/8 for the second of"),
        ("run in out.jsonl --model m --shard a/b", "not 'a/b'"),
        ("run in out.jsonl --model m --shard /", "not '/'"),
        ("run in out.jsonl --model m --shards 2/8", "did you mean --shard?"),
        ("merge", "the following arguments are required: OUT"),
        ("merge -", "stdout is no file: give the output that the jobs were given"),
        ("merge out", "pass the format (`--output-format jsonl`)"),
        ("merge out.jsonl", "out.jsonl has no parts: there is no out.jsonl.shard-1-of-N.jsonl"),
        ("merge /nowhere/out.jsonl", "/nowhere cannot be read: there is no such file"),
        ("merg out.jsonl", "did you mean merge?"),
        ("run in out.jsonl --model m --ignore-eos", "--ignore-eos; it is a setting: pass --set ignore_eos=VALUE"),
        ("run in out.jsonl --model m --stop-token-ids 5", "it is a setting: pass --set stop_token_ids=VALUE"),
        ("run in out.jsonl --model m --max-model-len 5", "--max-prompt-tokens cuts long prompts"),
        ("run in out.jsonl --model m --gpu-memory-utilization 0.5", "it is called --kv-memory here: a fraction"),
        ("run in out.jsonl --model m --batch-size 5", "it is not needed: the batch is as large as memory allows"),
        ("run in out.jsonl --model m --tensor-parallel-size 2", "it is called --tp here, beside --gpus"),
        ("run in out.jsonl --model m --pp-size 2", "--tp N gives each of N GPUs a part of every layer"),
        ("run -i in -o out.jsonl --model m", "the files come without an option: `hf-batchllm run IN OUT --model M`"),
        ("run in --output-file out.jsonl --model m", "the files come without an option"),
        ("run-batch -i in -o out.jsonl --model m", "did you mean run, as in `hf-batchllm run IN OUT --model M`?"),
        ("plan in --max-new-tokens 5", "there is no option --max-new-tokens"),
        ("plan in --html /nowhere/a.html", "--html /nowhere/a.html: No such file"),
    ],
)
def test_a_command_that_cannot_be_used_says_why(
    arguments: str, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert said in refused(capsys, *arguments.split())
    assert not list(tmp_path.iterdir())


def test_every_field_of_the_config_is_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    words = field_docs()
    assert list(words) == list(BatchConfig.__dataclass_fields__)
    assert shortened(words["page_size"]).startswith("tokens in a page of the KV cache. ")
    assert "object" not in words["scheduler"] and "never preempts" in shortened(words["scheduler"])
    main(["run", "--help"])
    said = capsys.readouterr().out
    assert all(f"--{name.replace('_', '-')}" in said for name in words)


def test_other_commands_are_handed_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("hf_batchllm.bench.__main__.main", lambda asked, name: 7 if asked == ["--x"] and name else 1)
        assert main(["bench", "--x"]) == 7
        patched.setattr("importlib.util.find_spec", lambda name: None)
        assert "pip install 'hf-batchllm[lm-eval]'" in refused(capsys, "lm-eval", "--tasks", "x")


def test_the_package_is_the_command_too() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hf_batchllm", "--version"], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert done.stdout == f"hf-batchllm {hf_batchllm.__version__}\n", done.stderr
