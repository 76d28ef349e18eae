"""PEFT adapters on the command line: ``--adapter NAME=PATH``, and a folder of PEFT's as ``--model``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support_families import build
from support_word_tokenizer import word_tokenizer

from hf_batchllm.cli import main

peft = pytest.importorskip("peft")
PROMPTS = ["w5 w6 w7", "w9 w8"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and two adapters for it."""
    folder = tmp_path_factory.mktemp("adapters")
    model = build("llama")
    model.save_pretrained(folder / "base")
    word_tokenizer().save_pretrained(folder / "base")
    for seed, name in enumerate(("poems", "sums")):
        torch.manual_seed(seed)
        copy = type(model).from_pretrained(folder / "base")
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        peft.get_peft_model(copy, config).save_pretrained(folder / name)
    return folder


def expected(folder: Path, adapter: str | None) -> list[str]:
    model: Any = type(build("llama")).from_pretrained(folder / "base")
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(model, folder / adapter)
    tokenizer, texts = word_tokenizer(), []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        new = model.eval().generate(input_ids=ids, max_new_tokens=4, do_sample=False)[0, ids.shape[1] :]
        texts.append(tokenizer.decode(new, skip_special_tokens=True))
    return texts


def run(tmp_path: Path, records: list[dict[str, Any]], *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    out = tmp_path / "out.jsonl"
    code = main(["run", str(tmp_path / "in.jsonl"), str(out), "--set", "max_new_tokens=4", *arguments])
    return code, [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def test_a_line_chooses_its_adapter(folder: Path, tmp_path: Path) -> None:
    chosen = [None, "poems", "sums"]
    records = [
        {"prompt": prompt, **({} if name is None else {"adapter": name})} for name in chosen for prompt in PROMPTS
    ]
    adapters = [f"--adapter={name}={folder / name}" for name in ("poems", "sums")]
    code, lines = run(tmp_path, [*records, {"prompt": "w5", "adapter": "prose"}], "-m", str(folder / "base"), *adapters)
    assert code == 3
    assert [line.get("text") for line in lines[:-1]] == [text for name in chosen for text in expected(folder, name)]
    assert "`adapter` is 'prose'; the model has 'poems', 'sums'" in lines[-1]["error"]


def test_an_adapter_for_all_lines(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [{"prompt": prompt} for prompt in PROMPTS]
    given = ("-m", str(folder / "base"), "--adapter", f"sums={folder / 'sums'}")
    assert run(tmp_path, records, *given, "--set", "adapter=sums")[1][0]["text"] == expected(folder, "sums")[0]
    assert "choose no `adapter`" not in capsys.readouterr().err
    (tmp_path / "out.jsonl").unlink()
    (tmp_path / "out.jsonl.run.json").unlink()
    assert [line["text"] for line in run(tmp_path, records, *given)[1]] == expected(folder, None)
    assert "--set adapter=sums chooses one" in capsys.readouterr().err


@pytest.mark.parametrize("moved", [False, True])
def test_a_folder_of_pefts_finds_its_base_and_tokenizer(folder: Path, tmp_path: Path, moved: bool) -> None:
    adapter = folder / "poems"
    if moved:  # with its base, which it names by a path from its own folder
        shutil.copytree(folder, tmp_path / "there")
        adapter = tmp_path / "there" / "poems"
        config = json.loads((adapter / "adapter_config.json").read_text())
        (adapter / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "../base"}))
    code, lines = run(tmp_path, [{"prompt": prompt} for prompt in PROMPTS], "--model", str(adapter))
    assert code == 0
    assert [line["text"] for line in lines] == expected(folder, "poems")


def test_other_adapters_change_the_run(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [{"prompt": "w5", "adapter": "a"}]
    run(tmp_path, records, "-m", str(folder / "base"), "--adapter", f"a={folder / 'sums'}")
    assert run(tmp_path, records, "-m", str(folder / "base"), "--adapter", f"a={folder / 'poems'}")[0] == 2
    assert "adapters" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["sums"], "--adapter takes NAME=PATH"),
        (
            ["a=base"],
            "a=base: there is no adapter_config.json in this folder, so it is no adapter of PEFT, but a model",
        ),
        (["a=./nowhere"], "a=./nowhere: there is no such folder"),
        (["a=sums", "a=poems"], "there are two adapters of the name a"),
        (["a.b=sums"], "no dot in the name"),
        (["a=unsafe"], "its weights are adapter_model.bin. Only safetensors are loaded"),
        (["a=other"], "it does not fit the model"),
    ],
)
def test_an_adapter_that_cannot_be_used(
    given: list[str],
    said: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    for name in ("unsafe", "other"):
        if not Path(name).exists():
            shutil.copytree("sums", name)
            if name == "unsafe":
                Path(name, "adapter_model.safetensors").rename(Path(name, "adapter_model.bin"))
    config = json.loads(Path("other/adapter_config.json").read_text())
    Path("other/adapter_config.json").write_text(json.dumps(config | {"target_modules": ["no_such_layer"]}))
    assert run(tmp_path, [{"prompt": "w5"}], "-m", "base", *(f"--adapter={each}" for each in given))[0] == 2
    err = capsys.readouterr().err
    assert said in err and "Traceback" not in err


def test_a_base_that_is_not_there(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(folder / "sums", tmp_path / "sums")
    config = json.loads((tmp_path / "sums" / "adapter_config.json").read_text())
    for base, said in (("/nowhere/base", "there is no such folder"), (None, "names no base model")):
        changed = json.dumps(config | {"base_model_name_or_path": base})
        (tmp_path / "sums" / "adapter_config.json").write_text(changed)
        assert run(tmp_path, [{"prompt": "w5"}], "--model", str(tmp_path / "sums"))[0] == 2
        err = capsys.readouterr().err
        assert said in err and "Pass the base as --model" in err
