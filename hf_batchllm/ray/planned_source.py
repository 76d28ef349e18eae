"""What Ray Data is asked for: a dataset in its order, blocks of chosen rows, and actors that get each block whole."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from .ray_package import ray_data
from .rows import ROW

if TYPE_CHECKING:
    import pyarrow

    from .worker import WorkerCall

_RETRIES = 3  # of a block whose actor dies: what kills each of its actors would go on for ever


def columns_of(ds: Any) -> list[str]:
    with _in_order(ds.context):
        return ds.columns() or []


def tables_in_order(ds: Any) -> list[Any]:
    """References to the tables of a dataset, run once. Rows have the order of its sources, whoever reads them."""
    with _in_order(ds.context):
        tables: list[Any] = ds.materialize().to_arrow_refs()
    return tables


@contextmanager
def _in_order(context: Any) -> Iterator[None]:
    options, checkpoint = context.execution_options, context.checkpoint_config
    before = options.preserve_order
    # A checkpoint is of the whole call: Ray warns of one where nothing is written.
    options.preserve_order, context.checkpoint_config = True, None
    try:
        yield
    finally:
        options.preserve_order, context.checkpoint_config = before, checkpoint


def dataset_of_blocks(tables: Sequence[Any], sizes: Sequence[int], blocks: Sequence[np.ndarray], readers: int) -> Any:
    """A dataset with a block for each of ``blocks``: the rows of these numbers, which ascend, and the numbers as ROW.

    It is read from a source, as Ray's checkpoints leave out what is done where a source is read. ``sizes``: how many
    rows each of the ``tables`` has.
    """
    ray = ray_data()
    from ray.data.block import BlockMetadata

    ends = np.cumsum(sizes)

    def read_task(rows: np.ndarray) -> Any:
        first, last = np.searchsorted(ends, rows[[0, -1]], side="right")
        near = [(tables[at], int(ends[at] - sizes[at]), int(ends[at])) for at in range(first, last + 1)]
        parts = [(table, rows[(rows >= begin) & (rows < end)] - begin) for table, begin, end in near]
        parts = [(table, mine) for table, mine in parts if len(mine)]
        metadata = BlockMetadata(num_rows=len(rows), size_bytes=None, input_files=None, exec_stats=None)
        return ray.data.ReadTask(lambda: [_gathered(parts, rows)], metadata)

    source: Any = ray.data.Datasource

    class PlannedRows(source):
        def get_read_tasks(self, parallelism: int, *more: Any, **given: Any) -> list[Any]:
            return [read_task(rows) for rows in blocks]

        def estimate_inmemory_data_size(self) -> int | None:
            return None

    # Readers need no CPU of their own: on a cluster whose CPUs all belong to actors they would wait for ever.
    return ray.data.read_datasource(PlannedRows(), override_num_blocks=len(blocks), concurrency=readers, num_cpus=0)


def _gathered(parts: Sequence[tuple[Any, np.ndarray]], rows: np.ndarray) -> pyarrow.Table:
    import pyarrow as pa
    import ray

    tables = [ray.get(table).take(pa.array(mine)) for table, mine in parts]
    whole = pa.concat_tables(tables, promote_options="permissive").combine_chunks()
    return whole.append_column(ROW, pa.array(rows))


def run_blocks(
    ds: Any, call: WorkerCall, *, smallest: int, largest: int, num_gpus: float, ray_options: Mapping[str, Any]
) -> Any:
    """The dataset with results: an actor gets a block, and the next one when it has answered that."""
    from .worker import Worker

    ray = ray_data()
    # The public map_batches refuses GPUs without a batch size, and any batch size cuts blocks or joins them.
    # This is what map_groups calls, which has the same need; Ray 2.54 has it by the second name.
    whole = getattr(ds, "map_batches_internal", None) or ds._map_batches_without_batch_size_validation
    given = {"num_cpus": None, "memory": None, "max_restarts": -1, "max_task_retries": _RETRIES, **ray_options}
    return whole(
        Worker,
        batch_size=None,
        batch_format="pyarrow",
        zero_copy_batch=True,
        # A block that waits at one actor could run on another that is free.
        compute=ray.data.ActorPoolStrategy(min_size=smallest, max_size=largest, max_tasks_in_flight_per_actor=1),
        fn_args=None,
        fn_kwargs=None,
        fn_constructor_args=(call,),
        fn_constructor_kwargs=None,
        num_gpus=num_gpus,
        concurrency=None,
        udf_modifying_row_count=False,
        ray_remote_args_fn=None,
        **given,
    )
