"""What a config.json becomes, and every way in which it is refused."""

import pytest

from kvjax.errors import ModelError
from kvjax.models.config import FAMILIES, ModelConfig
from kvjax.models.rope import RopeConfig
from tests.models import configs


def read(family: str, **changes) -> ModelConfig:
    return ModelConfig.from_hf(configs.small(family, **changes))


def rope(family: str = "llama", **fields) -> RopeConfig:
    return read(family, rope_parameters={"rope_theta": 1e6} | fields).rope


def test_llama_31_8b():
    config = ModelConfig.from_hf(configs.LLAMA_31_8B)
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (32, 32, 8)
    assert (config.head_dim, config.group, config.scale) == (128, 4, 128**-0.5)
    assert (config.vocab_size, config.hidden_size) == (128256, 4096)
    assert (config.intermediate_size, config.context_length) == (14336, 131072)
    assert config.rope == RopeConfig(
        500000.0,
        "llama3",
        factor=8.0,
        original_context=8192,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )
    assert config.windows == (None,) * 32
    assert not (config.qkv_bias or config.out_bias or config.mlp_bias or config.qk_norm)
    assert not (config.tie_embeddings or config.sinks or config.num_experts)
    assert config.rms_norm_eps == 1e-5


def test_r1_distill_qwen():
    config = ModelConfig.from_hf(configs.R1_DISTILL_QWEN_1_5B)
    assert (config.head_dim, config.group) == (128, 6)
    assert (config.qkv_bias, config.out_bias, config.qk_norm) == (True, False, False)
    assert config.windows == (None,) * 28
    assert config.rope == RopeConfig(10000.0)


def test_qwen3_8b():
    config = ModelConfig.from_hf(configs.QWEN3_8B)
    assert (config.qkv_bias, config.out_bias, config.qk_norm) == (False, False, True)
    assert config.rope == RopeConfig(1e6)
    assert config.head_dim == 128


def test_gpt_oss_20b():
    config = ModelConfig.from_hf(configs.GPT_OSS_20B)
    assert config.windows == (128, None) * 12
    assert (config.qkv_bias, config.out_bias, config.mlp_bias, config.sinks) == (True,) * 4
    assert (config.num_experts, config.experts_per_token) == (32, 4)
    assert (config.swiglu_limit, config.swiglu_alpha) == (7.0, 1.702)
    assert config.rope == RopeConfig(
        150000.0, "yarn", factor=32.0, original_context=4096, truncate=False
    )


def test_equal_configs_are_equal_keys():
    configs_by_key = {read("qwen3"): 1, read("qwen3"): 2, read("qwen3", vocab_size=65): 3}
    assert len(configs_by_key) == 2


def test_llama_defaults():
    config = read("llama", num_key_value_heads=..., hidden_act=None, head_dim=None)
    assert (config.num_kv_heads, config.head_dim) == (4, 8)
    assert config.rope == RopeConfig(10000.0)
    assert read("llama", attention_bias=True).out_bias
    assert read("llama", mlp_bias=True).mlp_bias


def test_gpt_oss_defaults():
    config = read("gpt_oss")
    assert config.windows == (8, None, 8, None)
    assert config.rope == RopeConfig(
        150000.0, "yarn", factor=32.0, original_context=4096, truncate=False
    )
    assert not read("gpt_oss", attention_bias=False).qkv_bias
    assert read("gpt_oss", swiglu_limit=1, swiglu_alpha=2).swiglu_alpha == 2.0


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_qwen_windows(family):
    on = {"use_sliding_window": True, "sliding_window": 16}
    assert read(family, max_window_layers=1, **on).windows == (None, 16, 16, 16)
    assert read(family, max_window_layers=9, **on).windows == (None,) * 4
    kinds = ["sliding_attention", "full_attention"] * 2
    assert read(family, layer_types=kinds, **on).windows == (16, None, 16, None)
    assert read(family, sliding_window=16, max_window_layers=1).windows == (None,) * 4
    assert read(family, layer_types=["full_attention"] * 4).windows == (None,) * 4


