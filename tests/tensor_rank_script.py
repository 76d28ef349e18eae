"""What each rank runs in the tests of models that ranks have together: the cases named on the command line.

torchrun --nproc-per-node 2 tensor_rank_script.py FOLDER CASE ...

A case has a name, and what it is given after a colon: ``family:llama``.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import warnings

import support_tensor_rank_answers
import support_tensor_rank_failures
import support_tensor_rank_lies
import torch
import torch.distributed as dist
from support_tensor_ranks import DEVICE, FOLDER, FOUND, RANK

CASES = {
    **vars(support_tensor_rank_answers),
    **vars(support_tensor_rank_lies),
    **vars(support_tensor_rank_failures),
}
_LONG = 60  # seconds, after which a case shows where it is


def main(cases: list[str]) -> None:
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a background process ignores
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if DEVICE == "cpu" else "cpu:gloo,cuda:nccl")
    for case in cases:
        name, _, given = case.partition(":")
        faulthandler.dump_traceback_later(_LONG)
        try:
            FOUND[case] = CASES[name](given)
        except BaseException as error:
            FOUND[case] = f"FAILED {type(error).__name__}: {error}"
            if isinstance(error, AssertionError):
                import traceback

                FOUND[case] += "".join(traceback.format_exception(error)[-2:])
        faulthandler.cancel_dump_traceback_later()
        (FOLDER / str(RANK)).write_bytes(pickle.dumps(FOUND))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[2:])
