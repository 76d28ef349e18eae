"""The tasks of the batch pipelines: transformers knows them after ``register_tasks``, and not before."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support_accelerated import word_tokenizer
from support_families import build
from transformers import TextGenerationPipeline, pipeline
from transformers.pipelines import check_task, get_supported_tasks

from hf_batchllm import UnsupportedModelError, accelerated
from hf_batchllm.integrations.image_pipeline import BatchImageTextToTextPipeline
from hf_batchllm.integrations.pipeline import BatchTextGenerationPipeline
from hf_batchllm.integrations.pipeline_task import register_tasks

ROOT = Path(__file__).resolve().parents[1]
TASKS = {
    "batch-text-generation": ("text-generation", BatchTextGenerationPipeline),
    "batch-image-text-to-text": ("image-text-to-text", BatchImageTextToTextPipeline),
}


def run(code: str) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error::UserWarning"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_the_import_is_light_and_leaves_no_finder() -> None:
    run(
        "import sys\n"
        "before = list(sys.meta_path)\n"
        "import hf_batchllm\n"
        "assert sys.meta_path == before\n"
        "assert not {'torch', 'transformers', 'numpy', 'lm_eval'} & set(sys.modules)\n"
    )


def test_the_import_adds_no_task() -> None:
    run(
        "import hf_batchllm\n"
        "from transformers.pipelines import check_task\n"
        "from hf_batchllm import accelerated\n"
        f"for task in {list(TASKS)}:\n"
        "    try:\n        check_task(task)\n"
        "    except KeyError as error:\n        assert 'Unknown task ' + task in str(error), error\n"
        "    else:\n        raise AssertionError(task)\n"
    )


def test_one_line_adds_them() -> None:
    for _ in range(2):
        register_tasks()
    for task, (like, its_class) in TASKS.items():
        entry = check_task(task)[1]
        assert entry["impl"] is its_class
        assert entry["pt"] == check_task(like)[1]["pt"]
        assert not hasattr(its_class, "_registered_impl")
    assert not hasattr(TextGenerationPipeline, "_registered_impl")
    assert set(get_supported_tasks()) >= set(TASKS)


def test_accelerated_has_nothing_to_add() -> None:
    register_tasks()
    ours = pipeline("batch-text-generation", model=build("gemma3"), tokenizer=word_tokenizer(), device="cpu")
    with pytest.raises(UnsupportedModelError, match=r"leave accelerated\(\) out"), accelerated(ours):
        pass
