"""Launch one operator and check its result: `python trial_launch.py MODULE DEVICE`.

The exit code is 1 if the result is wrong, or the launch fails.
"""

import importlib.util
import sys

import torch

__all__ = ["main"]


def main(path: str, device: str) -> None:
    """Compute the softmax of equal scores on the device."""
    spec = importlib.util.spec_from_file_location("_native", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    scores = torch.zeros(2, 8, device=device)
    result = torch.empty_like(scores)
    stream = torch.cuda.current_stream(device).cuda_stream if scores.is_cuda else 0
    module.softmax_forward(
        max(scores.get_device(), 0), stream, 0, scores.data_ptr(), 0, 1, (0, 0, 0, 0), result.data_ptr(), 1,
        2, 8, 1.0, False,
    )  # fmt: skip
    if not torch.equal(result.cpu(), torch.full((2, 8), 0.125)):
        sys.exit("the softmax of equal scores is wrong")


if __name__ == "__main__":
    main(*sys.argv[1:])
