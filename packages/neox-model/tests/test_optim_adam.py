import torch

from neox_model.optim import OPTIMIZERS


def test_adam_decouples_weight_decay():
    """With a zero gradient nothing but the decay moves the weight: by lr * weight_decay of itself."""
    for name in ("adam", "adamw"):
        weight = torch.nn.Parameter(torch.tensor([2.0]))
        optimizer = OPTIMIZERS[name]([{"params": [weight], "weight_decay": 0.5}], lr=0.1, eps=1e-8)
        weight.grad = torch.zeros(1)
        optimizer.step()
        torch.testing.assert_close(weight.data, torch.tensor([2.0 * (1 - 0.1 * 0.5)]))
