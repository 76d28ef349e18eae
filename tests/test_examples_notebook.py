"""examples/tour.ipynb, run from beginning to end in a fresh kernel, over a stand-in for the model."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import Any

import pytest
from support_peft_version import skip_where_transformers_refuses_peft
from support_real_model import ROOT, load_once, small_model

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")
pytest.importorskip("pandas")

PATH = ROOT / "examples" / "tour.ipynb"
# transformers 5.17 warns of what its own pipelines do, and of the defaults that they set.
THEIRS = "[transformers] Passing `generation_config` together with"
SECONDS = 180  # for a cell; all of them together take some 30


@pytest.fixture(scope="session")  # run once, though tests of other files may come between
def executed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """The outputs of each code cell, by its id."""
    if not small_model.is_available():
        pytest.skip(small_model.why_not_available())
    skip_where_transformers_refuses_peft()
    if not small_model.FOLDER.exists():
        load_once()  # unpacks it, which takes longer than a cell may
    folder = tmp_path_factory.mktemp("tour")
    (folder / "small_model.py").write_text("from support_real_model import load_stand_in as load\n", encoding="utf-8")
    shutil.copy(PATH.parent / "small_image_model.py", folder)
    notebook = nbformat.read(PATH, as_version=4)
    client = nbclient.NotebookClient(
        notebook,
        timeout=SECONDS,
        kernel_name="python3",
        coalesce_streams=True,
        resources={"metadata": {"path": str(folder)}},  # where Jupyter runs a notebook
    )
    # This checkout, whatever is installed; and two workers on two cores, as in other tests.
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    client.execute(env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
    return {
        cell.id: [output for output in cell.outputs if THEIRS not in output.get("text", "")]
        for cell in notebook.cells
        if cell.cell_type == "code"
    }


def test_it_is_stored_without_outputs_and_in_one_format() -> None:
    text = PATH.read_text(encoding="utf-8")
    notebook = nbformat.reads(text, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)
    for cell in notebook.cells:
        assert not cell.metadata
        assert cell.cell_type == "markdown" or (not cell.outputs and cell.execution_count is None)
    assert set(notebook.metadata) == {"kernelspec", "language_info"} and set(notebook.metadata.language_info) == {
        "name"
    }
    assert nbformat.writes(notebook) + "\n" == text, "it was stored by something that orders or indents it otherwise"


def test_its_first_cell_finds_what_it_needs_from_the_root_of_a_checkout_too() -> None:
    first = next(cell for cell in nbformat.read(PATH, as_version=4).cells if cell.cell_type == "code")
    lines = first.source.splitlines()
    assert lines[-1] == "model, tokenizer = load()" and "from small_model import load" in lines
    code = "\n".join(line for line in lines[:-1] if not line.startswith("from hf_batchllm"))  # which takes its time
    for folder in (ROOT, PATH.parent):
        subprocess.run([sys.executable, "-c", code], cwd=folder, check=True)


@pytest.mark.xdist_group("real_model")  # one worker: what is large is in memory once at a time
@pytest.mark.timeout(900)
class TestExecuted:
    def test_nothing_is_said_that_nobody_asked_for(self, executed: dict[str, list[Any]]) -> None:
        for name, outputs in executed.items():
            for output in outputs:
                assert output.output_type != "error"
                assert output.get("name") != "stderr", f"in cell {name}: {output.text}"
            silent = name in ("model", "before", "pages")
            assert len(outputs) == (0 if silent else 1), f"in cell {name}"
            assert "Warning" not in str(outputs), f"in cell {name}"

    def test_what_is_a_picture_is_there_as_a_picture(self, executed: dict[str, list[Any]]) -> None:
        for name in (
            "plan",
            "report",
            "result",
            "pandas",
            "compare",
            "samples",
            "scores",
            "pictures",
            "files",
            "adapters",
        ):
            (output,) = executed[name]
            assert "text/html" in output.data and "text/plain" in output.data, name

    def test_the_bar_is_one_line(self, executed: dict[str, list[Any]]) -> None:
        (output,) = executed["run"]
        if output.output_type == "stream":  # without ipywidgets
            assert output.text.count("\n") == 1 and "24 / 24 done" in output.text

    def test_what_it_claims_is_so(self, executed: dict[str, list[Any]]) -> None:
        def shown(name: str) -> str:
            (output,) = executed[name]
            return output.text if output.output_type == "stream" else output.data["text/plain"]

        assert shown("compare").count("True") == 3 and "False" not in shown("compare")  # the same tokens
        assert "times as fast" in shown("speed")
        assert shown("seed") == shown("close") == "True"
        assert len(shown("stream").splitlines()) == 4
        assert "did you mean `max_new_tokens`?" in shown("typo")
        assert "1  is empty" in shown("record") and "raise `kv_memory`" in shown("record")
        assert shown("pipeline").count("generated_text") == 4
        assert shown("best").count("'") == 2 * 3  # a subject for each page
        assert len(shown("beams").splitlines()) == 2 * 2
        assert executed["pictures"][0].data["text/html"].count("<img ") == 4
        assert "2 images, read by the vision tower in" in shown("pictures-report")
        assert [line.split()[-1] for line in shown("files").splitlines()[1:]] == ["4", "5", "6", "7"]
        assert "4 were done before, 0 now" in shown("files-again")
        assert [line.split()[1] for line in shown("adapters").splitlines()[1:]] == ["none", "loud"]
