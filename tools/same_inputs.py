"""Write what the cases of tools/test_same.py read: texts, models of transformers, checkpoints of GPT-NeoX.

tools/test_same.py runs it as a program, with tests in PYTHONPATH; it imports none of our packages.
"""

import gzip
import json
import random
import sys
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from support import hf_models, neox_checkpoints

SEEDS = (1, 2)


def main(folder: Path) -> None:
    """Write all inputs."""
    _write_texts(folder)
    for family in hf_models.FAMILIES:
        kinds = {"plain": hf_models.plain_settings(family)}
        kinds |= {f"{seed}": hf_models.random_settings(family, seed) for seed in SEEDS}
        for seed, (kind, settings) in enumerate(kinds.items()):
            hf_models.write_model(folder / "hf" / f"{family}-{kind}", family, settings, seed=seed)
    for kind in ("pythia", "gpt2", "llama"):
        for ranks in (1, 2):
            source = getattr(neox_checkpoints, kind)()
            neox_checkpoints.write_neox(folder / "neox" / f"{kind}-{ranks}", source, ranks=ranks)


def _write_texts(folder: Path) -> None:
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnop", k=draw.randint(1, 9))) for _ in range(300)]

    def text(length: int) -> str:
        return " ".join(draw.choices(words, k=length)) + draw.choice([".", "\n\n", " \u00e9\u4e2d\U0001f600"])

    # Walks through the letters, which a model can learn.
    walks = []
    for _ in range(60):
        place, letters = 0, []
        for _ in range(draw.randint(30, 120)):
            place += draw.choice((1, 1, 1, 5))
            letters.append(chr(97 + place % 26))
        walks.append({"text": "".join(letters)})
    _write_lines(folder / "corpus.jsonl", walks)
    documents = [{"text": text(draw.randint(1, 80)), "title": text(3)} for _ in range(120)]
    _write_lines(folder / "words.jsonl", documents)
    (folder / "words.jsonl.gz").write_bytes(gzip.compress((folder / "words.jsonl").read_bytes(), mtime=0))
    for number in range(5):
        (folder / f"text-{number}.txt").write_text("\n".join(text(20) for _ in range(9)))
    pairs = [{"prompt": text(draw.randint(1, 9)), "response": text(draw.randint(1, 20))} for _ in range(40)]
    _write_lines(folder / "pairs.jsonl", pairs)
    chats = [
        {
            "messages": [
                {"role": role, "content": text(draw.randint(1, 12))}
                for role in ("user", "assistant") * draw.randint(1, 3)
            ]
        }
        for _ in range(40)
    ]
    _write_lines(folder / "chats.jsonl", chats)
    (folder / "template.jinja").write_text(
        "{% for message in messages %}<{{ message.role }}>"
        "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}</s>{% endgeneration %}"
        "{% else %}{{ message.content }}</s>{% endif %}{% endfor %}"
    )
    _write_vocabulary(folder / "data", folder / "words.jsonl")
    (folder / "hosts").write_text("".join(f"host-{number} slots=4\n" for number in range(16)))
    training = {
        "train-micro-batch-size-per-gpu": 4,
        "train-iters": 1000,
        "save-interval": 100,
        "optimizer": {"type": "Adam", "params": {"lr": 0.0001}},
    }
    (folder / "more.yml").write_text(json.dumps(training))


def _write_vocabulary(folder: Path, text: Path) -> None:
    """Write the two files of a tokenizer of GPT-2."""
    folder.mkdir()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train([str(text)], trainer)
    tokenizer.model.save(str(folder), "gpt2")


def _write_lines(path: Path, records: list[dict[str, object]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
