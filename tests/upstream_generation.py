"""Runs transformers' own tests of generation without and with ``accelerated``, and says which of them differ.

    python tests/upstream_generation.py --tests FOLDER [--left] [--families llama gpt2 ...] [--match EXPRESSION]

FOLDER holds transformers' `tests`, `utils`, `conftest.py` and `pyproject.toml`, of the installed version or near it,
and a link from `src/transformers` to the installed package. The tests import `parameterized`, `httpx` and
`timeout_decorator`. A test differs if it passes without ``accelerated`` and fails with it; docs/ways-in.md names the
differences that are meant.
"""

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "gpt2", "gpt_neox", "opt", "granite", "olmo2"),
    *("mixtral", "qwen3_moe", "gpt_oss", "qwen3_next", "bamba", "qwen2_vl"),
)
GENERATION = "tests/generation/test_utils.py"
TINY = {
    "gpt2": "tiny-random-gpt2",
    "llama": "tiny-random-LlamaForCausalLM",
    "mistral": "tiny-random-MistralForCausalLM",
}
SIZES = {"vocab_size": 1000, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}


class Recorder:
    """A plugin of pytest that keeps how each test ended, and how many calls of ``generate`` the engine served."""

    def __init__(self, accelerate: bool, left: bool) -> None:
        self.outcomes: dict[str, str] = {}
        self.calls: Counter[str] = Counter()
        self.family, self.left = "", left
        if accelerate:
            self._accelerate()

    def _accelerate(self) -> None:
        from transformers import GenerationMixin

        from hf_batchllm import accelerated
        from hf_batchllm.integrations import fallbacks

        own, warn = GenerationMixin.generate, fallbacks.warn_user

        @functools.wraps(own)
        def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
            GenerationMixin.generate = own  # as the library finds it elsewhere; and no call leads back here
            try:
                if type(model).generate is not own:  # the class has one of its own, which called this one
                    return own(model, *args, **kwargs)
                with accelerated(model):
                    try:
                        return model.generate(*args, **kwargs)
                    finally:
                        self.calls[f"{self.family} {'fell back' if model.last_report is None else 'served'}"] += 1
            finally:
                GenerationMixin.generate = generate

        def count(message: str) -> None:
            self.calls[message] += 1
            warn(message)

        GenerationMixin.generate, fallbacks.warn_user = generate, count

    def pytest_collection_finish(self) -> None:
        mixin = sys.modules["tests.generation.test_utils"].GenerationTesterMixin
        prepare = mixin.prepare_config_and_inputs_for_generate

        def padded_left(test: Any, *args: Any, **kwargs: Any) -> Any:
            config, inputs = prepare(test, *args, **kwargs)
            if inputs.get("attention_mask") is not None:
                inputs["attention_mask"] = inputs["attention_mask"].sort(dim=1).values  # the zeros come first
            return config, inputs

        if self.left:
            mixin.prepare_config_and_inputs_for_generate = padded_left

    def pytest_runtest_setup(self, item: Any) -> None:
        import torch

        self.family = item.path.parent.name
        torch.manual_seed(0)  # the same weights, and prompts, in both runs
        sys.modules["tests.test_modeling_common"].global_rng.seed(0)

    def pytest_runtest_logreport(self, report: Any) -> None:
        name = report.nodeid.rpartition("/")[0].rpartition("/")[2] + " " + report.nodeid.partition("::")[2]
        if report.failed:
            self.outcomes[name] = str(getattr(report.longrepr, "reprcrash", report.longrepr))
        elif report.when == "call":
            self.outcomes[name] = report.outcome


def save_stand_ins(folder: Path, text: str) -> None:
    """Tiny models under the names that tests load from the hub; ``text``: what their tokenizer is trained on."""
    import torch
    from support_word_tokenizer import byte_tokenizer
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = byte_tokenizer().train_new_from_iterator([text], 1000, new_special_tokens=["<end>"])
    tokenizer.eos_token = tokenizer.bos_token = "<end>"
    torch.manual_seed(0)
    for kind, name in TINY.items():
        config = AutoConfig.for_model(kind, **SIZES, intermediate_size=64, num_hidden_layers=2)
        config.eos_token_id = config.bos_token_id = tokenizer.eos_token_id
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / "hf-internal-testing" / name)
        tokenizer.save_pretrained(folder / "hf-internal-testing" / name)


def run(given: argparse.Namespace, accelerate: str) -> dict[str, Any]:
    """All tests in a process of its own, which finds the stand-ins by their names in its current folder."""
    with tempfile.TemporaryDirectory() as folder:
        save_stand_ins(Path(folder), (given.tests / GENERATION).read_text(encoding="utf-8"))
        environment = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"} | dict(os.environ)
        call = [sys.executable, __file__, *sys.argv[1:], "--tests", str(given.tests), "--child", accelerate]
        subprocess.run(call, cwd=folder, env=environment, stdout=sys.stderr, check=True)
        return json.loads(Path(folder, "outcomes.json").read_text(encoding="utf-8"))


def child(given: argparse.Namespace) -> None:
    import pytest

    sys.path.remove(str(Path(__file__).parent))  # it has a `conftest`, too
    recorder = Recorder(given.child == "with", given.left)
    files = [GENERATION, *(f"tests/models/{name}/test_modeling_{name}.py" for name in given.families)]
    options = ["-k", given.match, "-q", "-p", "no:cacheprovider", "-o", "log_cli=0", "--continue-on-collection-errors"]
    pytest.main([*(str(given.tests / file) for file in files), *options], plugins=[recorder])
    Path("outcomes.json").write_text(json.dumps(vars(recorder)), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", type=lambda path: Path(path).resolve(), required=True)
    parser.add_argument("--families", nargs="*", default=FAMILIES)
    parser.add_argument("--match", default="generat and not compil and not export", help="what pytest's -k takes")
    parser.add_argument("--left", action="store_true", help="prompts padded right, which fall back, are padded left")
    parser.add_argument("--child", choices=["with", "without"], help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        return child(given)
    without, beside = run(given, "without")["outcomes"], run(given, "with")
    passed = [test for test, outcome in without.items() if outcome == "passed"]
    differ = [test for test in passed if beside["outcomes"].get(test) != "passed"]
    print("| tests | pass without | pass with | calls served | fell back | differ |\n|---|---|---|---|---|---|")
    for family in dict.fromkeys(test.split()[0] for test in without):
        both, unlike = (sum(test.split()[0] == family for test in tests) for tests in (passed, differ))
        calls = [beside["calls"].pop(f"{family} {how}", 0) for how in ("served", "fell back")]
        print("|", family, *(f"| {count}" for count in (both, both - unlike, *calls, unlike)), "|")
    print(*(f"- {test}: {beside['outcomes'].get(test)}" for test in differ), sep="\n")
    print(*(f"{times} x {reason}" for reason, times in beside["calls"].items()), sep="\n")


if __name__ == "__main__":
    main()
