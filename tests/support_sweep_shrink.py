"""A tiny config of any class of transformers, from its default one: the same kinds of layers, few and narrow.

Nothing is written by model: fields are recognised by their names, whatever the class. What that cannot guess stands in
OVERRIDES of ``support_sweep_models.py``.
"""

from __future__ import annotations

import copy
import functools
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

from transformers import PreTrainedConfig

VOCABULARY = 128
WINDOW = 8
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, ROPE_DIM = 64, 4, 2, 32, 8
FEWEST_LAYERS, MOST_LAYERS = 4, 8

# The first pattern that matches a field's whole name says its value. Larger values alone are replaced.
_SIZES: list[tuple[str, int]] = [
    (r".*type_vocab_size|segment_types|.*(img|image|mel|audio|num)_.*token.*_num", 2),
    (r"(.*_)?vocab_size(_.*)?|.*_vocab", VOCABULARY),
    (r".*_lstm_layers|num_residual_layers|resampler_depth|.*num_add_layers", 1),
    (r"first_k_dense_replace|num_dense_layers|max_window_layers|moe_layer_start_index|num_nextn_predict_layers", 1),
    (r"num_kv_shared_layers", FEWEST_LAYERS // 2),
    (r"moe_layer_end_index", FEWEST_LAYERS - 1),
    (r".*layer.*_(offset)", 1),
    (r".*layer_(period|interval)|.*_interval|.*every_n.*|.*sliding_window_pattern|.*_layer_step|layer_group_size", 2),
    (r"cross_attention_frequency|n_layers_per.*|num_layers_per_stack", 2),
    (r"(.*_)?(num|n)_(.*_)?(layers|layer|blocks)|n_layers?|(en|de)coder_layers|layers|(.*_)?depth", FEWEST_LAYERS),
    (r".*(num_)?(key_value|kv)_heads(_.*)?|n_head_kv|kv_n_heads|linear_num_key_heads|num_query_groups", KV_HEADS),
    (r"(.*_)?(heads|num_heads|n_heads?)|.*_heads|.*_n_head", HEADS),
    (r"qk_rope_head_dim|index_head_dim|indexer_head_dim", ROPE_DIM),
    (r"qk_nope_head_dim", 2 * ROPE_DIM),
    (r"qk_head_dim", 3 * ROPE_DIM),
    (r"v_head_dim", 12),
    (r"rotary_dim|axial_dim", 8),
    (r"q_lora_rank|o_lora_rank|hc_lowrank", 24),
    (r"kv_lora_rank", 20),
    (r".*lora_rank|.*_rank", 8),
    (r"global_head_dim|swa_head_dim", HEAD_DIM),
    (r"(.*_)?head_dim|(.*_)?d_head|(.*_)?headdim|kv_channels|d_kv|dim_head|.*head_size|.*dim_head", HEAD_DIM),
    (r".*(intermediate|ffn|feed_forward|mlp|inner|expert)_?(hidden_)?(size|dim).*|d_ff|dff|dim_ff|d_inner|n_inner", 96),
    (r".*intermediate_size.*|share_expert_dim", 96),
    (r".*(experts?_per_tok(en)?|top_?k|top_k_experts|moe_k)", 2),
    (r"n_group|num_expert_group|n_groups", 2),
    (r".*topk_group", 1),
    (r".*num_.*experts|n_routed_experts|num_experts|zero_expert_num", 4),
    (r".*(state_size|d_state)", 8),
    (r".*dt_rank|time_step_rank", 4),
    (r".*chunk_size", 16),
    (r"index_block_size|index_topk_blocks", 4),  # prompts have to be longer than what is chosen among
    (r"floor_scale", WINDOW),
    (r".*(d_ssm)", 128),
    (r"attention_chunk_size|keep_window_size|.*sliding_window.*|attention_window_size|window_size", WINDOW),
    (r"local_attention", 2 * WINDOW),
    (r"base_channels|.*out_channels?", 32),
    (r".*_channels?", HIDDEN),
    (r".*position.*embeddings?|n_positions|n_ctx|.*max_.*len.*|.*max_position.*|context_length|seq_len", 512),
    (r"model_max_length|.*position_embedding_size|max_(source|target)_positions", 512),
    (r"num_(query_tokens|latents)|.*_query_num|resampler_n_latents|.*num_latents", 4),
    (r".*(hidden_size|_hidden_dim|_embed_dim|output_dim|input_dim|out_dim|in_dim|mid_dim)(_.*)?", HIDDEN),
    (r"(d_model|n_embd|dim|embed_dim|embedding_dim|emb_dim|projection_dim|lru_width|embedding_size)", HIDDEN),
    (r".*(embedding_size|hidden|_width|embed_size|projection_size|word_embed_proj_dim|dim_model_base)", HIDDEN),
]  # fmt: skip
# Some classes cannot do without these.
_WHERE_NONE = {"head_dim": HEAD_DIM, "num_key_value_heads": KV_HEADS, "num_experts_per_tok": 2}
_PATTERNS = [(re.compile(pattern), small) for pattern, small in _SIZES]
_TOKEN = re.compile(r".*(token_ids?|token_index)$|^(im|image|slice)_.*_id$|.*newline_id$")
_LAYER_LIST = re.compile(r".*(layer|index|idx|block|moe).*")


# Changes the fields of the language model, given its default config: a window, another pattern of layers.
OfText = Callable[[dict[str, Any], PreTrainedConfig], dict[str, Any]]


@dataclass(frozen=True)
class Shrinking:
    """What is common to a config and those inside it."""

    text: PreTrainedConfig  # the default config of the language model
    of_text: OfText
    overrides: dict[str, dict[str, Any]]  # by the name of a config's class: fields that their names do not say
    free_tokens: Iterator[int]  # ids for special tokens, which would lie beyond the small vocabulary


def shrunk(
    default: PreTrainedConfig,
    of_text: OfText = lambda fields, _: fields,
    overrides: dict[str, dict[str, Any]] | None = None,
) -> PreTrainedConfig:
    """A tiny config of the same class. ``of_text`` may change the fields of its language model."""
    how = Shrinking(default.get_text_config(decoder=True), of_text, overrides or {}, count(VOCABULARY - 1, -1))
    return _shrunk(default, how)


def _shrunk(default: PreTrainedConfig, how: Shrinking) -> PreTrainedConfig:
    fields: dict[str, Any] = {}
    layers, usual = _Layers.of(default), _usual(type(default))
    for name, value in vars(default).items():
        if isinstance(value, PreTrainedConfig):
            fields[name] = _shrunk(value, how)
        elif name.startswith("_") or name in ("id2label", "label2id", "transformers_version", "dtype"):
            continue
        else:
            small = _small(name, value, default, layers, how)
            if small != usual.get(name, _USUAL_IS_UNKNOWN):
                fields[name] = small
    fields |= {name: value for name, value in layers.counts(default).items() if name not in fields or value}
    fields |= how.overrides.get(type(default).__name__, {})
    if default is how.text:
        fields = how.of_text(fields, default)
    try:
        return type(default)(**copy.deepcopy(fields))
    except AttributeError:  # some take the configs inside them as dicts alone
        inside = {name: value.to_dict() for name, value in fields.items() if isinstance(value, PreTrainedConfig)}
        return type(default)(**fields | inside)


def _small(name: str, value: Any, config: PreTrainedConfig, layers: _Layers, how: Shrinking) -> Any:
    if value is None:
        return _WHERE_NONE.get(name)
    if isinstance(value, (bool, str, float)):
        return value
    if _TOKEN.match(name):
        return _small_token(value, how)
    if isinstance(value, int):
        return _small_size(name, value, config)
    if isinstance(value, (list, tuple)):
        return layers.chosen_of(name, value)
    if name == "rope_parameters" and isinstance(value, dict):
        return _small_rope(value, config)
    return value


def _small_token(value: Any, how: Shrinking) -> Any:
    """Prompts hold ordinary tokens alone: those that mean something to the model are the vocabulary's last."""
    if isinstance(value, (list, tuple)):
        return type(value)(_small_token(each, how) for each in value)
    return next(how.free_tokens) if isinstance(value, int) and value >= 3 else value


def _small_size(name: str, value: int, config: PreTrainedConfig) -> int:
    for pattern, small in _PATTERNS:
        if pattern.fullmatch(name):
            if name == "num_kv_shared_layers" and value == _of(config, "num_hidden_layers"):
                small = FEWEST_LAYERS  # all of them
            if name == "head_dim" and _of(config, "qk_rope_head_dim"):
                # What RoPE is told: the part of the head that is rotated, or the whole, with a factor for the part.
                small = ROPE_DIM if value == _of(config, "qk_rope_head_dim") else 3 * ROPE_DIM
            if small == KV_HEADS and value > 1 and value == _of(config, "num_attention_heads"):
                small = HEADS  # each query head has its own
            return min(value, small)
    return value


def _small_rope(rope: dict[str, Any], config: PreTrainedConfig) -> dict[str, Any]:
    """Sections of a rotated head, and a factor for each pair of its dimensions, are as many as the head has now."""
    if rope and all(isinstance(each, dict) for each in rope.values()):
        return {kind: _small_rope(each, config) for kind, each in rope.items()}
    was = _of(config, "head_dim")
    now = min(was or 0, HEAD_DIM)
    if not was:
        was, now = (_of(config, "hidden_size") or HIDDEN) // (_of(config, "num_attention_heads") or 1), HIDDEN // HEADS
    small = dict(rope)
    if rope.get("rope_type") in ("yarn", "llama3") and rope.get("original_max_position_embeddings"):
        small["original_max_position_embeddings"] = 2 * WINDOW  # so that prompts pass it
    for name, value in rope.items():
        if name == "mrope_section":
            small[name] = _parts(value, max(len(value), sum(value) * now // was))
        elif name in ("short_factor", "long_factor") and isinstance(value, list):
            small[name] = value[: len(value) * now // was]
    return small


def _parts(section: list[int], total: int) -> list[int]:
    """``section`` in the same proportions, with this sum."""
    parts = [max(1, each * total // sum(section)) for each in section]
    parts[0] += total - sum(parts)
    return parts


@dataclass(frozen=True)
class _Layers:
    """Which layers of a config stay: at least one of each kind, the first and the last among them."""

    number: int
    kept: list[int]

    @classmethod
    def of(cls, config: PreTrainedConfig) -> _Layers:
        number = _of(config, "num_hidden_layers")
        if not isinstance(number, int) or number < 1:
            return cls(0, [])
        lists = {name: value for name, value in vars(config).items() if isinstance(value, (list, tuple))}
        kinds: list[tuple[Any, ...]] = [
            tuple(
                repr(value[layer]) if _one_each(name, value, number) else layer in value
                for name, value in lists.items()
                if (_one_each(name, value, number) and len(set(map(repr, value))) <= 6) or _numbers(name, value, number)
            )
            for layer in range(number)
        ]
        kept = {kinds.index(kind) for kind in dict.fromkeys(kinds)}
        kept = set(sorted(kept)[: MOST_LAYERS - 1]) | {number - 1}
        for layer in range(number):
            if len(kept) < min(FEWEST_LAYERS, number):
                kept.add(layer)
        return cls(number, sorted(kept))

    def chosen_of(self, name: str, value: Any) -> Any:
        if _one_each(name, value, self.number):
            several = [value[layer] for layer in self.kept]
            if value and list(value) == list(range(self.number)):
                several = list(range(len(self.kept)))
            elif all(isinstance(each, int) and not isinstance(each, bool) for each in value):
                several = [_small_size(name.removesuffix("_per_layer"), each, _NO_CONFIG) for each in several]
            return type(value)(several)
        if _numbers(name, value, self.number):
            return type(value)(self.kept.index(layer) for layer in value if layer in self.kept)
        return value

    def counts(self, config: PreTrainedConfig) -> dict[str, int]:
        """How many layers there are now, under the name that this class has for it."""
        if not self.number:
            return {}
        name = type(config).attribute_map.get("num_hidden_layers", "num_hidden_layers")
        return {name: len(self.kept)} if name in inspect.signature(type(config)).parameters else {}


_NO_CONFIG = PreTrainedConfig()
_USUAL_IS_UNKNOWN = object()


@functools.cache
def _usual(config_class: type[PreTrainedConfig]) -> dict[str, Any]:
    """What the fields are if nothing is said: inside another config they may be something else."""
    try:
        return vars(config_class())
    except Exception:
        return {}


def _of(config: PreTrainedConfig, name: str) -> Any:
    """A field, by its common name. Some configs let nobody read what differs between their layers, except here."""
    return vars(config).get(type(config).attribute_map.get(name, name))


def _one_each(name: str, value: Any, layers: int) -> bool:
    """A list with an entry for each layer."""
    return layers > 1 and len(value) == layers and name not in ("languages",)


def _numbers(name: str, value: Any, layers: int) -> bool:
    """A list of layers' numbers."""
    numbers = value and all(type(each) is int and 0 <= each < max(layers, 1) for each in value)
    return bool(numbers and _LAYER_LIST.match(name) and len(value) != layers and len(set(value)) == len(value))
