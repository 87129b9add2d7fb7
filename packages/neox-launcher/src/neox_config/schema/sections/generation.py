"""Text generation and evaluation on tasks."""

from typing import Literal

from neox_config.schema.parameter import Section, param
from neox_config.schema.paths import PathText

__all__ = ["GenerationSection"]


class GenerationSection(Section, resume="free"):
    """Text generation: prompts, sampling and output."""

    text_gen_type: Literal["unconditional", "input-file", "interactive"] | None = param(
        None,
        origin="NeoX",
        none_means="input-file if sample_input_file is set, else unconditional if num_samples > 0, else "
        "interactive",
        doc="Source of the prompts, unless prompt is set.",
    )
    prompt: str | None = param(
        None,
        origin="ours",
        none_means="the prompts of text_gen_type",
        may_have_lines=True,
        doc="Text to continue; num_samples is then the number of its continuations. Same as neox-launch "
        "generate --prompt TEXT.",
    )
    temperature: float = param(
        0.0, origin="NeoX", ge=0, doc="Sampling temperature; 0 selects the most likely token."
    )
    top_p: float = param(
        0.0,
        origin="NeoX",
        ge=0,
        le=1,
        used_when="temperature is not 0",
        doc="Sample from the most likely tokens whose probabilities add up to this (nucleus sampling); 0 "
        "disables it.",
    )
    top_k: int = param(
        0,
        origin="NeoX",
        ge=0,
        used_when="temperature is not 0",
        doc="Sample from this many of the most likely tokens; 0 disables it.",
    )
    repetition_penalty: float = param(
        1.0,
        origin="ours",
        gt=0,
        doc="Divisor of the positive logits, and factor of the negative ones, of tokens in the prompt or the "
        "text; 1 disables it. It is applied before the temperature.",
    )
    stop_strings: tuple[str, ...] = param(
        (), origin="ours", doc="A generated text ends before the first of these strings."
    )
    stop_tokens: tuple[int, ...] = param(
        (),
        origin="ours",
        doc="Ids of tokens that end a generated text, as end-of-document does. `neox-convert from-hf` sets "
        "those of generation_config.json.",
    )
    sampling_seed: int | None = param(
        None,
        origin="ours",
        ge=0,
        none_means="the value of seed",
        doc="Random seed of the sampled tokens. A text depends on it and on the text's number, not on the "
        "number of processes or the batch.",
    )
    generation_batch_size: int = param(
        16,
        origin="ours",
        gt=0,
        doc="Maximum number of texts that a copy of the model generates together. Each stores its keys and "
        "values.",
    )
    interactive_history: bool = param(
        True,
        origin="ours",
        doc="In an interactive session each prompt continues the conversation; false: each prompt is a text "
        "by itself.",
    )
    maximum_tokens: int = param(
        64, origin="NeoX", gt=0, doc="Maximum number of tokens to generate per prompt."
    )
    return_logits: bool = param(
        False,
        origin="NeoX",
        doc="Add `logits` to the results: for each token of the text a row with one logit per entry of the "
        "tokenizer, before penalty and temperature.",
    )
    prompt_end: str = param(
        "\n",
        origin="NeoX",
        min_length=1,
        may_have_lines=True,
        doc="String that ends each prompt of sample-input-file and of an interactive session. With one that "
        "is not a newline, prompts may have several lines.",
    )
    sample_input_file: PathText | None = param(
        None, origin="NeoX", none_means="no file", doc="Text file with one prompt per line (see prompt-end)."
    )
    sample_output_file: PathText | None = param(
        None,
        origin="NeoX",
        none_means="the name of the input file with .output.jsonl, or stdout without an input file",
        doc="Output file for the results.",
    )
    num_samples: int = param(
        0,
        origin="NeoX",
        ge=0,
        doc="Number of texts to generate without a prompt, or of continuations of prompt.",
    )
    recompute: bool = param(
        False,
        origin="NeoX",
        doc="Recompute the whole sequence for each token instead of caching keys and values.",
    )
    eval_results_prefix: PathText = param(
        "",
        origin="NeoX",
        used_when="eval_tasks or eval_data is set",
        doc="Beginning of the name of the results file, with its folder: "
        "PREFIX_eval_results_yy-mm-dd-HH-MM.json; empty: eval_results_... in the working directory. No file "
        "is replaced, and the log names the new one with its path. Evaluations during training write a file "
        "only if it is set; neox-launch evaluate always writes one.",
    )
    eval_tasks: tuple[str, ...] | None = param(
        None,
        origin="NeoX",
        none_means="no tasks",
        doc="Tasks of lm-evaluation-harness to evaluate, by neox-launch evaluate and every eval_interval "
        "iterations of a run: names of tasks, groups or tags, and patterns of names of tasks (mmlu_*). "
        "Requires pip install 'neox-model[eval]'.",
    )
    eval_include_path: PathText | None = param(
        None,
        origin="ours",
        none_means="only tasks of the harness",
        used_when="eval_tasks is set",
        doc="Folder with further tasks for eval_tasks. The harness runs Python functions that they name.",
    )
    eval_num_fewshot: int | None = param(
        None,
        origin="ours",
        ge=0,
        none_means="as each task declares",
        used_when="eval_tasks is set",
        doc="Number of examples before each question of a task.",
    )
    eval_limit: int | None = param(
        None,
        origin="ours",
        gt=0,
        none_means="all",
        used_when="eval_tasks or eval_data is set",
        doc="Maximum number of questions of each task, and of documents of eval_data.",
    )
    eval_data: PathText | None = param(
        None,
        origin="ours",
        none_means="no further data",
        doc="Texts whose perplexity and bits per byte are computed, by neox-launch evaluate and every "
        "eval_interval iterations of a run: the prefix of an indexed dataset, or a file, folder or "
        "pattern that preprocess_data reads.",
    )
    char_level_ppl: bool = param(
        False,
        origin="NeoX",
        doc="Also report the perplexity per character, exp(loss x tokens / characters), of evaluations.",
    )
