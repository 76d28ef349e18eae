"""Images in the lines of a file: which ones are read, what comes of bad ones, and how many are in memory at a time."""

from __future__ import annotations

import base64
import gc
import io
import json
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support_file_lines import results, write_lines
from support_image_prompts import generated, model_of, picture, processor_of, shows, user, words

from hf_batchllm import BatchGenerator, run_file
from hf_batchllm.errors import FilesError, InputFileError, RunChangedError
from hf_batchllm.files import record_engine
from hf_batchllm.files.record_engine import RecordEngine
from hf_batchllm.files.record_loop import in_calls
from hf_batchllm.files.records import OPENAI, PLAIN, BadPromptRecord, PromptRecord, RecordReader
from hf_batchllm.files.settings import NO_SETTINGS
from hf_batchllm.inputs.images import image_reader
from hf_batchllm.inputs.images.image_parts import UnreadableImage, loaded
from hf_batchllm.inputs.images.image_sources import ImageSources

FAMILY = "llava"
OPTIONS: dict[str, Any] = {"max_new_tokens": 8, "ignore_eos": True, "token_ids": True, "progress": False}


@pytest.fixture(scope="module")
def gen() -> Iterator[BatchGenerator]:
    with BatchGenerator(model_of(FAMILY), processor_of(FAMILY), min_shared_tokens=2) as made:
        yield made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Pictures that may be read, beside one that may not."""
    inside = tmp_path / "pictures"
    (inside / "deep").mkdir(parents=True)
    picture(1).save(inside / "a.png")
    picture(2).save(inside / "deep" / "b c.png")
    picture(3).save(tmp_path / "secret.png")
    return inside


def encoded(image: Image.Image, kind: str = "PNG") -> str:
    file = io.BytesIO()
    image.save(file, kind)
    return base64.b64encode(file.getvalue()).decode()


def chat(**part: Any) -> dict[str, Any]:
    return {"messages": user({"type": "image", **part}, words(3, 4))}


def request(number: int, *parts: Any) -> dict[str, Any]:
    body = {"messages": user(*parts), "max_tokens": 4}
    return {"custom_id": f"r{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}


def image_url(url: str, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def written(path: Path, *records: Any) -> Path:
    return write_lines(path, records)


def tokens(*images: Image.Image, new: int = 8) -> list[list[int]]:
    return generated(FAMILY, [user(shows(image), words(3, 4)) for image in images], new)


# -- images that are read ----------------------------------------------------------------------------------------------


def test_every_form_of_an_image(gen: BatchGenerator, folder: Path, tmp_path: Path) -> None:
    """A path, a file's URL, a picture in the line itself: the tokens are those of ``generate``."""
    data = encoded(picture(5))
    forms: list[tuple[dict[str, Any], int]] = [
        ({"image": "a.png"}, 1),
        ({"path": "deep/b c.png"}, 2),
        ({"url": str(folder / "deep" / ".." / "a.png")}, 1),
        ({"url": (folder / "deep" / "b c.png").as_uri()}, 2),
        ({"image": f"data:image/png;base64,{data}"}, 5),
        ({"image": data}, 5),
        ({"base64": data.rstrip("=")}, 5),
        ({"image": {"bytes": data, "path": "never looked for.png"}}, 5),
        ({"image": {"bytes": None, "path": "a.png"}}, 1),
        ({"image_url": {"url": "a.png", "detail": "auto"}, "type": "image_url"}, 1),
    ]
    source = written(tmp_path / "in.jsonl", *(chat(**form) for form, _ in forms), {"prompt": "w3 w4"})
    report = run_file(gen, source, tmp_path / "out.jsonl", image_folder=folder, **OPTIONS)
    found = results(tmp_path / "out.jsonl")
    assert report.errors == 0, found
    known = dict(zip((1, 2, 5), tokens(picture(1), picture(2), picture(5)), strict=True))
    assert [line["token_ids"] for line in found[:-1]] == [known[seed] for _, seed in forms]
    assert len({tuple(row) for row in known.values()}) == 3, "the images make no difference"
    assert "PIL" not in (tmp_path / "out.jsonl").read_text()


