"""The classes of transformers that can be converted; `neox_model/convert/families` has their tables."""

from collections.abc import Mapping
from typing import Literal

__all__ = ["CLASSES", "HfFamily"]

HfFamily = Literal[
    "gpt_neox",
    "gpt2",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "olmo2",
    "olmo3",
    "gemma2",
    "gemma3_text",
    "smollm3",
    "phi3",
    "opt",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
    "gpt_oss",
]
CLASSES: Mapping[str, str] = {
    "gpt_neox": "GPTNeoXForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "opt": "OPTForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
}
"""`model_type` -> name of the class, the first that fits being the one that is written."""
