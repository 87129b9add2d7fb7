"""Facts about published weights, in addition to the parameters of their architecture.

Sources: the models' config.json and the totals of their safetensors files; arXiv:2304.01373 and the model
cards of Pythia; arXiv:2204.06745.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from neox_config.facts.tokenizers import TOKENIZER_FACTS

__all__ = ["PUBLISHED", "Published"]


@dataclass(frozen=True, slots=True)
class Published:
    """Published weights of a model.

    Args:
        family: the models that it was published with.
        rows: rows of the token embedding, including padding.
        parameters: number of parameters; tied weights count once.
        licence: licence of the weights; an SPDX identifier where there is one.
        active: number of parameters that a token uses; None: all of them.
    """

    family: str
    rows: int
    parameters: int
    licence: str
    active: int | None = None

    @property
    def used(self) -> int:
        """Number of parameters that a token uses."""
        return self.parameters if self.active is None else self.active


_APACHE = "Apache-2.0"
_GPT2_ROWS = TOKENIZER_FACTS["GPT2BPETokenizer"].usual_entries

PUBLISHED: Mapping[str, Published] = {
    "gpt-neox-20b": Published("GPT-NeoX", 50432, 20_554_567_680, _APACHE),
    "pythia-14m": Published("Pythia", 50304, 14_067_712, _APACHE),
    "pythia-31m": Published("Pythia", 50304, 30_494_720, _APACHE),
    "pythia-70m": Published("Pythia", 50304, 70_426_624, _APACHE),
    "pythia-160m": Published("Pythia", 50304, 162_322_944, _APACHE),
    "pythia-410m": Published("Pythia", 50304, 405_334_016, _APACHE),
    "pythia-1b": Published("Pythia", 50304, 1_011_781_632, _APACHE),
    "pythia-1.4b": Published("Pythia", 50304, 1_414_647_808, _APACHE),
    "pythia-2.8b": Published("Pythia", 50304, 2_775_208_960, _APACHE),
    "pythia-6.9b": Published("Pythia", 50432, 6_857_302_016, _APACHE),
    "pythia-12b": Published("Pythia", 50688, 11_846_072_320, _APACHE),
    "gpt2": Published("GPT-2", _GPT2_ROWS, 124_439_808, "MIT"),
    "gpt2-medium": Published("GPT-2", _GPT2_ROWS, 354_823_168, "MIT"),
    "gpt2-large": Published("GPT-2", _GPT2_ROWS, 774_030_080, "MIT"),
    "gpt2-xl": Published("GPT-2", _GPT2_ROWS, 1_557_611_200, "MIT"),
    "llama-2-7b": Published("Llama 2", 32000, 6_738_415_616, "Llama 2"),
    "llama-2-13b": Published("Llama 2", 32000, 13_015_864_320, "Llama 2"),
    "llama-2-70b": Published("Llama 2", 32000, 68_976_648_192, "Llama 2"),
    "llama-3-8b": Published("Llama 3", 128256, 8_030_261_248, "Llama 3"),
    "llama-3-70b": Published("Llama 3", 128256, 70_553_706_496, "Llama 3"),
    "llama-3.1-8b": Published("Llama 3.1", 128256, 8_030_261_248, "Llama 3.1"),
    "llama-3.1-70b": Published("Llama 3.1", 128256, 70_553_706_496, "Llama 3.1"),
    "llama-3.2-1b": Published("Llama 3.2", 128256, 1_235_814_400, "Llama 3.2"),
    "llama-3.2-3b": Published("Llama 3.2", 128256, 3_212_749_824, "Llama 3.2"),
    "mistral-7b-v0.1": Published("Mistral", 32000, 7_241_732_096, _APACHE),
    "mistral-7b-v0.3": Published("Mistral", 32768, 7_248_023_552, _APACHE),
    "qwen2-0.5b": Published("Qwen2", 151936, 494_032_768, _APACHE),
    "qwen2-1.5b": Published("Qwen2", 151936, 1_543_714_304, _APACHE),
    "qwen2-7b": Published("Qwen2", 152064, 7_615_616_512, _APACHE),
    "qwen2-72b": Published("Qwen2", 152064, 72_706_203_648, "Tongyi Qianwen"),
    "qwen3-0.6b": Published("Qwen3", 151936, 596_049_920, _APACHE),
    "qwen3-1.7b": Published("Qwen3", 151936, 1_720_574_976, _APACHE),
    "qwen3-4b": Published("Qwen3", 151936, 4_022_468_096, _APACHE),
    "qwen3-8b": Published("Qwen3", 151936, 8_190_735_360, _APACHE),
    "qwen3-14b": Published("Qwen3", 151936, 14_768_307_200, _APACHE),
    "qwen3-32b": Published("Qwen3", 151936, 32_762_123_264, _APACHE),
    "olmo-2-1b": Published("OLMo 2", 100352, 1_484_916_736, _APACHE),
    "olmo-2-7b": Published("OLMo 2", 100352, 7_298_617_344, _APACHE),
    "olmo-2-13b": Published("OLMo 2", 100352, 13_716_198_400, _APACHE),
    "olmo-2-32b": Published("OLMo 2", 100352, 32_234_279_936, _APACHE),
    "olmo-3-7b": Published("OLMo 3", 100278, 7_298_011_136, _APACHE),
    "olmo-3-32b": Published("OLMo 3", 100278, 32_233_522_176, _APACHE),
    "gemma-2-2b": Published("Gemma 2", 256000, 2_614_341_888, "Gemma"),
    "gemma-2-9b": Published("Gemma 2", 256000, 9_241_705_984, "Gemma"),
    "gemma-2-27b": Published("Gemma 2", 256000, 27_227_128_320, "Gemma"),
    "gemma-3-270m": Published("Gemma 3", 262144, 268_098_176, "Gemma"),
    "gemma-3-1b": Published("Gemma 3", 262144, 999_885_952, "Gemma"),
    "smollm3-3b": Published("SmolLM3", 128256, 3_075_098_624, _APACHE),
    "phi-3-mini-4k": Published("Phi-3", 32064, 3_821_079_552, "MIT"),
    "phi-3-medium-4k": Published("Phi-3", 32064, 13_960_238_080, "MIT"),
    "phi-4": Published("Phi-4", 100352, 14_659_507_200, "MIT"),
    "opt-125m": Published("OPT", 50272, 125_239_296, "OPT"),
    "opt-1.3b": Published("OPT", 50272, 1_315_758_080, "OPT"),
    "opt-2.7b": Published("OPT", 50272, 2_651_596_800, "OPT"),
    "opt-6.7b": Published("OPT", 50272, 6_658_473_984, "OPT"),
    "opt-13b": Published("OPT", 50272, 12_853_473_280, "OPT"),
    "opt-30b": Published("OPT", 50272, 29_974_540_288, "OPT"),
    "gpt-oss-20b": Published("gpt-oss", 201088, 20_914_757_184, _APACHE, 4_187_440_704),
    "gpt-oss-120b": Published("gpt-oss", 201088, 116_829_156_672, _APACHE, 5_711_982_912),
    "mixtral-8x7b-v0.1": Published("Mixtral", 32000, 46_702_792_704, _APACHE, 12_879_925_248),
    "mixtral-8x22b-v0.1": Published("Mixtral", 32000, 140_620_634_112, _APACHE, 39_152_031_744),
    "olmoe-1b-7b": Published("OLMoE", 50304, 6_919_161_856, _APACHE, 1_282_017_280),
    "qwen1.5-moe-a2.7b": Published("Qwen1.5 MoE", 151936, 14_315_784_192, "Tongyi Qianwen", 2_689_173_504),
    "qwen3-30b-a3b": Published("Qwen3 MoE", 151936, 30_532_122_624, _APACHE, 3_353_032_704),
    "qwen3-235b-a22b": Published("Qwen3 MoE", 151936, 235_093_634_560, _APACHE, 22_190_763_520),
}
"""By name, which is that of the file of the architecture."""