def test_old_and_new_rope_spellings_agree():
    rest = {"factor": 4.0, "original_max_position_embeddings": 32}
    scaling = rest | {"rope_type": "yarn"}
    old = read("qwen3", rope_theta=1e6, rope_scaling=scaling)
    older = read("qwen3", rope_theta=1e6, rope_scaling=rest | {"type": "yarn"})
    new = read("qwen3", rope_parameters=scaling | {"rope_theta": 1e6})
    both = read("qwen3", rope_parameters=scaling, rope_scaling=scaling, rope_theta=1e6)
    assert old == older == new == both
    assert old.rope == RopeConfig(1e6, "yarn", factor=4.0, original_context=32)


def test_rope_parameters_are_read():
    assert rope(rope_type="linear", factor=3) == RopeConfig(1e6, "linear", factor=3.0)
    assert rope(rope_type="yarn", factor=2.0).original_context == 128  # max_position_embeddings
    yarn = {
        "beta_fast": 8.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 0.0,
        "attention_factor": 1.1,
        "truncate": False,
    }
    read_back = rope(rope_type="yarn", factor=2.0, original_max_position_embeddings=64, **yarn)
    assert read_back == RopeConfig(1e6, "yarn", factor=2.0, original_context=64, **yarn)
    assert read("llama", rope_theta=7.0).rope.theta == 7.0
    outside = {"rope_type": "yarn", "factor": 2.0}
    moved = read("llama", rope_scaling=outside, original_max_position_embeddings=64)
    assert moved.rope.original_context == 64


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("kind", ["yarn", "linear"])
@pytest.mark.parametrize(
    ("old", "factor", "context"),
    [(128, 4.0, 512), (32, 4.0, 128), (16, 4.0, 128), (64, 2.6, 166), (128, 1e308, 2**31 - 1)],
)
def test_the_context_is_what_it_is_stretched_to(family, kind, old, factor, context):
    """Qwen's way leaves max_position_embeddings, here 128, as it was before the stretch."""
    scaling = {"rope_type": kind, "factor": factor}
    inner = read(family, rope_scaling=scaling | {"original_max_position_embeddings": old})
    outer = read(family, rope_scaling=scaling, original_max_position_embeddings=old)
    assert inner.context_length == context and inner == outer


@pytest.mark.parametrize("kind", ["yarn", "linear"])
def test_a_stretch_of_nothing_named_leaves_the_context(kind):
    """The length may be the stretched one already."""
    assert read("qwen2", rope_scaling={"type": kind, "factor": 4.0}).context_length == 128
    assert read("gpt_oss").context_length == 128


def test_llama3s_factor_is_no_context():
    """Llama 3.2: 32 times 8192 is more than it was trained for."""
    scaling = _LLAMA3 | {"rope_type": "llama3", "factor": 32.0}
    scaling["original_max_position_embeddings"] = 8192
    small = read("llama", rope_scaling=scaling, max_position_embeddings=131072)
    assert small.context_length == 131072


