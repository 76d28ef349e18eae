"""The command ``hf-batchllm``: what it takes, what it says, and its exit codes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support_accelerated import word_tokenizer
from support_families import build
from support_file_stand_ins import Runs
from support_word_tokenizer import save_without_template
from transformers import T5Config

import hf_batchllm
from hf_batchllm import BatchConfig, BatchGenerator
from hf_batchllm.cli import main
from hf_batchllm.cli.config_flags import field_docs, shortened
from hf_batchllm.errors import OutputWriteError
from hf_batchllm.files.records.result_layout import RESULT_LAYOUT
from hf_batchllm.files.store.open_output import open_output

ROOT = Path(hf_batchllm.__file__).parents[1]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    build("llama").save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    made = Runs()
    monkeypatch.setattr("hf_batchllm.files.record_loop.run_records", made.run_file)
    monkeypatch.setattr("hf_batchllm.files.run_options.open_output", made.open_output)
    return made


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    monkeypatch.chdir(tmp_path)

    def write(*records: Any, name: str = "in.jsonl") -> str:
        lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
        return name

    return write


def results(name: str = "out.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(name).read_text().splitlines()]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What is said of a command that cannot be used."""
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert not out
    err = re.sub(r"\Ahf-batchllm: loading .*\n", "", err)
    assert err.startswith("hf-batchllm: error: ")
    assert "Traceback" not in err
    return err.removeprefix("hf-batchllm: error: ").strip()


# -- the command itself ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("command", [[], ["run"], ["plan"]])
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
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "/nowhere/in.jsonl cannot be read: there is no such file" in done.stderr


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


