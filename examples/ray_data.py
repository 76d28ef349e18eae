"""A dataset on a cluster, with Ray Data: questions over pages from JSON lines to Parquet, by two workers.

    python examples/ray_data.py     # needs the extras `demo` and `ray`; a minute on two CPU cores

Here the cluster is this machine, and each worker has a model on the CPU. On a cluster of GPUs it is the same call, with
``concurrency=64`` and without ``num_gpus=0``. The questions over a page go to one worker, which computes the page once.
"""

from __future__ import annotations

import copy
import json
import tempfile
from pathlib import Path

import ray
from small_model import load

from hf_batchllm import BatchGenerator
from hf_batchllm.ray import generate_dataset

MODULES = (copy, json, tempfile)
TASKS = ("In one sentence, this module", "A typical use of it is", "Its most important function is", "It was written")
SAMPLED = {"do_sample": True, "temperature": 0.8, "max_new_tokens": 16, "seed": 7}
WORKERS = 2


def pages() -> dict[str, str]:
    return {module.__name__: (module.__doc__ or "")[:1500] for module in MODULES}


def main() -> None:
    rows = [{"module": name, "prompt": f"{page}\n\n{task}"} for task in TASKS for name, page in pages().items()]
    # A worker takes a CPU, and what writes the results needs one, too.
    ray.init(num_cpus=WORKERS + 1, include_dashboard=False, ignore_reinit_error=True)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        ds = ray.data.read_json(f"{folder}/in.jsonl", lines=True)
        out = generate_dataset(ds, load, concurrency=WORKERS, num_gpus=0, **SAMPLED)
        out.write_parquet(f"{folder}/out")
        answers = sorted(ray.data.read_parquet(f"{folder}/out").iter_rows(), key=lambda row: row["index"])

    print(f"\n{len(answers)} answers about {len(MODULES)} pages")
    for row in answers:
        print(f"  {row['index']:2} {row['module']:<9} {' '.join(row['text'].split())[:80]}")

    with BatchGenerator(*load()) as gen:
        alone = gen.generate([row["prompt"] for row in rows], **SAMPLED)
    same = sum(row["text"] == one.text for row, one in zip(answers, alone, strict=True))
    print(f"\nthe same in one process: {same} of {len(alone)}")


if __name__ == "__main__":
    main()