_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
_YARN = {"rope_type": "yarn", "factor": 2.0}
REFUSED_ROPE = [
    ({"rope_type": "dynamic", "factor": 2.0}, "rope_parameters.rope_type", "dynamic"),
    ({"type": "longrope"}, "rope_parameters.type", "longrope"),
    ({"rope_type": "mrope", "mrope_section": [1]}, "rope_parameters.rope_type", "mrope"),
    ({"rope_type": ["yarn"]}, "rope_parameters.rope_type", "yarn"),
    ({"rope_type": "default", "factor": 2.0}, "rope_parameters.factor", "default"),
    ({"rope_type": "linear"}, "rope_parameters.factor", "lacks"),
    ({"rope_type": "linear", "factor": "2"}, "rope_parameters.factor", "'2'"),
    ({"rope_type": "linear", "factor": 0}, "rope_parameters.factor", "got 0"),
    (
        {"rope_type": "linear", "factor": 2.0, "truncate": True},
        "rope_parameters.truncate",
        "linear",
    ),
    (_LLAMA3 | {"low_freq_factor": None}, "rope_parameters.low_freq_factor", "lacks"),
    (_LLAMA3 | {"high_freq_factor": 1.0}, "rope_parameters.high_freq_factor", "1.0"),
    (_YARN | {"truncate": 1}, "rope_parameters.truncate", "got 1"),
    (_YARN | {"beta_fast": -1}, "rope_parameters.beta_fast", "-1"),
    (_YARN | {"beta_slow": True}, "rope_parameters.beta_slow", "True"),
    (_YARN | {"mscale": float("nan")}, "rope_parameters.mscale", "nan"),
    (_YARN | {"attention_factor": 10**400}, "rope_parameters.attention_factor", "finite"),
    (_YARN | {"original_max_position_embeddings": 0.5}, "original_max_position_embeddings", "0.5"),
    (_YARN | {"short_factor": [1.0]}, "rope_parameters.short_factor", "yarn"),
    ({"partial_rotary_factor": 0.5}, "rope_parameters.partial_rotary_factor", "0.5"),
    ({"rope_theta": "1e4"}, "rope_parameters.rope_theta", "'1e4'"),
    ({"rope_theta": 1.0}, "rope_theta", "1.0"),
    ({"rope_theta": 5.0}, "rope_parameters.rope_theta", "contradict"),
    ({"full_attention": {"rope_theta": 5.0}}, "rope_parameters.full_attention", "not supported"),
    ([1.0], "rope_parameters", "[1.0]"),
    ("yarn", "rope_parameters", "'yarn'"),
]


@pytest.mark.parametrize(("parameters", "field", "detail"), REFUSED_ROPE)
def test_refused_rope(parameters, field, detail):
    outer = {"rope_theta": 7.0} if detail == "contradict" else {}
    with pytest.raises(ModelError) as error:
        read("llama", rope_parameters=parameters, **outer)
    assert field in str(error.value) and detail in str(error.value)


def test_two_different_scalings_are_refused():
    with pytest.raises(ModelError, match=r"rope_parameters.*rope_scaling.*contradict"):
        read("llama", rope_parameters=_YARN, rope_scaling={"type": "linear", "factor": 2.0})


