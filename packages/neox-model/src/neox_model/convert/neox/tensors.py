"""Our tensors from the parts that GPT-NeoX's tensor-parallel ranks stored.

The order of the rows of `query_key_value`, where query heads share keys and values.

| order | rows of a rank |
| --- | --- |
| `per-head` | of one query head after the other: its query, its part of the key, its part of the value |
| `separate` | all queries, then all keys, then all values |

GPT-NeoX computed with the first until commit 96c242e, of 13 November 2024, and with the second since then.
Checkpoints without `mlp.linear1`, which exists since commit 0d4bdb9, of 6 September 2024, are in the first.
Between the two commits neither names nor shapes show the order, and a checkpoint does not record the commit.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from neox_config.facts.checkpoints import TOKEN_EMBEDDING
from neox_config.facts.norms import NORM_FACTS
from neox_config.spec.model import Alibi, Attention, Embedding, Layer, ModelSpec, Rotary, Sinusoidal
from neox_model.convert.checkpoints import VOCABULARY
from neox_model.convert.differences import attention_of
from neox_model.convert.errors import ConversionError
from neox_model.convert.families.family import part_of_layer
from neox_model.convert.forms import SEPARATE_QKV
from neox_model.convert.neox.files import FIRST_BLOCK, Key, NeoXFiles
from neox_model.layers.positions.relative import alibi_slopes

__all__ = ["Joined", "joined_tensors", "order_of"]

PER_HEAD, SEPARATE = "per-head", "separate"
Shape = tuple[int, ...]
_TOLERANCE = 2.0**-7


@dataclass(frozen=True, slots=True)
class Join:
    """How the parts of the ranks become one tensor.

    Args:
        part: our whole shape, number of ranks -> the shape on each rank; None if it cannot be divided so.
        values: files, key, attention of the layer -> the whole tensor.
        rows_follow: the whole tensor is the rows of rank 0, then those of rank 1, .., so that it can be read
            in chunks.
    """

    part: Callable[[Shape, int], Shape | None]
    values: Callable[[NeoXFiles, Key, Attention], Tensor]
    rows_follow: bool = False


def _divided(shape: Shape, dim: int, ranks: int) -> Shape | None:
    if dim >= len(shape) or shape[dim] % ranks:
        return None
    return (*shape[:dim], shape[dim] // ranks, *shape[dim + 1 :])


def _parts(files: NeoXFiles, key: Key) -> list[Tensor]:
    return [files.whole(key, rank) for rank in range(files.ranks)]


def _half(number: int) -> Callable[[NeoXFiles, Key, Attention], Tensor]:
    return lambda files, key, _: torch.cat([part.chunk(2)[number] for part in _parts(files, key)])


def _grouped(files: NeoXFiles, key: Key, attention: Attention) -> Tensor:
    """Join projections whose ranks store all their queries, then their keys, then their values."""
    queries, keys = attention.query_width // files.ranks, attention.key_width // files.ranks
    counts = [queries, keys, keys]
    split = [part.split(counts) for part in _parts(files, key)]
    return SEPARATE_QKV.to_ours(tuple(torch.cat(same) for same in zip(*split, strict=True)), attention)


def _per_head(files: NeoXFiles, key: Key, attention: Attention) -> Tensor:
    """Join projections whose ranks store each query head with its part of a key and of a value."""
    width = attention.head_width
    share = width * attention.kv_heads // attention.heads
    whole = torch.cat(_parts(files, key))
    by_head = whole.view(attention.heads, width + 2 * share, *whole.shape[1:])
    split = by_head.split([width, share, share], dim=1)
    return SEPARATE_QKV.to_ours(tuple(same.flatten(0, 1) for same in split), attention)


def _both_halves(shape: Shape, ranks: int) -> Shape | None:
    return _divided((2 * shape[0], *shape[1:]), 0, 2 * ranks) and (2 * shape[0] // ranks, *shape[1:])


def _sum(files: NeoXFiles, key: Key, _: Attention) -> Tensor:
    """Add the parts: with a parallel residual each rank adds its own before the results are summed."""
    parts = _parts(files, key)
    return torch.stack(parts).double().sum(dim=0).to(parts[0].dtype)


ROWS = Join(
    lambda shape, ranks: _divided(shape, 0, ranks),
    lambda files, key, _: torch.cat(_parts(files, key)),
    rows_follow=True,
)
COLUMNS = Join(
    lambda shape, ranks: _divided(shape, 1, ranks),
    lambda files, key, _: torch.cat(_parts(files, key), dim=1),
)
COPIES = Join(lambda shape, _: shape, lambda files, key, _: files.common(key))
SUM = Join(lambda shape, _: shape, _sum)
FIRST_HALF, SECOND_HALF = Join(_both_halves, _half(0)), Join(_both_halves, _half(1))
GROUPED = Join(lambda shape, ranks: _divided(shape, 0, ranks), _grouped)
GROUPED_PER_HEAD = Join(lambda shape, ranks: _divided(shape, 0, ranks), _per_head)


@dataclass(frozen=True, slots=True)
class Joined:
    """One tensor of ours and its parts.

    Args:
        ours: logical name.
        shape: whole shape, of which the first rows are used.
        key: the parts.
        join: how they are joined.
        attention: that of the tensor's layer, or of any if it is in none.
    """

    ours: str
    shape: Shape
    key: Key
    join: Join
    attention: Attention

    def chunks(self, files: NeoXFiles) -> Iterator[Tensor]:
        """Yield the values in row-major order."""
        if not self.join.rows_follow:
            yield self.join.values(files, self.key, self.attention)
            return
        missing = self.shape[0]
        for rank in range(files.ranks):
            for chunk in files.row_chunks(self.key, rank):
                yield chunk[:missing]
                missing -= min(missing, chunk.shape[0])


def joined_tensors(
    files: NeoXFiles,
    spec: ModelSpec,
    shapes: Mapping[str, Shape],
    rows: int,
    *,
    order: str | None,
) -> list[Joined]:
    """Return our tensors with their parts, whose shapes fit; every stored tensor is used or known.

    Args:
        files: the checkpoint.
        spec: the model.
        shapes: logical name -> whole shape of all our tensors.
        rows: stored entries of the vocabulary; `shapes` may have fewer.
        order: of shared keys and values, as `order_of` returns it.
    """
    any_attention = attention_of(spec.layers[0])
    counts = {"num-attention-heads": any_attention.heads, "num-kv-heads": any_attention.kv_heads}
    for name, count in counts.items():
        if count % files.ranks:
            raise ConversionError(
                f"{files.folder} has {files.ranks} tensor-parallel ranks, which cannot divide {name}: {count}"
                "; pass the configuration that it was trained with as --config"
            )
    found = []
    for name, shape in shapes.items():
        stored = (rows, *shape[1:]) if name in VOCABULARY else shape
        module, _, kind = name.rpartition(".")
        index, part = part_of_layer(module)
        if index is None:
            choices = _outside(len(spec.layers), name)
        elif part == "attention.qkv":
            by_order: Mapping[str | None, Join] = {None: ROWS, SEPARATE: GROUPED, PER_HEAD: GROUPED_PER_HEAD}
            choices = [(Key(FIRST_BLOCK + index, f"attention.query_key_value.{kind}"), (by_order[order],))]
        else:
            choices = _inside(spec.layers[index], index, part, kind)
        there = [(key, joins) for key, joins in choices if key in files.parts]
        if not there:
            names = " or ".join(dict.fromkeys(str(key) for key, _ in choices)) or f"a place for {name}"
            raise ConversionError(
                f"{files.folder} does not contain {names}, which the model of its configuration has; pass "
                "the configuration that it was trained with as --config, or copy the checkpoint again"
            )
        key, joins = there[0]
        join = _fitting(files, key, joins, stored)
        found.append(Joined(name, shape, key, join, attention_of(spec.layers[index or 0])))
    used = {joined.key for joined in found}
    for key in sorted(files.parts.keys() - used):
        if spec.layers[0].shares_norm and key.name.startswith(f"{_NORMS['norm2']}."):
            # GPT-NeoX builds and stores it, and does not use it.
            continue
        expected = _buffer(key, any_attention, spec.embedding, spec.width)
        if expected is None:
            raise ConversionError(
                f"{files.folder} contains {key}, which the model of its configuration does not have; pass "
                "the configuration that it was trained with as --config"
            )
        _check_buffer(files, key, expected)
    return found


_Choices = list[tuple[Key, tuple[Join, ...]]]
_IN_BLOCK: Mapping[str, tuple[str, Mapping[str, tuple[Join, ...]]]] = {
    "attention.dense": ("attention.dense", {"weight": (COLUMNS,)}),
    "attention.core.position": ("attention.rpe", {"weight": (COLUMNS,)}),
}
_NORMS = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
# Names of a norm's weight: of layer norms and fused norms, of RMS norms, and of norms with one number.
_NORM_WEIGHTS = ("weight", "scale", "g")
# Since September 2024, and before.
_MLP_IN, _MLP_OUT = ("mlp.linear1", "mlp.dense_h_to_4h"), ("mlp.linear2", "mlp.dense_4h_to_h")
# Gate and input of the feed-forward block of Llama before September 2024, which stored them apart.
_APART = {"mlp.gate": "mlp.w1", "mlp.up": "mlp.w3", "mlp.down": "mlp.w2"}


def _inside(ours: Layer, index: int, part: str, kind: str) -> _Choices:
    """Return where a tensor of a block may be, and how it may be joined."""
    layer = FIRST_BLOCK + index
    if part in _NORMS:
        return _norm(layer, _NORMS[part], kind)
    if part == "attention.qk_norm.both":
        return _of_queries_and_keys(ours, layer, kind)
    after = (SUM if ours.residual == "parallel" else COPIES,) if kind == "bias" else (COLUMNS,)
    if part in _IN_BLOCK:
        stem, joins = _IN_BLOCK[part]
        return [(Key(layer, f"{stem}.{kind}"), joins.get(kind, after))]
    if part == "mlp.down":
        return [(Key(layer, f"{stem}.{kind}"), after) for stem in (*_MLP_OUT, _APART[part])]
    if part not in _APART:
        return []
    half = SECOND_HALF if part == "mlp.gate" else FIRST_HALF
    join = half if ours.channel is not None and ours.channel.is_gated else ROWS
    together: _Choices = [(Key(layer, f"{stem}.{kind}"), (join,)) for stem in _MLP_IN]
    return [*together, (Key(layer, f"{_APART[part]}.{kind}"), (ROWS,))]


def _of_queries_and_keys(ours: Layer, layer: int, kind: str) -> _Choices:
    """Return where the norm of queries and keys is, whose ranks have a row per head."""
    attention = attention_of(ours)

    by_head = Join(
        lambda shape, ranks: (attention.heads // ranks, attention.head_width),
        lambda files, key, _: torch.cat(_parts(files, key)).flatten(),
    )
    choices = _norm(layer, "attention.qk_layernorm", kind)
    # A scalar is the same on every rank.
    return choices if NORM_FACTS[ours.norm.kind].scalars else [(key, (by_head,)) for key, _ in choices]


def _norm(layer: int, stem: str, kind: str) -> _Choices:
    names = _NORM_WEIGHTS if kind == "weight" else (kind,)
    return [(Key(layer, f"{stem}.{name}"), (COPIES,)) for name in names]


def _outside(num_layers: int, name: str) -> _Choices:
    """Return where a tensor outside the blocks may be, and how it may be joined."""
    after = FIRST_BLOCK + num_layers
    if name.startswith("final_norm."):
        return _norm(after + 1, "norm", name.rpartition(".")[2])
    places: Mapping[str, tuple[Key, tuple[Join, ...]]] = {
        TOKEN_EMBEDDING: (Key(0, "word_embeddings.weight"), (ROWS,)),
        "embedding.position_embeddings.weight": (Key(0, "position_embeddings.weight"), (COPIES,)),
        # In 2021 the output projection could be divided over the hidden size.
        "lm_head.weight": (Key(after + 2, "final_linear.weight"), (ROWS, COLUMNS)),
    }
    return [places[name]] if name in places else []


def _fitting(files: NeoXFiles, key: Key, joins: tuple[Join, ...], shape: Shape) -> Join:
    """Return the join whose parts have the stored shapes."""
    found = files.shapes(key)
    for join in joins:
        if all(each == join.part(shape, files.ranks) for each in found):
            return join
    expected = joins[0].part(shape, files.ranks)
    rank = next(number for number, each in enumerate(found) if each != expected)
    what = f"requires {expected}" if expected else f"has {shape}, which cannot be divided by {files.ranks}"
    raise ConversionError(
        f"{files.folder}: {key} has the shape {found[rank]} on rank {rank} of {files.ranks}, but the model "
        f"of the configuration {what}; pass the configuration that it was trained with as --config"
    )


def _buffer(key: Key, attention: Attention, embedding: Embedding, width: int) -> Tensor | None:
    """Return the values of a stored constant; None if the key is none."""
    position = attention.position
    if key.name == "attention.rotary_emb.inv_freq" and isinstance(position, Rotary):
        return _frequencies(int(attention.head_width * position.fraction), position.base)
    if key == Key(0, "position_embeddings.inv_freq") and isinstance(embedding.position, Sinusoidal):
        return _frequencies(width, 10000.0)
    if key.name == "attention.alibi_embed.slopes" and isinstance(position, Alibi):
        return torch.tensor(alibi_slopes(attention.heads), dtype=torch.float64)
    return None


def _frequencies(channels: int, base: float) -> Tensor:
    return base ** -(torch.arange(0, channels, 2, dtype=torch.float64) / channels)


def _check_buffer(files: NeoXFiles, key: Key, expected: Tensor) -> None:
    """Check a stored constant, which may have been rounded to 16 bit, and whose ranks may have parts."""
    parts = _parts(files, key)
    stored = torch.cat(parts) if sum(map(prod, files.shapes(key))) == expected.numel() else parts[0]
    if any(part.shape != parts[0].shape for part in parts) or stored.shape != expected.shape:
        found = f"has the shape {tuple(stored.shape)}, not {tuple(expected.shape)}"
    elif not torch.allclose(stored.double(), expected, rtol=_TOLERANCE, atol=1e-7):
        found = f"ends with {float(stored[-1]):.4g}, not with {float(expected[-1]):.4g}"
    else:
        return
    raise ConversionError(
        f"{files.folder}: {key} {found}, as the configuration requires (num-attention-heads, rotary-pct, "
        "rotary-emb-base); pass the configuration that it was trained with as --config"
    )


def order_of(files: NeoXFiles, attention: Attention, given: str | None) -> str | None:
    """Return the order of shared keys and values; None if every query head has its own.

    Args:
        files: the checkpoint.
        attention: that of any layer.
        given: what `--qkv-order` states; None if it is not passed.
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
            raise ConversionError(
                f"{files.folder} has num_kv_heads: {attention.kv_heads}, and GPT-NeoX stored query_key_value "
                "in two orders with the same names and shapes; pass --qkv-order separate if the model was "
                "trained with commit 96c242e (13 November 2024) or a newer one, and --qkv-order per-head if "
                "with an older one; logs of GPT-NeoX name the commit as git_hash; if it is not known, "
                "convert with each order and generate: the wrong one gives text without meaning"
            )
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
