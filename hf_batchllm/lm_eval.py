"""The evaluation harness on this engine: ``python -m hf_batchllm.lm_eval``. Importing this makes the model known there.

The steps around the model are those of the harness's own ``hf`` model: loading, chat templates, tokenizing, windows.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import inspect
import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList

try:
    import lm_eval.models  # noqa: F401 -- first: the harness would otherwise never register its own models
    from lm_eval.api.instance import Instance
    from lm_eval.api.registry import model_registry
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
    from lm_eval.models.utils_hf import stop_sequences_criteria
except ModuleNotFoundError as missing:
    if (missing.name or "").partition(".")[0] != "lm_eval":
        raise
    needed = "the evaluation harness is not installed, or too old: pip install 'hf-batchllm[lm-eval]'"
    raise ModuleNotFoundError(needed, name="lm_eval") from None

from .config import BatchConfig, elsewhere
from .errors import (
    BatchLLMError,
    ConfigError,
    OptionValueError,
    PromptError,
    UnsupportedModelError,
    UnsupportedOptionError,
)
from .generator import BatchGenerator
from .inputs.base_model import base_model
from .inputs.unknown_options import unknown_option
from .results.scores import ScoreResult
from .wording import shown

NAME = "hf-batchllm"  # by which the harness knows this library
_log = logging.getLogger(__name__)

_CONFIG_FIELDS = [field.name for field in dataclasses.fields(BatchConfig)]
_GENERATE_FIELDS = frozenset(vars(GenerationConfig()))
_HF_DEFAULTS = {
    each.name: each.default for each in inspect.signature(HFLM).parameters.values() if each.name != "kwargs"
}
_FOR_LOADING = ("device_map", "torch_dtype", "quantization", "attn_implementation", "generation_config", "max_memory")
# What `hf` does with the model while it loads it, and does not do with a model object.
_AT_LOADING = ("peft", "delta", "autogptq", "gptqmodel", "parallelize", "max_memory_per_gpu", "max_cpu_memory")
_OF_THE_TOKENIZER = ("revision", "subfolder", "trust_remote_code", "use_fast_tokenizer", "gguf_file")

TokenizedPair = tuple[tuple[str, str] | None, list[int], list[int]]  # the request's texts, a context, a continuation


class BatchLM(HFLM):
    """The harness's ``hf`` model with its results, each request as if it ran alone, and all of them computed at once.

    It takes the arguments of ``hf``; ``pretrained`` may be a model object. ``batch_size``, ``max_batch_size`` and
    ``logits_cache`` have no effect. It also takes the fields of a BatchConfig (``kv_memory=20GiB``), or a
    BatchConfig as ``batch_config``. A ``backend`` that names a kind of model is the harness's, any other BatchConfig's.
    ``adapter`` is the name of one of the PEFT adapters of a model object, or None for the model without any. The
    ``generator`` runs the requests; its ``last_report`` says how the last call went.

    Log-probabilities are computed in float32, as ``hf`` does with ``softmax_dtype=float32``.
    """

    def __init__(self, pretrained: str | PreTrainedModel, **given: Any) -> None:
        theirs = ["backend"] if given.get("backend") in ("default", "causal", "seq2seq") else []
        ours = {name: given.pop(name) for name in _CONFIG_FIELDS if name in given and name not in theirs}
        config = BatchConfig.of(given.pop("batch_config", None), ours, "batch_config")
        self._options = {"adapter": given.pop("adapter")} if "adapter" in given else {}
        _refuse_what_is_ignored(pretrained, given)
        if isinstance(pretrained, str) and self._options:
            raise ConfigError("`adapter` chooses among the adapters of a model object: name a PEFT folder as `peft`")
        if isinstance(pretrained, str) and "device" not in given and not torch.cuda.is_available():
            given["device"] = "cpu"  # the harness's default is CUDA, and its loading of `peft` then fails
        super().__init__(pretrained, **given)
        if str(self.batch_size_per_gpu) != "1":
            _log.warning("batch_size has no effect: the batch is as large as memory allows (kv_memory)")
        self.generator = BatchGenerator(self.model, self.tokenizer, config)
        self.generator.plan([[0]], **self._options)  # an adapter that there is not is told now

    def close(self) -> None:
        """Free the memory that is kept between calls. This object cannot be used afterwards; its model can."""
        self.generator.close()

    @property
    def batch_size(self) -> int:
        """How many requests the harness hands over at a time: all of them."""
        return sys.maxsize

    def _get_backend(self, config: Any, backend: Any = "default", trust_remote_code: bool | None = False) -> None:
        super()._get_backend(config, backend, trust_remote_code)
        if self.backend != "causal":
            kind = getattr(config, "model_type", None) or "this"
            raise UnsupportedModelError(f"{kind} is an encoder-decoder, which is not supported: use --model hf")

    def _loglikelihood_tokens(
        self, requests: Sequence[TokenizedPair], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        if not requests:
            return []
        problems: dict[int, str] = {}
        for place, (texts, _, after) in enumerate(requests):
            if not after:
                problems[place] = f"has a continuation without tokens: {texts!r:.200}"
            elif len(after) > self.max_length:
                problems[place] = f"has a continuation of {len(after):,} tokens, and max_length is {self.max_length:,}"
        if problems:
            raise PromptError(problems, "request")
        contexts = [context[-(self.max_length + 1 - len(after)) :] for _, context, after in requests]  # as `hf` cuts
        if cut := sum(len(context) > len(kept) for (_, context, _), kept in zip(requests, contexts, strict=True)):
            _log.warning("%d of %d contexts do not fit into max_length, and are cut from the left", cut, len(requests))
        scores: Any = ()
        try:
            with self._precision():
                progress = not disable_tqdm and self.rank == 0
                afters = [after for _, _, after in requests]
                scores = self.generator.score(contexts, afters, progress=progress, **self._options)
        except BaseException as error:
            finished = getattr(error, "result", None)
            scores = finished if isinstance(finished, ScoreResult) else ()
            raise
        finally:  # an interrupt, too, leaves what had finished in the harness's cache
            for score in scores:
                texts = requests[score.index][0]
                if texts is not None:  # None: a window of a long text, which the harness remembers as a whole
                    self.cache_hook.add_partial("loglikelihood", texts, (score.logprob, score.is_greedy))
        return [(score.logprob, score.is_greedy) for score in scores]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        made = {repr(request.args[1]): request.args[1] for request in requests}  # many share theirs, as a rule
        settings = {key: _Settings.of(self, gen_kwargs) for key, gen_kwargs in made.items()}
        of_each = [settings[repr(request.args[1])] for request in requests]
        asked = [(each.ids_of(request.args[0]), each) for each, request in zip(of_each, requests, strict=True)]
        texts = [""] * len(asked)
        options = {**self._options, "progress": not disable_tqdm and self.rank == 0}
        with self._precision():
            for place, token_ids in _answers(self.generator, asked, options):
                texts[place] = of_each[place].text(token_ids)
                self.cache_hook.add_partial("generate_until", requests[place].args, texts[place])
        return texts

    def _precision(self) -> torch.autocast:
        dtype = self.mixed_precision_dtype
        return torch.autocast(device_type=self.device.type, dtype=dtype, enabled=dtype is not None)


@dataclass(frozen=True)
class _Settings:
    """What the harness wants of an answer."""

    lm: HFLM
    config: GenerationConfig
    with_strings: GenerationConfig  # the same, with the strings that the engine has to look for
    until: list[str]  # strings that end an answer
    ends: frozenset[int]  # tokens that end an answer, besides the strings
    searches: bool  # with beams: in ``hf``, a string in the best one ends the whole search
    room: int  # tokens left for a context

    @classmethod
    def of(cls, lm: HFLM, gen_kwargs: dict[str, Any]) -> _Settings:
        """The settings that ``hf`` would take from a task's arguments."""
        kwargs: dict[str, Any] = dict(normalize_gen_kwargs(gen_kwargs, lm.max_gen_toks))
        eos = None if lm.eot_token_id is None else lm.tok_decode(lm.eot_token_id, skip_special_tokens=False)
        until = handle_stop_sequences(kwargs.pop("until"), eos=eos)
        new_tokens = kwargs.pop("max_gen_toks")
        room = lm.max_length - new_tokens
        if room <= 0:
            why = f"is {new_tokens:,}, and max_length {lm.max_length:,}: there is no room for a context"
            raise OptionValueError("max_gen_toks", why)
        if not kwargs["do_sample"] and kwargs.get("temperature", 0.0) == 0.0:
            kwargs.pop("temperature", None)
        else:
            kwargs.setdefault("temperature", 0.0)
        model = base_model(lm.model)
        for name in kwargs:
            if name not in _GENERATE_FIELDS:
                for near in difflib.get_close_matches(name, ["max_gen_toks", "until"], n=1):
                    raise UnsupportedOptionError(name, f"is not a setting of an answer; did you mean `{near}`?")
                raise unknown_option(name, model)
        if (kwargs.get("num_return_sequences") or 1) > 1:
            raise UnsupportedOptionError("num_return_sequences", "is more than 1: use the `repeats` of a task")
        if kwargs.get("max_length") is None:
            # With `hf`, a length in the model's own generation_config wins over the task's.
            kwargs["max_new_tokens"] = getattr(model.generation_config, "max_new_tokens", None) or new_tokens
        if "" in until:  # the empty string is found in the first token
            kwargs["max_new_tokens"] = 1
        config = GenerationConfig(**{"pad_token_id": lm.tokenizer.pad_token_id, **kwargs})
        eos_ids = config.eos_token_id if config.eos_token_id is not None else model.generation_config.eos_token_id
        ends = frozenset([] if eos_ids is None else [eos_ids] if isinstance(eos_ids, int) else eos_ids)
        with_strings = copy.copy(config)
        with_strings.stop_strings = [each for each in until if each and (each != eos or lm.eot_token_id not in ends)]
        with_strings.stop_strings = with_strings.stop_strings or None
        searches = (config.num_beams or model.generation_config.num_beams or 1) > 1
        return cls(lm, config, with_strings, until, ends, searches, room)

    def ids_of(self, context: str) -> list[int]:
        (ids,), _ = self.lm.tok_batch_encode([context], left_truncate_len=self.room, truncation=self.lm.truncation)
        return [int(token) for token in ids]

    def criteria(self, prompt_tokens: int) -> StoppingCriteriaList:
        """The criteria that ``hf`` makes, for one request alone."""
        made: StoppingCriteriaList = stop_sequences_criteria(self.lm.tokenizer, self.until, prompt_tokens, 1)
        return made

    def ended_by_its_context(self, token_ids: list[int]) -> bool:
        """Whether the string that ended an answer begins in the context, where ``hf`` does not look.

        ``token_ids``: an answer that was ended by a token or a string.
        """
        if token_ids[-1] in self.ends:
            return False
        ids = torch.tensor([token_ids], dtype=torch.long, device="cpu")
        scores = torch.empty(1, 0, dtype=torch.float32, device="cpu")  # at which they do not look
        return not bool(self.criteria(0)(ids, scores).all())

    def text(self, token_ids: list[int]) -> str:
        end = self.lm.think_end_token
        is_token = isinstance(end, int)
        if is_token and end in token_ids:
            token_ids = token_ids[len(token_ids) - token_ids[::-1].index(end) :]
        text = self.lm.tok_decode(token_ids)
        text = text.lstrip() if is_token else text
        answer: str = postprocess_generated_text(text, self.until, None if is_token else end)
        return answer


