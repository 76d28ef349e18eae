"""Models, tokenizers, adapters and processors of ``hf-batchllm run``, and what is said of one that cannot be used."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support_command import raising, refused, results
from support_command import saved as saved  # a fixture
from support_command import written as written  # a fixture
from support_families import build
from support_image_prompts import generated, model_of, picture, processor_of, shows, user, words
from support_word_tokenizer import save_without_template, word_tokenizer
from transformers import T5Config

from hf_batchllm.cli import main

peft = pytest.importorskip("peft")
Written, Capture = Callable[..., str], pytest.CaptureFixture[str]
RUN = ["run", "in.jsonl", "out.jsonl", "--max-new-tokens", "4"]
PROMPTS = ["w5 w6 w7", "w9 w8"]
CHAT = {"messages": [{"role": "user", "content": "w5"}]}


# -- models and tokenizers ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, saved: str) -> Path:
    """A folder of models that cannot be used, each for another reason."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("empty", "pickled", "theirs", "t5"):
        (folder / name).mkdir()
    shutil.copy(f"{saved}/config.json", folder / "pickled")
    (folder / "pickled" / "pytorch_model.bin").write_bytes(b"x")
    own = {"model_type": "own", "auto_map": {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Model"}}
    (folder / "theirs" / "config.json").write_text(json.dumps(own))
    (folder / "theirs" / "own.py").write_text("raise SystemExit('it ran')")
    T5Config(vocab_size=64, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2).save_pretrained(folder / "t5")
    return folder


@pytest.mark.parametrize(
    ("model", "more", "said"),
    [
        ("no/such-model", [], "--model no/such-model: We couldn't connect to 'https://huggingface.co'"),
        ("nosuch", ["--tokenizer", "saved"], "--model nosuch: We couldn't connect"),
        ("empty", [], "Should have a `model_type` key in its config.json"),
        ("pickled", [], "no file named model.safetensors found"),
        (
            "pickled",
            [],
            "Only safetensors are loaded, as other files may run code. If you trust a model, convert it once",
        ),
        ("theirs", [], "contains custom code"),
        ("theirs", [], "If you trust its authors, --trust-remote-code runs that code"),
        ("t5", [], "T5Config'> for this kind of AutoModel: AutoModelForCausalLM"),
        ("saved", ["--tokenizer", "no/such"], "--tokenizer no/such: no tokenizer could be loaded: We couldn't connect"),
        ("saved", ["--device", "warp"], "--device warp: RuntimeError: Expected one of cpu, cuda"),
        ("saved", ["--device", "cuda:99"], "--device cuda:99: "),
        ("saved", ["--gpus", "99"], "torch finds"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_said_in_a_line(
    model: str, more: list[str], said: str, written: Written, models: Path, saved: str, capsys: Capture
) -> None:
    written({"prompt": [5, 6]})
    places = {name: str(models / name) for name in os.listdir(models)} | {"saved": saved}
    given = [places.get(text, text) for text in (model, *more)]
    found = refused(capsys, *RUN, "--model", *given)
    assert said in found and "\n" not in found and len(found) < 700
    assert not Path("out.jsonl").exists()


def test_an_error_without_words_has_a_name(
    written: Written, saved: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    written({"prompt": "w5"})
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", raising(MemoryError()))
    assert refused(capsys, *RUN, "--model", saved) == f"--model {saved}: MemoryError"


def test_tokenizers(written: Written, saved: str, capsys: Capture, tmp_path: Path) -> None:
    build("llama").save_pretrained("bare")
    written({"prompt": "w5"})
    said = refused(capsys, *RUN, "--model", "bare")
    assert "--model bare: no tokenizer could be loaded" in said and "(prompts that are text need one)" in said
    assert main([*RUN, "--model", "bare", "--tokenizer", saved]) == 0
    written({"prompt": [5, 6]})
    assert "(stop strings need one)" in refused(capsys, *RUN, "--model", "bare", "--stop", "w7", "--restart")
    assert main([*RUN, "--model", "bare", "--restart"]) == 0
    assert results()[0]["text"] is None
    save_without_template(word_tokenizer(), tmp_path / "bare")
    written({"prompt": "w5"}, CHAT)
    assert main([*RUN, "--model", "bare", "--restart"]) == 3  # one chat is the error of its line
    good, bad = results()
    assert good["new_tokens"] == 4 and bad["error"].startswith("line 2: the prompt is a chat, and")
    written(CHAT)
    capsys.readouterr()
    said = refused(capsys, *RUN, "--model", "bare", "--restart")
    assert "has no chat template, and the file has chats, from line 1 on" in said


# -- adapters ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, two adapters for it, and three that cannot be used."""
    folder = tmp_path_factory.mktemp("adapters")
    model = build("llama")
    model.save_pretrained(folder / "base")
    word_tokenizer().save_pretrained(folder / "base")
    for seed, name in enumerate(("poems", "sums")):
        torch.manual_seed(seed)
        copy = type(model).from_pretrained(folder / "base")
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        peft.get_peft_model(copy, config).save_pretrained(folder / name)
    shutil.copytree(folder / "sums", folder / "unsafe")
    (folder / "unsafe" / "adapter_model.safetensors").rename(folder / "unsafe" / "adapter_model.bin")
    for name, change in {
        "other": {"target_modules": ["no_such_layer"]},
        "lost": {"base_model_name_or_path": "/nowhere/base"},
        "baseless": {"base_model_name_or_path": None},
        "beside": {"base_model_name_or_path": "../base"},  # from its own folder
    }.items():
        shutil.copytree(folder / "sums", folder / name)
        file = folder / name / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
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


def test_a_line_chooses_its_adapter(adapters: Path, written: Written) -> None:
    chosen: list[str | None] = [None, "poems", "sums"]
    lines = [{"prompt": prompt, **({} if name is None else {"adapter": name})} for name in chosen for prompt in PROMPTS]
    written(*lines, {"prompt": "w5", "adapter": "prose"})
    given = [f"--adapter={name}={adapters / name}" for name in ("poems", "sums")]
    assert main([*RUN, "-m", str(adapters / "base"), *given]) == 3
    *good, bad = results()
    assert [line["text"] for line in good] == [text for name in chosen for text in expected(adapters, name)]
    assert "`adapter` is 'prose'; the model has 'poems', 'sums'" in bad["error"]


def test_an_adapter_for_all_lines(adapters: Path, written: Written, capsys: Capture) -> None:
    written(*({"prompt": prompt} for prompt in PROMPTS))
    given = [*RUN, "-m", str(adapters / "base"), "--adapter", f"sums={adapters / 'sums'}"]
    assert main([*given, "--set", "adapter=sums"]) == 0
    assert [line["text"] for line in results()] == expected(adapters, "sums")
    assert "choose no `adapter`" not in capsys.readouterr().err
    assert main([*given, "--restart"]) == 0
    assert [line["text"] for line in results()] == expected(adapters, None)
    assert "--set adapter=sums chooses one" in capsys.readouterr().err
    assert "adapters" in refused(capsys, *given[:-1], f"sums={adapters / 'poems'}")  # it is another run


@pytest.mark.parametrize(("name", "same"), [("poems", "poems"), ("beside", "sums")])
def test_a_peft_folder_brings_its_base_and_tokenizer(name: str, same: str, adapters: Path, written: Written) -> None:
    written(*({"prompt": prompt} for prompt in PROMPTS))
    assert main([*RUN, "--model", str(adapters / name)]) == 0
    assert [line["text"] for line in results()] == expected(adapters, same)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--model base --adapter sums", "--adapter takes NAME=PATH"),
        ("--model base --adapter a=base", "--adapter a=base: there is no adapter_config.json in this folder"),
        ("--model base --adapter a=./nowhere", "--adapter a=./nowhere: there is no such folder"),
        ("--model base --adapter a=sums --adapter a=poems", "there are two adapters of the name a"),
        ("--model sums --adapter default=poems", "there are two adapters of the name default"),
        ("--model base --adapter a=unsafe", "there is no adapter_model.safetensors in this folder"),
        ("--model unsafe", "--model unsafe: there is no adapter_model.safetensors in this folder"),
        ("--model base --adapter a.b=sums", "a.b"),
        ("--model base --adapter a=other", "--adapter a=other: Target modules"),
        (
            "--model lost",
            "names /nowhere/base as its base model, and there is no such folder. Pass the base as --model",
        ),
        ("--model baseless", "names no base model. Pass the base as --model"),
    ],
)
def test_an_adapter_that_cannot_be_used(
    given: str, said: str, adapters: Path, written: Written, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = os.path.abspath(written({"prompt": "w5"}))
    target = os.path.abspath("out.jsonl")
    monkeypatch.chdir(adapters)
    assert said in refused(capsys, "run", source, target, *given.split())


# -- images ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("llava")
    model_of("llava").save_pretrained(folder)
    processor_of("llava").save_pretrained(folder)
    return str(folder)


@pytest.fixture
def pages(tmp_path: Path) -> str:
    (tmp_path / "pages").mkdir()
    picture(1).save(tmp_path / "pages" / "a.png")
    return "pages"


def images(model: str, *more: str) -> list[str]:
    return [*RUN, "--model", model, "--ignore-eos", "--token-ids", *more]


def test_a_file_with_images(llava: str, pages: str, written: Written, capsys: Capture) -> None:
    chat = user(shows("a.png"), words(3, 4))
    written({"messages": chat}, {"messages": user(words(5))}, {"prompt": "w6"}, {"messages": user(shows("b.png"))})
    assert main(images(llava, "--image-folder", pages)) == 3
    first, second, third, fourth = results()
    assert first["token_ids"] == generated("llava", [user(shows(picture(1)), words(3, 4))], 4)[0]
    assert second["token_ids"] and third["token_ids"]
    assert fourth["error"].startswith("line 4: ") and "that is not there" in fourth["error"]
    assert json.loads(Path("out.jsonl.run.json").read_text())["settings"]["image_folder"] == os.path.realpath(pages)
    assert "image_folder was" in refused(capsys, *images(llava))


def test_images_that_cannot_be_shown(llava: str, saved: str, pages: str, written: Written, capsys: Capture) -> None:
    written({"messages": user(shows("a.png"))})
    assert "pass --image-folder" in refused(capsys, *images(llava))
    said = refused(capsys, *images(saved, "--image-folder", pages))
    assert "images are not supported for this model" in said and "line 1" in said
    assert main(["plan", "in.jsonl", "--tokenizer", llava]) == 3
    assert "only text is supported" in capsys.readouterr().err
    assert not Path("out.jsonl").exists()


def test_a_processor_that_cannot_be_loaded(
    llava: str, pages: str, written: Written, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text is run all the same, and it is said that images are not."""
    why = ImportError("\nThisProcessor requires the Torchvision library\nbut it was not found")
    monkeypatch.setattr("transformers.AutoProcessor.from_pretrained", raising(why))
    written({"messages": user(shows("a.png"))})
    said = refused(capsys, *images(llava, "--image-folder", pages))
    assert "no processor for images could be loaded" in said and "Torchvision" in said
    written({"prompt": "w3"}, {"messages": user(shows("a.png"))})
    assert main(images(llava, "--image-folder", pages)) == 3
    assert "A line that shows an image is an error" in capsys.readouterr().err
    first, second = results()
    assert first["token_ids"] and "image" in second["error"]
