"""Best learning rate of a narrow and of a wide model, with and without muP, on the text of the documents.

    python benchmarks/mup_transfer.py --widths 64 512 --steps 150

Prints the mean loss of the last 20 updates for each width and rate. With muP the best rate of both should be
within a factor of 2.
"""

import argparse
import json
from pathlib import Path
from statistics import fmean

import torch

from neox_config import Text, load_config, resolve
from neox_model.assembly.model import build_model
from neox_model.assembly.optimizer import build_optimizer
from neox_model.optim.lr_schedule import LearningRateSchedule
from neox_model.parallel.groups import SINGLE_PROCESS, SINGLE_RANK

HEAD, LENGTH, SAMPLES, LAST = 16, 64, 4, 20


def settings_of(width: int, base: int, rate: float, *, steps: int, use_mup: bool) -> dict[str, object]:
    """Return a model of 2 layers whose heads, of the same width, and MLP grow with the width."""
    shapes = {
        "hidden_size": base,
        "num_attention_heads": base // HEAD,
        "head_dim": HEAD,
        "mlp_width": 4 * base,
    }
    return {
        "num_layers": 2,
        "hidden_size": width,
        "num_attention_heads": width // HEAD,
        "mlp_width": 4 * width,
        "seq_length": LENGTH,
        "max_position_embeddings": LENGTH,
        "pos_emb": "rotary",
        "norm": "rmsnorm",
        "no_weight_tying": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "train_micro_batch_size_per_gpu": SAMPLES,
        "train_iters": steps,
        "warmup": 0.1,
        "lr_decay_style": "linear",
        "optimizer": {"type": "AdamW", "params": {"lr": rate, "betas": [0.9, 0.95]}},
        **({"use_mup": True, "mup_base": shapes} if use_mup else {}),
    }


def last_loss(settings: dict[str, object], text: torch.Tensor, steps: int) -> float:
    """Train, and return the mean loss of the last updates."""
    resolved = resolve(load_config([], texts=[Text(json.dumps(settings), name="benchmark")]), devices=1)
    model = build_model(resolved.model, resolved.run, SINGLE_PROCESS, vocab_size=256)
    optimizer = build_optimizer(
        resolved.update.optimizer, resolved.run, model, model_group=SINGLE_RANK, data_group=SINGLE_RANK
    )
    assert resolved.update.curve is not None
    schedule = LearningRateSchedule(optimizer, resolved.update.curve)
    generator, losses = torch.Generator().manual_seed(0), []
    weights = torch.full((SAMPLES, LENGTH), 1 / (SAMPLES * LENGTH))
    for _ in range(steps):
        starts = torch.randint(0, len(text) - LENGTH - 1, (SAMPLES, 1), generator=generator)
        window = text[starts + torch.arange(LENGTH + 1)]
        loss = model(window[:, :-1], (window[:, 1:], weights))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return fmean(losses[-LAST:])


def main() -> None:
    """Print a row for each parametrization and width."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.002, 0.004, 0.008, 0.016, 0.032])
    parser.add_argument("--only", choices=["muP", "without"])
    given = parser.parse_args()
    raw = b"".join(path.read_bytes() for path in sorted(Path("docs").glob("*.md")))
    text = torch.frombuffer(bytearray(raw), dtype=torch.uint8).long()
    for name in [given.only] if given.only else ["muP", "without"]:
        for width in given.widths:
            found = {}
            for rate in given.rates:
                settings = settings_of(width, given.widths[0], rate, steps=given.steps, use_mup=name == "muP")
                found[rate] = last_loss(settings, text, given.steps)
                print(f"{name} {width} {rate:g} {found[rate]:.4f}", flush=True)
            print(f"{name} {width}: best {min(found, key=found.__getitem__):g}", flush=True)


if __name__ == "__main__":
    main()
