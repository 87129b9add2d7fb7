"""Number of parameters of the whole model by part, and of one device.

Known limit: stages hold equal numbers of layers, regardless of `pipe-partition-method`.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from math import ceil

from neox_config.estimate.mixers import ADAPTERS, Weights, costs_of, norm_weights
from neox_config.estimate.setup import Setup
from neox_config.facts.collectives import BUCKET_ELEMENTS, EARLY_BUCKET_ELEMENTS
from neox_config.spec.model import Alibi, Attention, Layer, Learned, ModelSpec, Retrieval, Rpe
from neox_config.spec.run import Layout

__all__ = [
    "Weights",
    "active_parameters",
    "bucketed_parameters",
    "count_parameters",
    "divided_parameters",
    "each_tensor",
    "is_matrix_of_layer",
    "largest_block",
    "largest_tensor",
    "layer_weights",
    "local_expert_parameters",
    "local_parameters",
    "local_state_values",
    "number_of_each",
    "outside_blocks",
    "replica_values",
    "stage_layers",
    "trained_parameters",
    "weights_within",
]

# Models and stages whose tensors are kept: a search for a layout asks for the same ones many times.
_MOST_KEPT = 1024


def count_parameters(model: ModelSpec, entries: int) -> dict[str, int]:
    """Return the number of parameters of the whole model by part; a tied head has none.

    Args:
        model: the model.
        entries: number of entries of the vocabulary, including padding.
    """
    counts = Counter(dict.fromkeys(("embedding", "positions", "attention", "mlp", "norms", "head"), 0))
    for number, tensor in _tensors(model, entries, 1, 0):
        counts[tensor.part] += number * tensor.numbers
    return dict(counts)


def active_parameters(model: ModelSpec, entries: int) -> int:
    """Return the number of parameters without those of the experts that a token does not pass."""
    return sum(number * tensor.used for number, tensor in _tensors(model, entries, 1, 0))


def _is_trained(model: ModelSpec, tensor: Weights) -> bool:
    """Return True unless the tensor is a weight of a model whose adapters alone are trained."""
    return model.adapters is None or tensor.part == ADAPTERS


def trained_parameters(setup: Setup, stage: int) -> int:
    """Return the number of parameters of one device of a stage that are trained, before ZeRO."""
    layout = setup.run.layout
    return _local(setup.model, setup.entries, layout.tensor, layout.stages, stage, layout.experts)[1]


def divided_parameters(setup: Setup, stage: int) -> int:
    """Return the number of those of one rank, if data-parallel ranks divide them.

    The ranks that have the same experts divide these: fewer ranks, and as many times fewer experts.
    """
    layout = setup.run.layout
    trained = _local(setup.model, setup.entries, layout.tensor, layout.stages, stage, 1)[1]
    return ceil(trained / layout.data)


def local_parameters(setup: Setup, stage: int) -> int:
    """Return the number of parameters of one device of a stage, before partitioning by ZeRO."""
    layout = setup.run.layout
    return _local(setup.model, setup.entries, layout.tensor, layout.stages, stage, layout.experts)[0]


def local_expert_parameters(setup: Setup, stage: int) -> int:
    """Return the number of those that are experts'."""
    layout = setup.run.layout
    tensors = ((number, each) for number, each in _stage_tensors(setup, stage) if each.active is not None)
    return sum(number * each.local_count(layout.tensor, layout.experts) for number, each in tensors)


@lru_cache(_MOST_KEPT)
def _local(
    model: ModelSpec, entries: int, ranks: int, stages: int, stage: int, experts: int
) -> tuple[int, int]:
    """Return the number of all parameters of a device, and of those that are trained."""
    whole = trained = 0
    for number, tensor in _tensors(model, entries, stages, stage):
        count = number * tensor.local_count(ranks, experts)
        whole += count
        trained += count if _is_trained(model, tensor) else 0
    return whole, trained