_SLIDING = ["sliding_attention", "full_attention"] * 2
REFUSED = [
    ("llama", {"hidden_act": "gelu"}, "gelu"),
    ("gpt_oss", {"hidden_act": "gelu"}, "gelu"),
    ("llama", {"partial_rotary_factor": 0.25}, "0.25"),
    ("qwen2", {"is_causal": False}, "False"),
    ("llama", {"per_layer_config": {"0": {"num_attention_heads": 2}}}, "leaving it out"),
    ("llama", {"sliding_window": 16}, "16"),
    ("llama", {"use_sliding_window": True}, "True"),
    ("llama", {"layer_types": _SLIDING}, "sliding_attention"),
    ("qwen2", {"layer_types": _SLIDING}, "use_sliding_window"),
    ("qwen3", {"layer_types": _SLIDING, "sliding_window": 8}, "use_sliding_window"),
    ("qwen2", {"layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
    ("qwen3", {"layer_types": ["full_attention"] * 3}, "num_hidden_layers"),
    ("qwen3", {"layer_types": "full_attention"}, "'full_attention'"),
    ("gpt_oss", {"layer_types": [None] * 4}, "None"),
    ("gpt_oss", {"sliding_window": None}, "lacks"),
    ("qwen2", {"attention_bias": False}, "False"),
    ("qwen2", {"mlp_bias": True}, "True"),
    ("qwen3", {"mlp_bias": True}, "True"),
    ("llama", {"mlp_bias": "yes"}, "'yes'"),
    ("llama", {"attention_bias": 1}, "got 1"),
    ("llama", {"tie_word_embeddings": 0}, "got 0"),
    ("llama", {"quantization_config": {"quant_method": "gptq"}}, "gptq"),
    ("llama", {"quantization_config": {"quant_method": "mxfp4"}}, "llama"),
    ("gpt_oss", {"quantization_config": {"quant_method": "fp8"}}, "fp8"),
    ("gpt_oss", {"quantization_config": "mxfp4"}, "'mxfp4'"),
    ("qwen2", {"compression_config": {"format": "int"}}, "int"),
    ("qwen2", {"use_mrope": True}, "True"),
    ("llama", {"head_dim": 7}, "even"),
    ("llama", {"head_dim": 0}, "got 0"),
    ("llama", {"hidden_size": 34}, "34"),
    ("llama", {"num_key_value_heads": 3}, "num_attention_heads"),
    ("llama", {"num_key_value_heads": "2"}, "'2'"),
    ("llama", {"vocab_size": 64.0}, "64.0"),
    ("llama", {"num_hidden_layers": True}, "True"),
    ("llama", {"num_hidden_layers": -1}, "-1"),
    ("llama", {"rms_norm_eps": "1e-5"}, "'1e-5'"),
    ("llama", {"rms_norm_eps": float("inf")}, "inf"),
    ("gpt_oss", {"num_experts_per_tok": 5}, "num_local_experts"),
    ("gpt_oss", {"swiglu_limit": -7.0}, "-7.0"),
    ("gpt_oss", {"swiglu_alpha": "big"}, "'big'"),
]


@pytest.mark.parametrize(("family", "changes", "detail"), REFUSED)
def test_refused(family, changes, detail):
    with pytest.raises(ModelError) as error:
        read(family, **changes)
    assert f"`{next(iter(changes))}" in str(error.value)
    assert detail in str(error.value)
    assert error.value.exit_code == 3


_ALWAYS = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "rms_norm_eps",
    "max_position_embeddings",
]
_MISSING = {
    "llama": _ALWAYS,
    "qwen2": [*_ALWAYS, "num_key_value_heads"],
    "qwen3": [*_ALWAYS, "num_key_value_heads", "head_dim"],
    "gpt_oss": [
        *_ALWAYS,
        "num_key_value_heads",
        "head_dim",
        "num_local_experts",
        "num_experts_per_tok",
        "sliding_window",
    ],
}


@pytest.mark.parametrize(
    ("family", "name"), [(f, n) for f, names in _MISSING.items() for n in names]
)
@pytest.mark.parametrize("absent", [None, ...], ids=["null", "missing"])
def test_missing_fields_are_named(family, name, absent):
    with pytest.raises(ModelError, match=f"lacks `{name}`"):
        read(family, **{name: absent})


@pytest.mark.parametrize("name", ["sliding_window", "max_window_layers"])
def test_a_window_needs_its_fields(name):
    fields = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, name: ...}
    with pytest.raises(ModelError, match=f"lacks `{name}`"):
        read("qwen2", **fields)


@pytest.mark.parametrize("family", ["mistral", "qwen3_moe", None, 3])
def test_unknown_families_are_refused(family):
    with pytest.raises(ModelError, match="model_type") as error:
        ModelConfig.from_hf(configs.small("llama") | {"model_type": family})
    assert family is None or all(name in str(error.value) for name in FAMILIES)


@pytest.mark.parametrize("config", [[], None, "llama"])
def test_a_config_that_is_no_object_is_refused(config):
    with pytest.raises(ModelError, match="JSON object"):
        ModelConfig.from_hf(config)


def test_a_damaged_layer_count_is_refused_at_once():
    with pytest.raises(ModelError, match=r"num_hidden_layers.*4096"):
        ModelConfig.from_hf(configs.small("llama", num_hidden_layers=10**7))
