"""What ``hf-batchllm run`` refuses: files, records, models and tokenizers, each said in a line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support_accelerated import word_tokenizer
from support_command import ROOT, raising, refused, results
from support_command import runs as runs  # a fixture
from support_command import saved as saved  # a fixture
from support_command import written as written  # a fixture
from support_families import build
from support_file_stand_ins import Runs
from support_word_tokenizer import save_without_template
from transformers import T5Config

from hf_batchllm.cli import main
from hf_batchllm.files.records.result_layout import RESULT_LAYOUT
from hf_batchllm.files.store.open_output import open_output


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
    assert "--device xpu:99: this torch finds no such GPU of Intel's" in refused(
        capsys, *run, saved, "--device", "xpu:99"
    )
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


def test_an_encoder_decoder_is_refused_in_a_line(
    written: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    T5Config(vocab_size=64, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2).save_pretrained(tmp_path / "t5")
    word_tokenizer().save_pretrained(tmp_path / "t5")
    said = refused(capsys, "run", written({"prompt": "w5"}), "out.jsonl", "--model", str(tmp_path / "t5"))
    assert "it is a T5 model" in said and "encoder-decoders" in said and "\n" not in said