def bucketed_parameters(
    setup: Setup, *, later: int = 0, device: str = "cuda", of_experts: bool = False
) -> list[int]:
    """Return the number of elements of each message in which stage 0 reduces the gradients of one device.

    Messages of the backward pass have the last parameters first. Other messages have matrices before vectors,
    which have no weight decay; the order within these is not exact.

    Args:
        setup: what is estimated.
        later: elements that are reduced after the backward pass in any case, because they are summed over
            tensor-parallel ranks before.
        device: type of the devices.
        of_experts: only those of experts that ranks divide; else those of all other parameters.
    """
    ranks, experts = setup.run.layout.tensor, setup.run.layout.experts
    tensors = [each for each in each_tensor(setup) if (experts > 1 and each.active is not None) == of_experts]
    if of_experts or not setup.reduces_early(device):
        ordered = sorted(tensors, key=lambda tensor: tensor.row == 1)
        return _messages((each.local_count(ranks, experts) for each in ordered), BUCKET_ELEMENTS)
    sizes, left = list[int](), later
    for tensor in reversed(tensors):
        is_whole = not (tensor.is_split or tensor.multiplies)
        taken = min(left, tensor.numbers) if is_whole else 0
        sizes.append(tensor.local_count(ranks, experts) - taken)
        left -= taken
    return [*_messages(sizes, EARLY_BUCKET_ELEMENTS), *_messages([later], BUCKET_ELEMENTS)]


def _messages(sizes: Iterable[int], limit: int) -> list[int]:
    """Return the sizes of messages with at most this number of elements, or with one larger tensor."""
    messages: list[int] = []
    for size in filter(None, sizes):
        if messages and messages[-1] + size <= limit:
            messages[-1] += size
        else:
            messages.append(size)
    return messages


def each_tensor(setup: Setup, stage: int = 0) -> Iterator[Weights]:
    """Yield every trained tensor of a stage, the head of a single stage last."""
    for number, tensor in _stage_tensors(setup, stage):
        if _is_trained(setup.model, tensor):
            yield from [tensor] * number


def largest_tensor(setup: Setup, stage: int) -> int:
    """Return the number of parameters of the largest trained tensor of one device of a stage."""
    trained = (each for _, each in _stage_tensors(setup, stage) if _is_trained(setup.model, each))
    layout = setup.run.layout
    return max((tensor.local_count(layout.tensor, layout.experts) for tensor in trained), default=0)


def largest_block(setup: Setup, stage: int) -> int:
    """Return the number of parameters of the largest part that `fully_shard` gathers by itself."""
    return max(_blocks(setup, stage), default=0)


def outside_blocks(setup: Setup, stage: int) -> int:
    """Return the number of parameters that are gathered together, for whole passes.

    These are the final norm, the head, and what several layers share.
    """
    return local_parameters(setup, stage) - sum(_blocks(setup, stage))


def _blocks(setup: Setup, stage: int) -> list[int]:
    """Return the number of parameters of each layer, and of an embedding that is not tied to a head here."""
    model, layout, blocks = setup.model, setup.run.layout, list[int]()
    if model.layers[0].owner is None:
        for layer, number in number_of_each(model, stage_layers(model, layout.stages, stage)):
            blocks += [_count(layer_weights(model, layer), layout)] * number
    if stage == 0 and not (model.is_tied and layout.stages == 1):
        blocks.append(_count(_embedding(model, setup.entries), layout))
    return blocks * model.towers


def _count(tensors: Iterable[Weights], layout: Layout) -> int:
    return sum(tensor.local_count(layout.tensor, layout.experts) for tensor in tensors)


def local_state_values(setup: Setup, stage: int, *, row_ranks: int = 1) -> int:
    """Return how many float32 values the optimizer stores for one device of a stage.

    Args:
        setup: what is estimated.
        stage: the pipeline stage.
        row_ranks: number of ranks that divide the rows of each weight, with those that divide experts.
    """
    divided, whole, facts, layout = 0, 0, setup.optimizer, setup.run.layout
    experts = layout.experts if row_ranks == 1 else 1
    of_matrices = len(facts.matrix_states) or setup.states
    for number, tensor in _stage_tensors(setup, stage):
        if not _is_trained(setup.model, tensor):
            continue
        rows, columns = tensor.local_shape(layout.tensor, experts)
        each = of_matrices if is_matrix_of_layer(tensor) else setup.states
        divided += number * each * rows * (columns or 1)
        if is_matrix_of_layer(tensor):
            divided += number * setup.row_states * rows
        if facts.other_shapes:
            divided += number * rows
            whole += number * (columns or 0)
    return ceil(divided / row_ranks) + whole + replica_values(setup, stage)


def is_matrix_of_layer(tensor: Weights) -> bool:
    """Return True for the matrix of a linear layer, without the head, which Muon makes orthogonal."""
    return tensor.multiplies and tensor.part != "head"