def test_requests_of_openais(gen: BatchGenerator, folder: Path, tmp_path: Path) -> None:
    data = f"data:image/jpeg;base64,{encoded(picture(6), 'JPEG')}"
    source = written(
        tmp_path / "in.jsonl",
        request(0, image_url(data, detail="auto"), words(3, 4)),
        request(1, image_url("a.png"), words(3, 4)),
        request(2, words(3), image_url("../secret.png")),
        request(3, words(3), words(4)),
        request(4, image_url(data, detail="high"), words(3, 4)),
    )
    run_file(gen, source, tmp_path / "out.jsonl", image_folder=folder, ignore_eos=True, progress=False)
    found = [line["response"] for line in results(tmp_path / "out.jsonl")]
    assert [each["status_code"] for each in found] == [200, 200, 400, 200, 400]
    jpeg = Image.open(io.BytesIO(base64.b64decode(data.partition(",")[2]))).convert("RGB")
    texts = [gen._tokenizer.decode(row) for row in tokens(jpeg, picture(1), new=4)]
    assert [each["body"]["choices"][0]["message"]["content"] for each in found[:2]] == texts
    error = found[2]["body"]["error"]
    assert "not in the folder" in error["message"] and error["param"] == "messages"
    assert "`detail` 'high'" in found[4]["body"]["error"]["message"]


def test_a_table_of_images(gen: BatchGenerator, tmp_path: Path) -> None:
    """A dataset's column of images has their bytes."""
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    part = {"type": "image", "image": {"bytes": base64.b64decode(encoded(picture(5))), "path": "x.png"}, "text": None}
    rows = [{"messages": [{"role": "user", "content": [part, {"image": None, **words(3, 4)}]}]}]
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet")
    run_file(gen, tmp_path / "in.parquet", tmp_path / "out.jsonl", **OPTIONS)
    assert [line.get("token_ids") for line in results(tmp_path / "out.jsonl")] == tokens(picture(5))


