"""``hf-batchllm run`` of a file with images: which model and processor are loaded, and what is refused before."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support_command import refused, results
from support_command import saved as saved  # a fixture
from support_command import written as written  # a fixture
from support_image_prompts import generated, model_of, picture, processor_of, shows, user, words

from hf_batchllm.cli import main


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


def run(model: str, *more: str) -> list[str]:
    options = ["--max-new-tokens", "4", "--set", "ignore_eos=true", "--token-ids"]
    return ["run", "in.jsonl", "out.jsonl", "--model", model, *options, *more]


def test_a_file_with_images(
    llava: str, pages: str, written: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    chat = user(shows("a.png"), words(3, 4))
    written({"messages": chat}, {"messages": user(words(5))}, {"prompt": "w6"}, {"messages": user(shows("b.png"))})
    assert main(run(llava, "--image-folder", pages)) == 3
    first, second, third, fourth = results()
    assert first["token_ids"] == generated("llava", [user(shows(picture(1)), words(3, 4))], 4)[0]
    assert second["token_ids"] and third["token_ids"]
    assert fourth["error"].startswith("line 4: ") and "that is not there" in fourth["error"]
    assert json.loads(Path("out.jsonl.run.json").read_text())["settings"]["image_folder"] == os.path.realpath(pages)
    capsys.readouterr()
    said = refused(capsys, *run(llava))
    assert "image_folder was" in said and "is not set" in said
    assert main(run(llava, "--image-folder", pages)) == 3
    assert "Nothing to do" in capsys.readouterr().err


def test_without_the_option_that_lines_need(
    llava: str, pages: str, written: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    written({"messages": user(shows("pages/a.png"))})
    assert "pass --image-folder" in refused(capsys, *run(llava))
    written({"messages": user(shows("https://here/a.png"))})
    assert "pass --image-urls" in refused(capsys, *run(llava, "--image-folder", pages))
    assert not Path("out.jsonl").exists()


def test_what_is_refused_at_once(
    llava: str, saved: str, pages: str, written: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    written({"messages": user(shows("a.png"))})
    assert "--image-folder is 'none', and there is no such folder" in refused(
        capsys, *run(llava, "--image-folder", "none")
    )
    said = refused(capsys, *run(llava, "--image-folder", pages, "--gpus", "2"))
    assert "--image-folder does not go with --gpus" in said
    said = refused(capsys, *run(saved, "--image-folder", pages))
    assert "images are not supported for this model" in said and "line 1" in said
    assert main(["plan", "in.jsonl", "--tokenizer", llava]) == 3
    assert "only text is supported" in capsys.readouterr().err


def test_a_processor_that_cannot_be_loaded(
    llava: str,
    pages: str,
    written: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Text is run all the same, and it is said that images are not."""

    def fail(*given: Any, **named: Any) -> None:
        raise ImportError("\nThisProcessor requires the Torchvision library\nbut it was not found")

    monkeypatch.setattr("transformers.AutoProcessor.from_pretrained", fail)
    written({"messages": user(shows("a.png"))})
    said = refused(capsys, *run(llava, "--image-folder", pages))
    assert "no processor for images could be loaded" in said and "Torchvision" in said
    written({"prompt": "w3"}, {"messages": user(shows("a.png"))})
    assert main(run(llava, "--image-folder", pages)) == 3
    assert "A line that shows an image is an error" in capsys.readouterr().err
    first, second = results()
    assert first["token_ids"] and "image" in second["error"]