def replica_values(setup: Setup, stage: int) -> int:
    """Return how many of these values differ between replicas: a number per parameter, and a share of one."""
    copies = setup.run.layout.data
    if not setup.optimizer.replica_states or copies == 1:
        return 0
    local = trained_parameters(setup, stage)
    return local + ceil(local / copies)


def _stage_tensors(setup: Setup, stage: int) -> Sequence[tuple[int, Weights]]:
    """Return the tensors of a stage, each with how often it occurs."""
    return _tensors(setup.model, setup.entries, setup.run.layout.stages, stage)


@lru_cache(_MOST_KEPT)
def _tensors(model: ModelSpec, entries: int, stages: int, stage: int) -> Sequence[tuple[int, Weights]]:
    tower = _of_tower(model, entries, stages, stage)
    return tuple((model.towers * number, tensor) for number, tensor in tower)


def _of_tower(model: ModelSpec, entries: int, stages: int, stage: int) -> Iterator[tuple[int, Weights]]:
    if stage == 0:
        yield from ((1, tensor) for tensor in _embedding(model, entries))
    for layer, number in number_of_each(model, weights_within(model, stage_layers(model, stages, stage))):
        yield from ((number, tensor) for tensor in layer_weights(model, layer))
    if stage == stages - 1:
        yield from ((1, tensor) for tensor in _head(model, entries))
        if model.is_tied and stages > 1:
            yield 1, _vocabulary(model, entries, "head")


def stage_layers(model: ModelSpec, stages: int, stage: int) -> range:
    """Return the layers of a stage; the first stages have one more if the layers do not divide evenly."""
    each, rest = divmod(len(model.layers), stages)
    start = stage * each + min(stage, rest)
    return range(start, start + each + (stage < rest))


def weights_within(model: ModelSpec, layers: Iterable[int]) -> tuple[int, ...]:
    """Return the first layer with each set of weights that the given layers use."""
    owners = ((layer, model.layers[layer].owner) for layer in layers)
    return tuple(sorted({layer if owner is None else owner for layer, owner in owners}))


@lru_cache(_MOST_KEPT)
def number_of_each(model: ModelSpec, layers: Iterable[int]) -> Sequence[tuple[Layer, int]]:
    """Return the different ones of these layers, regardless of sharing, each with how often it occurs."""
    kinds, numbers = _kinds(model)
    return [(kinds[kind], count) for kind, count in Counter(numbers[layer] for layer in layers).items()]


@lru_cache(_MOST_KEPT)
def _kinds(model: ModelSpec) -> tuple[list[Layer], list[int]]:
    """Return the different layers of a model, and the position of each of its layers among them."""
    kinds = [_kind(layer) for layer in model.layers]
    positions = {kind: position for position, kind in enumerate(dict.fromkeys(kinds))}
    return list(positions), [positions[kind] for kind in kinds]


def _kind(layer: Layer) -> Layer:
    """Return a layer without what follows from its number, which costs nothing."""
    mixer = layer.mixer
    if isinstance(mixer, Attention) and isinstance(mixer.position, Rpe | Alibi):
        mixer = replace(mixer, position=replace(mixer.position, times=1))
    return replace(layer, mixer=mixer, owner=None)


def _vocabulary(model: ModelSpec, entries: int, part: str) -> Weights:
    return Weights(part, entries * model.width, is_split=True, multiplies=part == "head", row=model.width)


def _embedding(model: ModelSpec, entries: int) -> Iterator[Weights]:
    yield _vocabulary(model, entries, "embedding")
    if isinstance(model.embedding.position, Learned):
        yield Weights("positions", model.embedding.position.rows * model.width, row=model.width)


def _head(model: ModelSpec, entries: int) -> Iterator[Weights]:
    yield norm_weights(model.norm, model.width)
    if isinstance(model.head, Retrieval):
        size = model.head.size
        yield Weights("head", size * model.width, is_split=True, row=model.width)
        yield Weights("head", size, is_split=True)
    elif not model.is_tied:
        yield _vocabulary(model, entries, "head")


@lru_cache(_MOST_KEPT)
def layer_weights(model: ModelSpec, layer: Layer) -> Sequence[Weights]:
    """Return the tensors of one layer."""
    found: list[Weights] = []
    for (each, cost), norms in zip(costs_of(layer), layer.norms, strict=True):
        found += [norm_weights(layer.norm, model.width)] * norms
        found += cost.tensors(each, layer, model)
    return found
