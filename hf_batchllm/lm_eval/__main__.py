"""python -m hf_batchllm.lm_eval --tasks ... --model_args pretrained=..."""

import sys

from . import main

if __name__ == "__main__":
    sys.exit(main())