_Request = tuple[list[int], _Settings]  # the tokens of a context, and what is asked of its answer


def _answers(
    generator: BatchGenerator, requests: Sequence[_Request], options: dict[str, Any]
) -> Iterator[tuple[int, list[int]]]:
    """The place of each request and the tokens of its answer, as they finish.

    The engine finds strings fast, and finds those that begin in the prompt, too. An answer that such a string ended is
    computed once more, with the harness's own criteria, which are called for each token. Beams need them, too.
    """
    beams = [place for place, (_, settings) in enumerate(requests) if settings.searches]
    plain = [place for place, (_, settings) in enumerate(requests) if not settings.searches]
    again: list[int] = []
    if plain:
        configs = [requests[place][1].with_strings for place in plain]
        for each in generator.stream([requests[place][0] for place in plain], configs, **options):
            place = plain[each.index]
            if each.finish_reason == "stop" and requests[place][1].ended_by_its_context(each.token_ids):
                again.append(place)
            else:
                yield place, each.token_ids
    for places in filter(None, (again, beams)):  # beams do not go into a call with answers without
        some = [requests[place] for place in places]

        def criteria(index: int, prompt_token_ids: list[int], some: list[_Request] = some) -> list[Any]:
            return list(some[index][1].criteria(len(prompt_token_ids)))

        configs = [settings.config for _, settings in some]
        for each in generator.stream([ids for ids, _ in some], configs, stopping_criteria=criteria, **options):
            yield places[each.index], each.token_ids


