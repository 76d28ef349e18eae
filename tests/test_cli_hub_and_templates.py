"""The command and models by name: what is said where the hub cannot be asked, and of tokenizers without a template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support_families import build
from support_word_tokenizer import save_without_template, word_tokenizer

from hf_batchllm.cli import main

RUN = ("run", "in.jsonl", "out.jsonl", "--max-new-tokens", "2", "--quiet", "--model")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    (tmp_path / "in.jsonl").write_text('{"prompt": "w5"}\n')
    return tmp_path


@pytest.mark.parametrize("name", ["nosuch", "some/model"])
def test_a_hub_that_cannot_be_reached(name: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    tries = []

    def unreachable(*given: Any, **named: Any) -> None:
        tries.append(given)
        raise ConnectionError("no route")

    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", unreachable)
    assert main([*RUN, name]) == 2
    said = capsys.readouterr().err
    first = f"--model {name}: " + (
        "there is no folder nosuch, and" if name == "nosuch" else "the hub cannot be reached"
    )
    assert first in said
    assert f"the hub cannot be reached (no route), and {name} is not in the cache: give a folder" in said
    assert "tokenizer" not in said and len(tries) == 1


def test_a_hub_that_is_switched_off(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert main([*RUN, "some/model"]) == 2
    assert "the hub is switched off (HF_HUB_OFFLINE), and some/model is not in the cache" in capsys.readouterr().err


def test_one_chat_without_a_template_is_the_error_of_its_line(folder: Path, capsys: Any) -> None:
    build("llama").save_pretrained(folder / "model")
    save_without_template(word_tokenizer(), folder / "model")
    chat = {"messages": [{"role": "user", "content": "w5"}]}
    (folder / "in.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in ({"prompt": "w5"}, chat)))
    assert main([*RUN, "model"]) == 3
    good, bad = (json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines())
    assert good["new_tokens"] == 2
    assert bad["error"].startswith("line 2: the prompt is a chat, and")
    (folder / "in.jsonl").write_text(f"{json.dumps(chat)}\n")
    assert main([*RUN, "model", "--restart"]) == 2
    assert "has no chat template, and the file has chats, from line 1 on" in capsys.readouterr().err
