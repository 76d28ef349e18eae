"""A dataset on a cluster of Ray's on this machine: the answers of one process, also when an actor dies."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support_ray import Load, in_one_process, texts
from support_real_model import examples_module, small_model

from hf_batchllm import ConfigError, OptionValueError
from hf_batchllm.ray import generate_dataset
from hf_batchllm.ray.planned_source import dataset_of_blocks, tables_in_order
from hf_batchllm.ray.rows import ROW

ray: Any = pytest.importorskip("ray", reason="needs Ray: pip install 'hf-batchllm[ray]'")
pytest.importorskip("ray.data")

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.data.context")]
ROOT = Path(__file__).parents[1]
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 1.3, "max_new_tokens": 6, "seed": 5}


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:  # workers import the tests' own modules
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT, ROOT / "tests"))))
        yield from started()


def started() -> Iterator[None]:
    ray.init(
        num_cpus=3,
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=False,
        object_store_memory=100 << 20,
    )
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    yield
    ray.shutdown()


def run(ds: Any, **given: Any) -> Any:
    return generate_dataset(ds, Load(), num_gpus=0, **{"concurrency": 1, **given})


def written(path: Path, prompts: list[Any]) -> Path:
    """Rows in three files."""
    path.mkdir()
    for part in range(3):
        rows = [{"id": f"k{at}", "prompt": prompt} for at, prompt in enumerate(prompts)][part * 14 : part * 14 + 14]
        (path / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_parquet_to_parquet_while_an_actor_dies(tmp_path: Path) -> None:
    prompts = texts()
    (tmp_path / "in").mkdir()
    for part in range(3):
        rows = list(enumerate(prompts))[part * 14 : part * 14 + 14]
        table = pa.table({"id": [f"k{at}" for at, _ in rows], "prompt": [prompt for _, prompt in rows]})
        pq.write_table(table, tmp_path / "in" / f"{part}.parquet")
    marker = tmp_path / "died"
    out = generate_dataset(
        ray.data.read_parquet(str(tmp_path / "in")),
        Load(dies=str(marker)),
        concurrency=2,
        num_gpus=0,
        blocks=4,
        num_return_sequences=2,
        **SAMPLED,
    )
    out.write_parquet(str(tmp_path / "out"))
    assert marker.exists()
    found = pq.read_table(tmp_path / "out").sort_by("index").to_pylist()
    wanted = in_one_process(prompts, num_return_sequences=2, **SAMPLED)
    assert [row["prompt"] for row in found] == prompts
    assert [row["id"] for row in found] == [f"k{at}" for at in range(len(prompts))]
    assert [each["text"] for row in found for each in row["samples"]] == [each.text for each in wanted]
    assert {row["seed"] for row in found} == {5} and not any(row["error"] for row in found)


def test_json_lines_to_json_lines_in_two_runs(tmp_path: Path) -> None:
    """The second run goes on after the first one, by a checkpoint of Ray's."""
    prompts = [*texts(), None]
    source = written(tmp_path / "in", prompts)
    context = ray.data.DataContext.get_current()
    context.checkpoint_config = ray.data.checkpoint.CheckpointConfig(
        id_column="id", checkpoint_path=str(tmp_path / "done"), delete_checkpoint_on_success=False
    )

    def stopping(table: pa.Table) -> pa.Table:
        if list((tmp_path / "out").glob("*.json*")):
            raise OSError("the disk is full")
        return table

    try:
        out = run(ray.data.read_json(str(source), lines=True), blocks=4, **SAMPLED)
        stops = out.map_batches(stopping, batch_size=None, batch_format="pyarrow")
        with pytest.raises(Exception, match="the disk is full"):
            stops.write_json(str(tmp_path / "out"))
        first = lines_in(tmp_path / "out")
        assert 0 < len(first) < len(prompts)
        run(ray.data.read_json(str(source), lines=True), blocks=4, **SAMPLED).write_json(str(tmp_path / "out"))
    finally:
        context.checkpoint_config = None
    found = sorted(lines_in(tmp_path / "out"), key=lambda row: row["index"])
    assert [row["index"] for row in found] == list(range(len(prompts)))
    assert [row["text"] for row in found[:-1]] == [each.text for each in in_one_process(prompts[:-1], **SAMPLED)]
    assert found[-1]["error"].startswith("row 40: has an empty `prompt`")
    assert all(row in found for row in first)


def lines_in(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in sorted(folder.glob("*.json*")) for line in path.read_text().splitlines()]


def test_what_is_wrong_is_told_before_any_actor_starts() -> None:
    ds = ray.data.from_items([{"question": "ab"}])
    with pytest.raises(ConfigError, match=r"has no column `prompt` or `messages` \(it has question\)"):
        run(ds)
    with pytest.raises(OptionValueError, match="max_new_tokens"):
        run(ds, prompt_column="question", max_new_tokens=0)
    with pytest.raises(ConfigError, match="`concurrency` is 0"):
        run(ds, concurrency=0)
    with pytest.raises(ConfigError, match="'num_gpus', which is an argument of generate_dataset"):
        run(ds, ray_options={"num_gpus": 1})
    with pytest.raises(ConfigError, match="a dataset of Ray Data"):
        run([{"prompt": "ab"}])
    with pytest.raises(ConfigError, match=r"as in generate_dataset\(ds, "):
        generate_dataset(ds, Load()()[0], concurrency=1, prompt_column="question")


def test_rows_are_numbered_in_the_order_of_the_source() -> None:
    """Whichever of them is read first; and the dataset's own settings stay as they are."""

    def slow_at_first(table: pa.Table) -> pa.Table:
        time.sleep(0.3 if table["id"][0].as_py() == 0 else 0)
        return table

    ds = ray.data.range(12, override_num_blocks=4).map_batches(slow_at_first, batch_size=None, batch_format="pyarrow")
    tables = ray.get(tables_in_order(ds))
    assert pa.concat_tables(tables)["id"].to_pylist() == list(range(12))
    assert not ds.context.execution_options.preserve_order
    blocks = [np.array([1, 4, 11]), np.array([0])]
    planned = dataset_of_blocks([ray.put(table) for table in tables], [len(table) for table in tables], blocks, 1)
    assert sorted(row["id"] for row in planned.iter_rows()) == [0, 1, 4, 11]
    assert all(row["id"] == row[ROW] for row in planned.iter_rows())


def test_a_dataset_without_rows_stays_so() -> None:
    assert run(ray.data.from_items([{"prompt": "ab"}]).limit(0)).count() == 0


def test_the_example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "small_model", small_model)
    example = examples_module("ray_data")
    example.load, example.WORKERS = Load(), 1
    example.main()
    printed = capsys.readouterr().out
    assert "12 answers about 3 pages" in printed and "the same in one process: 12 of 12" in printed
