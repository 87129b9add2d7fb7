"""Text generation and evaluation on tasks."""

from typing import Literal

from neox_launcher.config.parameter import Section, param

__all__ = ["GenerationSection"]


class GenerationSection(Section, resume="free"):
    """Sampling, prompts and results."""

    text_gen_type: Literal["unconditional", "input-file", "interactive"] | None = param(
        None,
        origin="NeoX",
        none_means="input-file with sample_input_file, else unconditional with num_samples > 0, else "
        "interactive",
        doc="Where prompts come from.",
    )
    temperature: float = param(
        0.0, origin="NeoX", ge=0, doc="Logits are divided by it; 0 takes the likeliest token."
    )
    top_p: float = param(
        0.0,
        origin="NeoX",
        ge=0,
        le=1,
        doc="Sample from the likeliest tokens that together reach this; 0 is off.",
    )
    top_k: int = param(0, origin="NeoX", ge=0, doc="Sample from this many of the likeliest tokens; 0 is off.")
    maximum_tokens: int = param(64, origin="NeoX", gt=0, doc="Most tokens of one continuation.")
    sample_input_file: str | None = param(
        None, origin="NeoX", none_means="no file", doc="Text file with one prompt per line."
    )
    sample_output_file: str | None = param(
        None,
        origin="NeoX",
        none_means="the input's name with .output.jsonl, or stdout",
        doc="File for the results.",
    )
    num_samples: int = param(0, origin="NeoX", ge=0, doc="Texts to generate without a prompt.")
    recompute: bool = param(
        False,
        origin="NeoX",
        doc="Compute the whole text again for each token instead of keeping keys and values.",
    )
    eval_results_prefix: str = param(
        "", origin="NeoX", used_when="eval_tasks is set", doc="Start of the name of the results file."
    )
    eval_tasks: tuple[str, ...] | None = param(
        None, origin="NeoX", none_means="no tasks", doc="Tasks of lm-evaluation-harness."
    )
    char_level_ppl: bool = param(False, origin="NeoX", doc="Report perplexity per character, too.")
