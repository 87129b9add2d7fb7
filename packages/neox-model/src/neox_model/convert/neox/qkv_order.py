"""The order of the rows of `query_key_value`, where query heads share keys and values.

| order | rows of a rank |
| --- | --- |
| `per-head` | of one query head after the other: its query, its part of the key, its part of the value |
| `separate` | all queries, then all keys, then all values |

GPT-NeoX computed with the first until commit 96c242e, of 13 November 2024, and with the second since then.
Checkpoints without `mlp.linear1`, which exists since commit 0d4bdb9, of 6 September 2024, are in the first.
Between the two commits neither names nor shapes show the order, and a checkpoint does not record the commit.
"""

from neox_config.spec.model import Attention
from neox_model.convert.errors import ConversionError
from neox_model.convert.neox.files import FIRST_BLOCK, Key, NeoXFiles

__all__ = ["PER_HEAD", "SEPARATE", "order_of"]

PER_HEAD, SEPARATE = "per-head", "separate"


def order_of(files: NeoXFiles, attention: Attention, given: str | None) -> str | None:
    """Return the order of shared keys and values; None if every query head has its own.

    Args:
        files: the checkpoint.
        attention: that of any layer.
        given: what `--qkv-order` states; None if it is not passed.

    Raises:
        ConversionError: it must be stated and is not, or it is stated and is not possible.
    """
    if attention.heads == attention.kv_heads:
        if given is not None:
            raise ConversionError(
                f"--qkv-order has no effect on {files.folder}: every query head of its configuration has its "
                "own key and value; leave it out, or pass the configuration with num_kv_heads as --config"
            )
        return None
    if Key(FIRST_BLOCK, "mlp.linear1.weight") in files.parts:
        if given is None:
            raise ConversionError(_must_be_stated(files, attention))
        order = given
    elif given in (None, PER_HEAD):
        order = PER_HEAD
    else:
        raise ConversionError(
            f"--qkv-order {given} is not possible for {files.folder}: layer {FIRST_BLOCK:02d} contains no "
            "mlp.linear1.weight, so that GPT-NeoX wrote it before September 2024, in the order "
            f"{PER_HEAD}; leave the option out"
        )
    width = attention.head_width
    sharing = attention.heads // attention.kv_heads
    if order == PER_HEAD and width % sharing:
        raise ConversionError(
            f"{files.folder} cannot be in the order {PER_HEAD}: a head has {width} channels, and {sharing} "
            "query heads share a key, each of which would store an equal part of it; pass the configuration "
            "that it was trained with as --config, or the other --qkv-order"
        )
    return order


def _must_be_stated(files: NeoXFiles, attention: Attention) -> str:
    return (
        f"{files.folder} has num_kv_heads: {attention.kv_heads}, and GPT-NeoX stored query_key_value in "
        "two orders with the same names and shapes; pass --qkv-order separate if the model was trained with "
        "commit 96c242e (13 November 2024) or a newer one, and --qkv-order per-head if with an older one; "
        "logs of GPT-NeoX name the commit as git_hash; if it is not known, convert with each order and "
        "generate: the wrong one gives text without meaning"
    )
