"""python -m hf_batchllm.lm_eval --tasks ... --model_args pretrained=..."""

from __future__ import annotations

import sys

from . import main

if __name__ == "__main__":
    sys.exit(main())
