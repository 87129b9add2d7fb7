"""Five tasks of lm-evaluation-harness on local data, and a model of transformers of a size for tests."""

import json
import random
from pathlib import Path
from typing import Any

__all__ = ["MODEL", "OFFLINE", "TASKS", "write_tasks"]

TASKS = ("local_choices", "local_choices_fewshot", "local_cloze", "local_stories", "local_answers")
# The tests' own choice: nothing is looked up in a network.
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
# For `support.hf_models.write_model` of the family "llama".
MODEL: dict[str, Any] = {
    "hidden_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 96,
    "vocab_size": 288,
}
_WORDS = "def return import settings folder tokenizer random choice value model layer for in if None".split()


def write_tasks(folder: Path) -> Path:
    """Write the tasks `TASKS` and their data. Returns the folder, for `--include-path`."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(5)

    def words(count: int) -> str:
        return " ".join(draw.choice(_WORDS) for _ in range(count))

    choices = [
        {
            "question": words(draw.randint(1, 9)),
            "choices": [words(draw.randint(1, 4)) for _ in range(3)],
            "answer": draw.randrange(3),
        }
        for _ in range(17)
    ]
    # One text is longer than the model's input, and one is empty of words that occur in training.
    stories = [{"text": words(count)} for count in (3, 40, 1, 150, 12, 77, 5)] + [{"text": "été 你好 🙂"}]
    cloze = [{"text": words(draw.randint(2, 8)), "last": draw.choice(_WORDS)} for _ in range(15)]
    answers = [{"question": words(draw.randint(1, 6)), "answer": draw.choice(_WORDS)} for _ in range(11)]
    for name, rows in {"choices": choices, "stories": stories, "cloze": cloze, "answers": answers}.items():
        for split, part in {"test": rows, "train": [dict(row) for row in rows[::-1]]}.items():
            lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in part)
            (folder / f"{name}_{split}.jsonl").write_text(lines, encoding="utf-8")
    for name, settings in _tasks(folder).items():
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **settings}))
    return folder


def _tasks(folder: Path) -> dict[str, dict[str, Any]]:
    choices = _data(folder, "choices") | {
        "output_type": "multiple_choice",
        "doc_to_text": "Q: {{question}}\nA:",
        "doc_to_target": "answer",
        "doc_to_choice": "choices",
        "metric_list": _metrics("acc", "acc_norm"),
    }
    return {
        "local_choices": choices | {"num_fewshot": 0},
        "local_choices_fewshot": choices | {"num_fewshot": 2},
        "local_cloze": _data(folder, "cloze")
        | {
            "output_type": "loglikelihood",
            "doc_to_text": "{{text}}",
            "doc_to_target": " {{last}}",
            "metric_list": _metrics("acc", "perplexity"),
        },
        "local_stories": _data(folder, "stories")
        | {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": _metrics("word_perplexity", "byte_perplexity", "bits_per_byte"),
        },
        "local_answers": _data(folder, "answers")
        | {
            "output_type": "generate_until",
            "num_fewshot": 1,
            "doc_to_text": "Q: {{question}}\nA:",
            "doc_to_target": " {{answer}}",
            "generation_kwargs": {"until": ["\n", "e"], "max_gen_toks": 8, "do_sample": False},
            "metric_list": _metrics("exact_match"),
        },
    }


def _data(folder: Path, name: str) -> dict[str, Any]:
    files = {split: str(folder / f"{name}_{split}.jsonl") for split in ("train", "test")}
    return {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": files},
        "test_split": "test",
        "fewshot_split": "train",
        "metadata": {"version": 1.0},
    }


def _metrics(*names: str) -> list[dict[str, Any]]:
    weighted = {"word_perplexity", "byte_perplexity", "bits_per_byte"}
    return [
        {"metric": name} if name in weighted | {"perplexity"} else {"metric": name, "aggregation": "mean"}
        for name in names
    ]
