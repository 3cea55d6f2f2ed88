"""The ``config.json`` of every golden model: each family, each switch that changes the result."""

_SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "hidden_act": "silu",
}
_LLAMA = _SMALL | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
_QWEN2 = _SMALL | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
_QWEN3 = _SMALL | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
_GPT_OSS = _SMALL | {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"]}

SPECS = {
    "llama": _LLAMA
    | {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    },
    "llama_llama3": _LLAMA
    | {
        "hidden_size": 36,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "rope_theta": 500.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "llama_linear": _LLAMA
    | {
        "num_attention_heads": 4,
        "tie_word_embeddings": False,
        "rope_theta": 1000.0,
        "rope_scaling": {"type": "linear", "factor": 2.5},
    },
    "llama_yarn": _LLAMA
    | {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 24,
        "attention_bias": True,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 5000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 1.5,
            "beta_slow": 0.5,
            "mscale": 3.0,
            "mscale_all_dim": 1.0,
        },
    },
    "qwen2": _QWEN2
    | {
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
        "rope_theta": 1000000.0,
        "use_sliding_window": False,
        "sliding_window": 8,
        "max_window_layers": 1,
    },
    "qwen2_window": _QWEN2
    | {
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 8,
        "tie_word_embeddings": False,
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 1,
        "rope_theta": 1000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "attention_factor": 1.4,
        },
    },
    "qwen3": _QWEN3
    | {
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
    "qwen3_window": _QWEN3
    | {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "attention_bias": True,
        "tie_word_embeddings": False,
        "use_sliding_window": True,
        "sliding_window": 12,
        "max_window_layers": 28,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 2.0,
            "original_max_position_embeddings": 64,
        },
    },
    "gpt_oss": _GPT_OSS
    | {
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 24,
        "sliding_window": 8,
        "swiglu_limit": 1.5,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "rope_theta": 500.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
    },
    "gpt_oss_plain": _GPT_OSS
    | {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "intermediate_size": 16,
        "sliding_window": 16,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "tie_word_embeddings": True,
        "attention_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "gpt_oss_mxfp4": _GPT_OSS
    | {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_local_experts": 3,
        "num_experts_per_tok": 1,
        "intermediate_size": 64,
        "sliding_window": 8,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "quantization_config": {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        },
    },
}