def _refuse_what_is_ignored(pretrained: Any, given: dict[str, Any]) -> None:
    """Refuse arguments that ``hf`` would ignore, or that this model cannot honour."""
    is_loaded = not isinstance(pretrained, str)
    if given.get("softmax_dtype") not in (None, "float32", torch.float32):
        raise ConfigError("`softmax_dtype` must be float32: log-probabilities are computed in it here")
    if given.get("tp_plan") is not None:
        raise UnsupportedModelError("`tp_plan` spreads a model over devices, which is not supported: use --model hf")
    for name in given:
        if name in _HF_DEFAULTS or (name in _FOR_LOADING and not is_loaded):
            continue
        why = "is called `max_length` here" if name == "max_model_len" else elsewhere(name)
        if why is not None:
            raise ConfigError(f"`{name}` {why}")
        # Others go to from_pretrained(), whose arguments are less like these.
        known = [*_CONFIG_FIELDS, "adapter", "batch_config", *_HF_DEFAULTS]
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
        if near or is_loaded:
            hint = f"did you mean `{near[0]}`?" if near else "`pretrained` is a model object, and nothing is loaded"
            raise ConfigError(f"`{name}` is not an argument of this model; {hint}")
    if not is_loaded:
        return
    tokenizer = given.get("tokenizer")
    ignored = _AT_LOADING if tokenizer is None or isinstance(tokenizer, str) else (*_AT_LOADING, *_OF_THE_TOKENIZER)
    for name in ignored:
        if given.get(name) not in (None, _HF_DEFAULTS.get(name)):
            why = "would be ignored, as `pretrained` is a model object: load it that way first, and leave it out"
            raise ConfigError(f"`{name}` is {shown(given[name])}, and {why}")
    has, device = str(pretrained.dtype).removeprefix("torch."), pretrained.device
    dtype = str(given.get("dtype") or has).removeprefix("torch.")
    wanted = torch.device(given.get("device") or device)
    if dtype not in ("auto", has):
        raise ConfigError(f"`dtype` is {dtype}, and `pretrained` is a model object in {has}: leave `dtype` out")
    if wanted.type != device.type or wanted.index not in (None, device.index):
        raise ConfigError(f"`device` is {wanted}, and `pretrained` is a model object on {device}: leave `device` out")


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status of ``lm_eval`` with these arguments (or this process's), and this model if they name none."""
    from lm_eval.__main__ import cli_evaluate

    given = list(sys.argv[1:] if arguments is None else arguments)
    starts = given and given[0] not in ("ls", "validate") and given != ["run"]
    names = any(each.split("=")[0] in ("--model", "-M", "--config", "-C", "--help", "-h") for each in given)
    before, sys.argv = sys.argv, ["lm-eval", *given, *(["--model", NAME] if starts and not names else [])]
    try:
        cli_evaluate()
    except BatchLLMError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        sys.argv = before
    return 0


if NAME not in model_registry:  # by its name: ``python -m`` runs this file under another one
    model_registry.register(NAME, target="hf_batchllm.lm_eval:BatchLM")

if __name__ == "__main__":
    sys.exit(main())