def test_wrong_places_and_a_second_run_are_refused_without_torch(written: Callable[..., str], tmp_path: Path) -> None:
    written({"prompt": "w5"})
    run = "run in.jsonl out.jsonl --model".split()
    refusals = {
        "out.jsonl cannot be written: there is no folder": ["run", "in.jsonl", "nowhere/out.jsonl", "--model", "m"],
        "--model ./nowhere: there is no such folder": [*run, "./nowhere"],
        "--model .: there is no config.json in this folder": [*run, "."],
        "--tokenizer ./nowhere: there is no such folder": [*run, "model", "--tokenizer", "./nowhere"],
        "another run is writing to": ["run", "in.jsonl", "held.jsonl", "--model", "model"],
    }
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    code = (
        "import sys; from hf_batchllm.cli import main\n"
        f"assert [main(given) for given in {list(refusals.values())}] == [2] * {len(refusals)}\n"
        f"assert main(['plan', 'in.jsonl', '--tokenizer', './nowhere']) == 2\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    with open_output("held.jsonl", layout=RESULT_LAYOUT):
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    for why, said in zip([*refusals, "--tokenizer ./nowhere: there is no"], done.stderr.splitlines(), strict=True):
        assert why in said
    assert sorted(os.listdir(tmp_path)) == ["in.jsonl", "model"]


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


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("", "no command was given. Commands are run, plan, bench, lm-eval"),
        ("rum", "there is no command 'rum'; did you mean run?"),
        ("--model m", "the command comes first"),
        ("run in", "the following arguments are required: OUT, --model/-m"),
        ("run in out out2 --model m", "one argument too many: 'out2'"),
        (
            "run in out.jsonl --model m --max-new-token 5",
            "there is no option --max-new-token; did you mean --max-new-tokens?",
        ),
        ("run in out.jsonl --model m --max_new_tokens 5", "did you mean --max-new-tokens?"),
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
        ("run in out.jsonl --model m --ignore-eos", "--ignore-eos; it is a setting: pass --set ignore_eos=VALUE"),
        ("run in out.jsonl --model m --stop-token-ids 5", "it is a setting: pass --set stop_token_ids=VALUE"),
        ("run in out.jsonl --model m --max-model-len 5", "--max-prompt-tokens cuts long prompts"),
        ("run in out.jsonl --model m --gpu-memory-utilization 0.5", "it is called --kv-memory here: a fraction"),
        ("run in out.jsonl --model m --batch-size 5", "it is not needed: the batch is as large as memory allows"),
        ("run in out.jsonl --model m --tensor-parallel-size 2", "a model is on one device"),
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


# -- records, before a model is loaded ---------------------------------------------------------------------------------


def test_what_makes_all_lines_bad_is_said_once(
    runs: Runs, written: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    written({"question": "a"}, {"question": "b"})
    said = refused(capsys, "run", "in.jsonl", "out.jsonl", "--model", "m")
    assert said == (
        "line 1: has no `prompt` and no `messages` (it has question): pass --prompt-field question, or a --template "
        "(and so with all of them)"
    )
    said = refused(capsys, "run", "in.jsonl", "out.jsonl", "--model", "m", "--template", "{q}")
    assert "line 1: has no field 'q', which the template names (it has question)" in said
    keep = ("--prompt-field", "question", "--keep", "label")
    said = refused(capsys, "run", "in.jsonl", "out.jsonl", "--model", "m", *keep)
    assert said == "--keep label: the records have no such field; they have question"
    written({"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {}})
    said = refused(capsys, "run", "in.jsonl", "out.jsonl", "--model", "m", "--chat")
    assert "--chat does not go with a file of OpenAI's requests" in said
    assert not runs.calls
    assert not Path("out.jsonl").exists()


# -- models ------------------------------------------------------------------------------------------------------------


def raising(error: BaseException) -> Callable[..., None]:
    def fail(*given: Any, **named: Any) -> None:
        raise error

    return fail


def test_a_model_that_cannot_be_loaded_is_said_in_a_line(
    runs: Runs,
    written: Callable[..., str],
    saved: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written({"prompt": [5, 6]})
    run = ("run", "in.jsonl", "out.jsonl", "--model")
    assert "--model ./nowhere: there is no such folder" in refused(capsys, *run, "./nowhere")
    assert "there is no config.json in this folder" in refused(capsys, *run, str(tmp_path))
    assert "it is a file: give the folder" in refused(capsys, *run, "in.jsonl")
    assert "--model no-such-model" in refused(capsys, *run, "no-such-model")
    assert "--device warp: it is cpu" in refused(capsys, *run, saved, "--device", "warp")
    if not torch.backends.mps.is_available():
        assert "--device mps: this torch finds no GPU of a Mac" in refused(capsys, *run, saved, "--device", "mps")
    assert "CUDA device" in refused(capsys, *run, saved, "--device", "cuda:99")
    assert "-n is 2, and greedy decoding gives one" in refused(capsys, *run, saved, "-n", "2")
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_text((Path(saved) / "config.json").read_text())
    (pickled / "pytorch_model.bin").write_bytes(b"x")
    said = refused(capsys, *run, str(pickled))
    assert "its weights are a .bin file alone" in said
    assert "use_safetensors=False" in said
    with monkeypatch.context() as patched:  # of the hub, it is transformers that finds out
        patched.setattr("hf_batchllm.cli.loading.check_folder", lambda name: None)
        (pickled / "pytorch_model.bin").unlink()
        tokenizer = ("--tokenizer", saved)
        assert "--model" in refused(capsys, *run, str(pickled), *tokenizer)
        why = "x does not appear to have a file named y and thus cannot be loaded with `safetensors`. Please do not ..."
        patched.setattr("transformers.AutoModelForCausalLM.from_pretrained", raising(OSError(why)))
        assert "it has no safetensors. Only safetensors are loaded" in refused(capsys, *run, "x", *tokenizer)
        patched.setattr("transformers.AutoModelForCausalLM.from_pretrained", raising(MemoryError()))
        assert refused(capsys, *run, "x", *tokenizer) == "--model x: MemoryError"
    assert "DISABLE_SAFETENSORS_CONVERSION" not in os.environ
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    own = {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Model"}}
    (theirs / "config.json").write_text(json.dumps(own))
    (theirs / "own.py").write_text("raise SystemExit('it ran')")
    assert "--trust-remote-code runs that code" in refused(capsys, *run, str(theirs))
    (theirs / "config.json").write_text(json.dumps({"model_type": "t5"}))
    assert "--model" in refused(capsys, *run, str(theirs))
    assert len(runs.calls) >= 5


def test_a_tokenizer_that_is_missing_or_has_no_template(
    runs: Runs, written: Callable[..., str], saved: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    build("llama").save_pretrained(bare)
    capsys.readouterr()
    run = ("run", "in.jsonl", "out.jsonl", "--model", str(bare))
    written({"prompt": "w5"})
    said = refused(capsys, *run)
    assert "no tokenizer could be loaded" in said
    assert "(prompts that are text need one)" in said
    written({"prompt": [5, 6]})
    assert "--tokenizer ./nowhere" in refused(capsys, *run, "--tokenizer", "./nowhere")
    assert main([*run, "--max-new-tokens", "2", "--quiet"]) == 0
    assert results()[0]["text"] is None
    save_without_template(word_tokenizer(), tmp_path / "plain")
    written({"prompt": "w5"})
    Path("out.jsonl").unlink()
    said = refused(capsys, *run, "--tokenizer", str(tmp_path / "plain"), "--chat")
    assert "has no chat template, and the file has chats, from line 1 on" in said


# -- runs --------------------------------------------------------------------------------------------------------------


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


# -- plan and the commands that are handed on --------------------------------------------------------------------------


def test_plan(written: Callable[..., str], saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    shared = " ".join(f"w{index}" for index in range(60))
    written(*({"prompt": f"{shared} w{index}"} for index in range(70, 74)), "no json")
    assert main(["plan", "in.jsonl", "--tokenizer", saved, "--html", "plan.html"]) == 3
    out, err = capsys.readouterr()
    assert "tokens to compute" in out
    assert "line 5, column 1: is not JSON" in err
    assert "60 tokens" in Path("plan.html").read_text()
    assert main(["plan", "in.jsonl", "--tokenizer", saved, "--json", "--limit", "4"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures == {
        "prompts": 4,
        "tokens": 244,
        "computed_tokens": 64,
        "saved_tokens": 180,
        "saving": 180 / 244,
        "windows": 1,
        "errors": 0,
    }
    assert main(["plan", "in.jsonl", "--tokenizer", saved, "--window", "1KiB", "--limit", "4"]) == 0
    assert "4 prompts in 4 windows" in capsys.readouterr().out
    assert "pass --tokenizer" in refused(capsys, "plan", "in.jsonl")


def test_a_plan_of_token_ids_needs_no_tokenizer(written: Callable[..., str]) -> None:
    written({"prompt": [*range(60), 70]}, {"prompt": [*range(60), 71]})
    command = [sys.executable, "-X", "importtime", "-m", "hf_batchllm.cli", "plan", "in.jsonl", "--json"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["saved_tokens"] == 60
    assert " torch\n" not in done.stderr


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


def test_an_encoder_decoder_is_refused_in_a_line(
    written: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    T5Config(vocab_size=64, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2).save_pretrained(tmp_path / "t5")
    word_tokenizer().save_pretrained(tmp_path / "t5")
    said = refused(capsys, "run", written({"prompt": "w5"}), "out.jsonl", "--model", str(tmp_path / "t5"))
    assert "it is a T5 model" in said and "encoder-decoders" in said and "\n" not in said


def test_a_text_file(written: Callable[..., str], saved: str, capsys: pytest.CaptureFixture[str]) -> None:
    name = written("w5 w6", "", "w7", name="in.txt")
    assert main(["run", name, "out.jsonl", "--model", saved, "--max-new-tokens", "2"]) == 0
    assert [each["prompt_tokens"] for each in results()] == [2, 1]
    assert main(["plan", name, "--tokenizer", saved]) == 0
    assert "prompts                            2" in capsys.readouterr().out
