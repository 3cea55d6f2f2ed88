"""Write the rotary frequencies that transformers computes for the configs of published models.

    python tests/golden/make_rope.py

``rope.json`` gets a list of cases: ``config`` (the fields that matter), ``inverse_frequencies``
(float32, exact in decimal) and ``attention_factor``.
"""

import json
import pathlib

from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

_LLAMA31 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_GPT_OSS = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_QWEN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
_MSCALE = _QWEN | {"factor": 40, "mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 16}
CASES = [
    ("llama", 64, 8192, 1e5, None),
    ("llama", 128, 131072, 5e5, _LLAMA31),
    ("llama", 64, 131072, 5e5, _LLAMA31 | {"factor": 32.0}),
    ("llama", 80, 4096, 1e4, {"type": "linear", "factor": 4.0}),
    ("qwen2", 128, 131072, 1e6, _QWEN),
    ("qwen2", 128, 131072, 1e6, _QWEN | {"attention_factor": 0.8}),
    ("qwen3", 128, 40960, 1e6, _MSCALE),
    ("qwen3", 128, 40960, 1e6, None),
    ("gpt_oss", 64, 131072, 150000, _GPT_OSS),
]


def main() -> None:
    cases = []
    for family, head_dim, context, theta, scaling in CASES:
        fields = {
            "model_type": family,
            "hidden_size": 8 * head_dim,
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "head_dim": head_dim,
            "max_position_embeddings": context,
            "rope_theta": theta,
            "rope_scaling": scaling,
        }
        kwargs = {key: dict(v) if isinstance(v, dict) else v for key, v in fields.items()}
        config = AutoConfig.for_model(kwargs.pop("model_type"), **kwargs)
        kind = config.rope_parameters["rope_type"]
        default = LlamaRotaryEmbedding.compute_default_rope_parameters
        frequencies, factor = ROPE_INIT_FUNCTIONS.get(kind, default)(config)
        cases.append(
            {
                "config": fields,
                "inverse_frequencies": frequencies.tolist(),
                "attention_factor": factor,
            }
        )
    path = pathlib.Path(__file__).parent / "rope.json"
    path.write_text(json.dumps(cases, indent=1) + "\n")


if __name__ == "__main__":
    main()
