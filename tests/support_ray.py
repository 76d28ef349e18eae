"""What tests of datasets on Ray share: prompts and models whose results one process gives, too."""

from __future__ import annotations

import os
import random
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support_families import build
from support_letter_tokenizers import letter_tokenizer

from hf_batchllm import BatchGenerator, BatchResult


@dataclass(frozen=True)
class Load:
    """Loads a small model and its tokenizer. ``dies``: a file; the process that makes it dies in its third step."""

    dies: str | None = None

    def __call__(self) -> Any:
        model = build("llama")
        if self.dies is not None:
            steps = []

            def dying(*given: Any) -> None:
                steps.append(1)
                if len(steps) == 3 and not Path(self.dies or "").exists():
                    Path(self.dies or "").touch()
                    os.kill(os.getpid(), signal.SIGKILL)

            model.register_forward_pre_hook(dying)
        return model, letter_tokenizer(97)


def texts(count: int = 40) -> list[str]:
    """Some share a beginning of 200 letters, in no order."""
    rng = random.Random(7)
    beginnings = ["".join(rng.choices("abcdef", k=200)) for _ in range(5)]
    return [rng.choice(beginnings) + "".join(rng.choices("ghij", k=4 + at % 7)) for at in range(count)]


def in_one_process(prompts: list[Any], **options: Any) -> BatchResult:
    with BatchGenerator(*Load()()) as gen:
        return gen.generate(prompts, progress=False, **options)
