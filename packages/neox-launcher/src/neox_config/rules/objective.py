"""Rules about the training objective."""

from collections.abc import Iterator

from neox_config.derive.attention_layers import types_in
from neox_config.derive.objective import is_encoder, is_retrieval
from neox_config.extras.compression.matrices import COMPRESSIONS
from neox_config.facts.attention import ATTENTION_FACTS
from neox_config.problems import Problem, refusals
from neox_config.schema.config import NeoXConfig

_LTD = "data_efficiency.data_routing.random_ltd"
# The argument by which layers that drop tokens receive what separates tokens.
_MASK_NAME = "attention_mask"
# The title has a quarter, and three tokens are around both.
_SHORTEST_BLOCK = 8


def encoders_do_not_continue_texts(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse, with attention in both directions, what requires a model that predicts the next token."""
    if not is_encoder(c):
        return iter(())
    objective, generation = f"(objective: {c.model.objective})", c.generation
    causal = f"requires a model that predicts the next token {objective}"
    return refusals(
        (
            c.objective.fim_rate > 0,
            "fim_rate",
            f"is for models that predict the next token {objective}",
            "set it to 0",
        ),
        (generation.eval_tasks is not None, "eval_tasks", causal, "remove it"),
        (
            generation.eval_data is not None,
            "eval_data",
            causal,
            "remove it; the validation loss is that of the objective",
        ),
        (
            generation.char_level_ppl,
            "char_level_ppl",
            f"is not defined: the model does not predict every token {objective}",
            "remove it",
        ),
        (
            c.checkpoint.hf_export is not None,
            "hf_export",
            f"is not possible: the classes of transformers that there are predict the next token {objective}",
            "remove it",
        ),
        (
            c.attention.scaled_upper_triang_masked_softmax_fusion is True,
            "scaled_upper_triang_masked_softmax_fusion",
            f"is a kernel that hides later tokens {objective}",
            "use scaled-masked-softmax-fusion",
        ),
    )


def labels_are_those_of_the_objective(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse labels with objectives that make their own."""
    for part in ("train", "valid", "test"):
        name = f"{part}_label_data_paths"
        if is_encoder(c) and getattr(c.data, name) is not None:
            what = f"is not used with objective: {c.model.objective}, which makes its own labels"
            yield Problem(name, what, "remove it")


def global_rows_see_later_blocks(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse global blocks that see all blocks in layers that see only earlier ones."""
    sparsity = c.attention.sparsity_config
    name = "horizontal_global_attention"
    is_used = any(name in ATTENTION_FACTS[kind].settings for kind in types_in(c))
    has_rows = is_used and sparsity.horizontal_global_attention
    if is_encoder(c) and has_rows and sparsity.attention == "unidirectional":
        yield Problem(
            f"sparsity_config.{name}",
            "requires attention: bidirectional, because global blocks see all blocks",
            "set it to false, or sparsity-config.attention: bidirectional",
        )


def buckets_are_shared_by_both_directions(c: NeoXConfig) -> Iterator[Problem]:
    """Require an even number of buckets, at least four, if half of them is for later tokens."""
    attention = c.attention
    if not is_encoder(c) or attention.pos_emb != "rpe" or attention.rpe_causal:
        return
    if attention.rpe_num_buckets % 2 or attention.rpe_num_buckets < 4:
        yield Problem(
            "rpe_num_buckets",
            "must be an even number, at least 4: half of the buckets is for later tokens, which tokens see",
            "use 32, or rpe-causal: true",
        )


def token_dropping_knows_the_direction(c: NeoXConfig) -> Iterator[Problem]:
    """Require the type and the mask of token dropping to be those of an encoder."""
    efficiency = c.data_efficiency.data_efficiency
    ltd = efficiency.data_routing.random_ltd
    if not (is_encoder(c) and efficiency.enabled and efficiency.data_routing.enabled and ltd.enabled):
        return
    if ltd.model_type != "encoder":
        what = "is for attention to earlier tokens, but it is in both directions with this objective"
        yield Problem(f"{_LTD}.model_type", what, "use encoder")
    if ltd.model_mask_name != _MASK_NAME:
        what = f"does not name an argument of the layers: documents and padding are separated by {_MASK_NAME}"
        yield Problem(f"{_LTD}.model_mask_name", what, f"use {_MASK_NAME}")


def layers_are_causal_or_see_everything(c: NeoXConfig) -> Iterator[Problem]:
    """Require layers that see later tokens if the objective does."""
    sparsity = c.attention.sparsity_config
    if not is_encoder(c) or sparsity.attention == "bidirectional" or not types_in(c):
        return
    if all(ATTENTION_FACTS[kind].is_in_blocks for kind in types_in(c)):
        yield Problem(
            "sparsity_config.attention",
            "leaves no layer that sees later tokens, which this objective requires",
            "use bidirectional",
        )


def rearranged_documents_have_no_labels(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse fill-in-the-middle with labels, whose tokens would not be those that follow."""
    if c.objective.fim_rate and c.data.train_label_data_paths is not None:
        yield Problem(
            "fim_rate",
            "rearranges tokens, so train-label-data-paths would not have their labels",
            "remove one of them",
        )


def parts_of_rearranged_documents_differ(c: NeoXConfig) -> Iterator[Problem]:
    """Require three different tokens before the parts of a rearranged document."""
    names = ("fim_prefix_token", "fim_middle_token", "fim_suffix_token")
    tokens = [getattr(c.objective, name) for name in names]
    for place, name in enumerate(names):
        if c.objective.fim_rate and tokens[place] in tokens[:place]:
            yield Problem(name, "is also the token of another part", "use a different token for each part")


def embeddings_have_a_width(c: NeoXConfig) -> Iterator[Problem]:
    """Require a width of embeddings that tensor-parallel ranks divide."""
    size, ranks = c.objective.ict_head_size, c.parallelism.model_parallel_size
    if not is_retrieval(c):
        return
    if size is None:
        yield Problem("ict_head_size", "is required by objective: ict", "set it, for example to 128")
    elif size % ranks:
        what = f"cannot be split over {ranks} tensor-parallel ranks"
        yield Problem("ict_head_size", what, f"use a multiple of {ranks}")


def samples_of_retrieval_are_blocks(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse, with the inverse cloze task, other ways to make samples, and layouts that divide its layers."""
    if not is_retrieval(c):
        return iter(())
    efficiency = c.data_efficiency.data_efficiency
    blocks = "does not apply to blocks of sentences, which are the samples of objective: ict"
    return refusals(
        (c.data.pack_impl != "packed", "pack_impl", blocks, "remove it"),
        (c.data.sample_order != "gpt_neox", "sample_order", blocks, "remove it"),
        (
            c.objective.titles_data_path is not None and c.data.data_path is None,
            "titles_data_path",
            "has the titles of one dataset, and train-data-paths can be several",
            "use data-path",
        ),
        (c.training.train_epochs is not None, "train_epochs", blocks, "set train-iters"),
        (c.data.reset_attention_mask, "reset_attention_mask", blocks, "remove it; padding is always masked"),
        (c.data.reset_position_ids, "reset_position_ids", blocks, "remove it"),
        (
            c.data_efficiency.curriculum_learning.enabled,
            "curriculum_learning.enabled",
            blocks,
            "set it to false",
        ),
        (
            efficiency.enabled and efficiency.data_sampling.enabled,
            "data_efficiency.enabled",
            blocks,
            "set it to false",
        ),
        (
            c.parallelism.pipe_parallel_size > 1,
            "pipe_parallel_size",
            "divides one list of layers, but objective: ict has two towers, which one loss compares",
            "use 1; tensor parallelism and ZeRO divide both towers",
        ),
        (
            c.adapters.lora_rank > 0,
            "lora_rank",
            "adds adapters to a saved model, but the towers of objective: ict have new heads",
            "train all weights, with bert-load",
        ),
        (
            c.training.loss_normalization != "micro_batch",
            "loss_normalization",
            "has no effect on objective: ict, whose micro-batches have equally many queries",
            "use micro_batch",
        ),
        (
            c.model.seq_length < _SHORTEST_BLOCK,
            "seq_length",
            "is too short for a block of sentences, the tokens around it and its title",
            f"use at least {_SHORTEST_BLOCK}",
        ),
    )


def towers_are_not_compressed(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse compression, layer reduction and eigenvalues of retrieval models."""
    if not is_retrieval(c):
        return
    training = c.compression.compression_training
    enabled = {
        f"compression_training.{part}.shared_parameters.enabled": getattr(
            training, part
        ).shared_parameters.enabled
        for part in COMPRESSIONS
    }
    enabled["compression_training.layer_reduction.enabled"] = training.layer_reduction.enabled
    enabled["eigenvalue.enabled"] = c.engine.eigenvalue.enabled
    for name in (name for name, is_enabled in enabled.items() if is_enabled):
        what = "cannot be combined with objective: ict: it names layers of one model, not those of two towers"
        yield Problem(name, what, "set it to false")


def accuracies_count_from_one(c: NeoXConfig) -> Iterator[Problem]:
    """Require numbers of blocks, each once, for the accuracies of retrieval."""
    given = c.objective.report_topk_accuracies
    if any(each < 1 for each in given) or len(set(given)) < len(given):
        what = "must be a list of different whole numbers from 1"
        yield Problem("report_topk_accuracies", what, "use a list such as [1, 5, 20]")