def test_images_of_urls_are_fetched_if_asked_for(
    gen: BatchGenerator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[str] = []

    def get(url: str, **given: Any) -> Any:
        fetched.append(url)
        if "gone" in url:
            raise OSError("no such host")
        return SimpleNamespace(content=base64.b64decode(encoded(picture(5))))

    monkeypatch.setattr("transformers.image_utils.httpx.get", get)
    source = written(tmp_path / "in.jsonl", chat(url="HTTPS://here/a.png"), chat(url="http://gone/a.png"))
    with pytest.raises(InputFileError, match="--image-urls"):
        run_file(gen, source, tmp_path / "out.jsonl", **OPTIONS)
    assert fetched == []
    run_file(gen, source, tmp_path / "out.jsonl", image_urls=True, **OPTIONS)
    first, second = results(tmp_path / "out.jsonl")
    assert first["token_ids"] == tokens(picture(5))[0]
    assert "no such host" in second["error"]
    assert fetched == ["https://here/a.png", "http://gone/a.png"]


# -- images that are not -----------------------------------------------------------------------------------------------


def problem(record: dict[str, Any], dialect: str = PLAIN, **sources: Any) -> BadPromptRecord | None:
    reader = RecordReader(dialect=dialect, images=ImageSources(**sources))
    found = reader.read(0, json.dumps(record).encode())
    return found if isinstance(found, BadPromptRecord) else None


@pytest.mark.parametrize(
    ("part", "why"),
    [
        ({"image": "../secret.png"}, "not in the folder"),
        ({"image": "deep/../../secret.png"}, "not in the folder"),
        ({"image": "/etc/passwd"}, "not in the folder"),
        ({"url": "file:///etc/passwd"}, "not in the folder"),
        ({"url": "file:../secret.png"}, "not in the folder"),
        ({"url": "file:%2e%2e/secret.png"}, "not in the folder"),
        ({"url": "file://there/a.png"}, "no file on this machine"),
        ({"image": "link.png"}, "not in the folder"),
        ({"image": "linked/secret.png"}, "not in the folder"),
        ({"image": "a\0.png"}, "not in the folder"),
        ({"image": "missing.png"}, "that is not there"),
        ({"image": "deep"}, "that is not there"),
        ({"image": "pipe"}, "that is not there"),
        ({"image": "text.png"}, "that is no picture"),
        ({"image": "drawing.eps"}, "another program"),
        ({"image": "http://here/a.png"}, "--image-urls"),
        ({"image": "s3://bucket/a.png"}, "a URL is http"),
        ({"image": "data:image/png,abc"}, "not base64"),
        ({"image": "data:image/png;base64,!"}, "not base64"),
        ({"image": "data:image/png;base64,aGFsbG8="}, "no picture"),
        ({"base64": "a.png"}, "not base64"),
        ({"image": None}, "without an image"),
        ({}, "without an image"),
        ({"image": ""}, "without an image"),
        ({"image": ["a.png"]}, "a list"),
        ({"image": {"width": 3}}, "'width'"),
        ({"image": "a.png", "url": "b.png"}, "two"),
        ({"image": "a.png", "max_pixels": 100}, "'max_pixels'"),
        ({"image": "a.png", "detail": "low"}, "`detail`"),
    ],
)
def test_what_a_line_may_not_show(part: dict[str, Any], why: str, folder: Path) -> None:
    (folder / "link.png").symlink_to(folder.parent / "secret.png")
    (folder / "linked").symlink_to(folder.parent)
    (folder / "text.png").write_text("no picture")
    picture(1).save(folder / "drawing.eps")
    os.mkfifo(folder / "pipe")
    found = problem(chat(**part), folder=folder)
    assert found is not None
    assert why in found.why and "message 0" in found.why
    found = problem(request(0, {"type": "image", **part}), OPENAI, folder=folder)
    assert found is not None and why in found.why


def test_links_that_stay_inside_are_followed(folder: Path) -> None:
    (folder / "link.png").symlink_to(folder / "a.png")
    (folder.parent / "other").symlink_to(folder)
    assert problem(chat(image="link.png"), folder=folder) is None
    assert problem(chat(image=str(folder.parent / "other" / "a.png")), folder=folder.parent / "other") is None


def test_a_name_without_a_dot_is_no_base64(folder: Path) -> None:
    for name in ("abcdefgh", "0123456789abcdef" * 4):
        picture(1).save(folder / name, "PNG")
        assert problem(chat(image=name), folder=folder) is None


def test_bytes_are_not_taken_for_a_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers looks for a file of the name first where it is given base64."""
    picture(1).save(folder / "abcd", "PNG")
    monkeypatch.chdir(folder)
    with pytest.raises(UnreadableImage):
        loaded(base64.b64decode("abcd"))


def test_a_chats_options_bring_no_images(folder: Path) -> None:
    """A processor would read them, in whatever folder they are."""
    for given in ({"images": ["a.png"]}, {"processor_kwargs": {"videos": ["a.mp4"]}}):
        found = problem({"messages": user(words(3)), "chat_template_kwargs": given})
        assert found is not None and "an image is a part of a message" in found.why
        record = request(0, words(3))
        record["body"]["chat_template_kwargs"] = given
        found = problem(record, OPENAI)
        assert found is not None and "an image is a part of a message" in found.why


def test_without_a_folder_no_file_is_read(gen: BatchGenerator, folder: Path, tmp_path: Path) -> None:
    """If all lines name files, an option is missing; a single one is an error of its line."""
    source = written(tmp_path / "in.jsonl", chat(image="a.png"), chat(image=str(folder / "a.png")))
    with pytest.raises(InputFileError, match="--image-folder"):
        run_file(gen, source, tmp_path / "out.jsonl", **OPTIONS)
    assert not (tmp_path / "out.jsonl").exists()
    written(source, chat(image="a.png"), {"prompt": "w3"}, chat(image=encoded(picture(1))))
    assert run_file(gen, source, tmp_path / "out.jsonl", **OPTIONS).errors == 1
    first, _, third = results(tmp_path / "out.jsonl")
    assert first["error"].startswith("line 1: ") and "--image-folder" in first["error"]
    assert third["token_ids"] == tokens(picture(1))[0]


def test_bad_pictures_are_errors_of_their_lines(
    gen: BatchGenerator, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = (folder / "a.png").read_bytes()
    (folder / "cut.png").write_bytes(whole[: len(whole) // 2])
    (folder / "empty.png").write_bytes(b"")
    (folder / "flat.png").write_bytes(whole[:16] + bytes(4) + whole[20:])  # no pixel is wide
    picture(1, 400, 400).save(folder / "large.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 64 * 64)
    names = ("cut.png", "empty.png", "flat.png", "large.png", "a.png")
    source = written(tmp_path / "in.jsonl", *(chat(image=name) for name in names))
    assert run_file(gen, source, tmp_path / "out.jsonl", image_folder=folder, **OPTIONS).errors == 4
    *bad, good = results(tmp_path / "out.jsonl")
    assert [line["error"].partition(":")[0] for line in bad] == [f"line {place}" for place in range(1, 5)]
    assert all("holds an image" in line["error"] for line in bad)
    assert "DecompressionBomb" in bad[3]["error"]
    assert good["token_ids"] == tokens(picture(1))[0]
    with pytest.raises(InputFileError, match="line 2"):
        run_file(gen, source, tmp_path / "raises.jsonl", image_folder=folder, on_error="raise", **OPTIONS)
    written(source, chat(image="a.png"), chat(image="cut.png"))  # which is seen only when it is read
    with pytest.raises(InputFileError, match="line 2"):
        run_file(gen, source, tmp_path / "raises.jsonl", image_folder=folder, on_error="raise", **OPTIONS)


def test_options_that_are_wrong(gen: BatchGenerator, folder: Path, tmp_path: Path) -> None:
    source = written(tmp_path / "in.jsonl", chat(image="a.png"))
    for given, why in (
        ({"image_folder": folder / "none"}, "there is no such folder"),
        ({"image_folder": folder / "a.png"}, "it is a file"),
        ({"image_folder": 3}, "not an int"),
        ({"image_urls": "yes"}, "True or False"),
    ):
        with pytest.raises(FilesError, match=why):
            run_file(gen, source, tmp_path / "out.jsonl", **given, **OPTIONS)


def test_readers_without_images_take_text_alone() -> None:
    for record, dialect in ((chat(image="a.png"), PLAIN), (request(0, image_url("a.png")), OPENAI)):
        found = RecordReader(dialect=dialect).read(0, json.dumps(record).encode())
        assert isinstance(found, BadPromptRecord) and "only text is supported" in found.why


# -- runs that continue ------------------------------------------------------------------------------------------------


def test_a_run_that_continues_has_the_same_options(gen: BatchGenerator, folder: Path, tmp_path: Path) -> None:
    source = written(tmp_path / "in.jsonl", *(chat(image=name) for name in ("a.png", "deep/b c.png", "late.png")))
    target = tmp_path / "out.jsonl"
    run_file(gen, source, target, image_folder=folder, limit=1, **OPTIONS)
    for given, why in (
        ({"image_folder": folder.parent}, "image_folder was"),
        ({"image_folder": folder, "image_urls": True}, "image_urls was not set and is true"),
    ):
        with pytest.raises(RunChangedError, match=why):
            run_file(gen, source, target, **given, **OPTIONS)
    (folder.parent / "again").symlink_to(folder)  # the same folder
    assert run_file(gen, source, target, image_folder=folder.parent / "again", **OPTIONS).errors == 1
    picture(7).save(folder / "late.png")
    assert run_file(gen, source, target, image_folder=folder, retry_errors=True, **OPTIONS).errors == 0
    found = [line["token_ids"] for line in results(target)]
    assert found == tokens(picture(1), picture(2), picture(7))


# -- how many are in memory --------------------------------------------------------------------------------------------


def test_pixels_do_not_pile_up(
    gen: BatchGenerator, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window of many short lines runs in several calls. Lines that show one image run in one."""
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    most, made = 0, 0
    own = image_reader.Image

    def noted(*given: Any) -> Any:
        nonlocal most, made
        gc.collect()  # else what counts as alive depends on when Python collects by itself
        image = own(*given)
        alive.add(image)
        most, made = max(most, len(alive)), made + 1
        return image

    for number in range(6):
        picture(number).save(folder / f"{number}.png")
    lines = [{"messages": user(shows(f"{n % 6}.png"), words(3, n % 50))} for n in range(12)] + [{"prompt": "w3"}]
    source = written(tmp_path / "in.jsonl", *lines)
    run_file(gen, source, tmp_path / "whole.jsonl", image_folder=folder, **OPTIONS)
    monkeypatch.setattr(image_reader, "Image", noted)
    monkeypatch.setattr(record_engine, "_LARGE", (256, 256))
    of_one = RecordEngine(gen).most_of_an_image
    assert of_one == 3 * 32 * 32 * 4  # LLaVA makes all of them small
    made = most = 0
    monkeypatch.setattr("hf_batchllm.files.record_loop.ROOM", 2 * of_one / (1 << 20))
    run_file(gen, source, tmp_path / "parts.jsonl", image_folder=folder, window_bytes=1 << 20, **OPTIONS)
    assert (tmp_path / "parts.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert most <= 2 + 2, "those of a call, and what the call before has left"
    assert made == 6 + 1, "each once, and one to see how large they are"


def records(*shown: list[str]) -> list[PromptRecord]:
    return [
        PromptRecord(number=n, where="", prompt=user(*map(shows, each)) if each else "text", settings=NO_SETTINGS)
        for n, each in enumerate(shown)
    ]


class Sized(ImageSources):
    def pixels(self, source: Any) -> int:
        return int(source)


@pytest.mark.parametrize(
    ("shown", "room", "most", "calls"),
    [
        ([["1"], ["2"], ["3"]], 24 * 6, 0, [[0, 1, 2]]),
        ([["1"], ["2"], ["3"]], 24 * 3, 0, [[0, 1], [2]]),
        ([["3"], ["2"], ["3"], [], ["2"]], 24 * 3, 0, [[0, 2], [1, 4, 3]]),
        ([["9"], ["9"], ["8"]], 24 * 3, 0, [[0, 1], [2]]),
        ([["9"], ["8"], ["7"]], 24 * 3, 24, [[0, 1, 2]]),
        ([["1", "2"], ["3", "1"], ["2", "1"]], 24 * 4, 0, [[0], [1], [2]]),
        ([["1", "2"], ["1", "3"], ["1", "2"]], 24 * 6, 0, [[0, 1, 2]]),
        ([[], [], []], 1, 0, [[0, 1, 2]]),
    ],
)
def test_which_records_share_a_call(shown: list[list[str]], room: int, most: int, calls: list[list[int]]) -> None:
    found = in_calls(records(*shown), Sized(), room, lambda: most)
    assert [[record.number for record in call] for call in found] == calls


# -- results -----------------------------------------------------------------------------------------------------------


def test_rows_of_results_have_no_pixels(gen: BatchGenerator, tmp_path: Path) -> None:
    file = base64.b64decode(encoded(picture(1)))
    given: list[tuple[Any, Any]] = [
        (picture(1, 64, 32), {"width": 64, "height": 32}),
        (file, {"bytes": len(file)}),
        (np.asarray(picture(1, 64, 32)), {"shape": [32, 64, 3]}),
        ("a.png", "a.png"),
    ]
    out = gen.generate([user(shows(image), words(3)) for image, _ in given], max_new_tokens=2, on_error="record")
    out.to_jsonl(tmp_path / "rows.jsonl")
    parts = [line["prompt"][0]["content"][0] for line in results(tmp_path / "rows.jsonl")]
    assert parts == [{"type": "image", "image": described} for _, described in given]
    if pytest.importorskip("datasets"):
        assert json.loads(out.to_dataset()[0]["prompt"])[0]["content"][0] == parts[0]
