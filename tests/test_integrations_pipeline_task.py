"""The tasks are known after ``import hf_batchllm``, whatever is imported first, and the import itself stays light."""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformers.pipelines
from transformers import TextGenerationPipeline
from transformers.pipelines import PIPELINE_REGISTRY

import hf_batchllm

ROOT = Path(__file__).resolve().parents[1]
TASKS = {"batch-text-generation", "batch-image-text-to-text"}

KNOWN = """
import sys, transformers
from transformers.pipelines import PIPELINE_REGISTRY, check_task, get_supported_tasks
for batch, like, own in (
    ("batch-text-generation", "text-generation", "BatchTextGenerationPipeline"),
    ("batch-image-text-to-text", "image-text-to-text", "BatchImageTextToTextPipeline"),
):
    name, entry, _ = check_task(batch)
    impl = entry["impl"]
    if isinstance(impl, str):
        import importlib
        module, _, name = impl.rpartition(".")
        impl = getattr(importlib.import_module(module), name)
    assert impl.__name__ == own
    assert entry["pt"] == check_task(like)[1]["pt"]
    assert batch in get_supported_tasks()
    assert not hasattr(impl, "_registered_impl")
module = sys.modules["transformers.pipelines"]
assert type(module.__loader__).__module__.startswith("_frozen_importlib"), module.__loader__
assert module.__spec__.loader is module.__loader__
assert not [finder for finder in sys.meta_path if type(finder).__module__.startswith("hf_batchllm")]
"""


def run(code: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error::UserWarning"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stderr


@pytest.mark.parametrize(
    "imports",
    [
        # Ours first; then looked for, and not loaded; then reloaded. Another finder is there that asks all others.
        "import importlib, importlib.util, hf_batchllm\n"
        "class Theirs:\n"
        "    def find_spec(self, *asked):\n"
        "        found = (each.find_spec(*asked) for each in sys.meta_path if each is not self)\n"
        "        return next((each for each in found if each is not None), None)\n"
        "sys.meta_path.insert(1, Theirs())\n"
        "spec = importlib.util.find_spec('transformers.pipelines')\n"
        "assert spec.submodule_search_locations and 'transformers.pipelines' not in sys.modules\n"
        "importlib.reload(hf_batchllm)\n"
        "from transformers import pipeline",
        "from transformers import pipeline\nimport importlib, hf_batchllm\nimportlib.reload(hf_batchllm)",
    ],
    ids=["ours first", "transformers first"],
)
def test_the_tasks_are_known(imports: str) -> None:
    errors = run(f"import sys\n{imports}\n{KNOWN}")
    assert "already registered" not in errors


def test_the_import_stays_light() -> None:
    run(
        "import sys, hf_batchllm\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
        "assert sum(type(each).__module__.startswith('hf_batchllm') for each in sys.meta_path) == 1\n"
        "import json.tool, email.mime.text\n"  # whatever else is imported is none of ours
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )


def test_a_reload_registers_once_more_and_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    before, finders = dict(PIPELINE_REGISTRY.supported_tasks), list(sys.meta_path)
    with caplog.at_level(logging.WARNING):
        importlib.reload(hf_batchllm)
    assert list(PIPELINE_REGISTRY.supported_tasks) == list(before)
    assert sys.meta_path == finders
    assert not caplog.records
    assert set(transformers.pipelines.get_supported_tasks()) >= TASKS
    assert not hasattr(TextGenerationPipeline, "_registered_impl")
