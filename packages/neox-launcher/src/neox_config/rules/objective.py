"""Rules about the objective of the training."""

from collections.abc import Iterator

from neox_config.derive.attention_layers import types_in
from neox_config.derive.objective import is_masked
from neox_config.facts.attention import ATTENTION_FACTS
from neox_config.problems import Problem
from neox_config.schema.config import NeoXConfig

_LTD = "data_efficiency.data_routing.random_ltd"
# The argument by which layers that drop tokens receive what separates tokens.
_MASK_NAME = "attention_mask"


def masked_models_do_not_continue_texts(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse, with masked tokens, what requires that a model predicts the next token."""
    if not is_masked(c):
        return
    asked = {
        "fim_rate": (
            c.objective.fim_rate > 0,
            "is for models that predict the next token",
            "set it to 0; masked models fill gaps already",
        ),
        "eval_tasks": (
            c.generation.eval_tasks is not None,
            "requires a model that predicts the next token",
            "",
        ),
        "eval_data": (
            c.generation.eval_data is not None,
            "requires a model that predicts the next token",
            "remove it; the validation loss is that of masked tokens",
        ),
        "char_level_ppl": (
            c.generation.char_level_ppl,
            "is not defined: a masked model predicts a part of the tokens",
            "",
        ),
        "hf_export": (
            c.checkpoint.hf_export is not None,
            "is not possible: the classes of transformers that there are predict the next token",
            "",
        ),
        "scaled_upper_triang_masked_softmax_fusion": (
            c.attention.scaled_upper_triang_masked_softmax_fusion is True,
            "is a kernel that hides later tokens",
            "use scaled-masked-softmax-fusion",
        ),
    }
    for name, (is_set, what, remedy) in asked.items():
        if is_set:
            yield Problem(name, f"{what} (objective: masked)", remedy or "remove it")


def labels_are_the_masked_tokens(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse labels with masked tokens, which are their own labels."""
    for part in ("train", "valid", "test"):
        name = f"{part}_label_data_paths"
        if is_masked(c) and getattr(c.data, name) is not None:
            what = "is not used with objective: masked, whose labels are the masked tokens"
            yield Problem(name, what, "remove it")


def global_rows_see_later_blocks(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse global blocks that see all blocks in layers that see only earlier ones."""
    sparsity = c.attention.sparsity_config
    name = "horizontal_global_attention"
    is_used = any(name in ATTENTION_FACTS[kind].settings for kind in types_in(c))
    has_rows = is_used and sparsity.horizontal_global_attention
    if is_masked(c) and has_rows and sparsity.attention == "unidirectional":
        yield Problem(
            f"sparsity_config.{name}",
            "requires attention: bidirectional, because global blocks see all blocks",
            "set it to false, or sparsity-config.attention: bidirectional",
        )


def buckets_are_shared_by_both_directions(c: NeoXConfig) -> Iterator[Problem]:
    """Require an even number of buckets, at least four, if half of them is for later tokens."""
    attention = c.attention
    if not is_masked(c) or attention.pos_emb != "rpe" or attention.rpe_causal:
        return
    if attention.rpe_num_buckets % 2 or attention.rpe_num_buckets < 4:
        yield Problem(
            "rpe_num_buckets",
            "must be an even number, at least 4: half of the buckets is for later tokens (objective: masked)",
            "use 32, or rpe-causal: true",
        )


def token_dropping_knows_the_direction(c: NeoXConfig) -> Iterator[Problem]:
    """Require the type and the mask of token dropping to be those of a masked model."""
    efficiency = c.data_efficiency.data_efficiency
    ltd = efficiency.data_routing.random_ltd
    if not (is_masked(c) and efficiency.enabled and efficiency.data_routing.enabled and ltd.enabled):
        return
    if ltd.model_type != "encoder":
        what = "is for attention to earlier tokens, but with objective: masked it is in both directions"
        yield Problem(f"{_LTD}.model_type", what, "use encoder")
    if ltd.model_mask_name != _MASK_NAME:
        what = f"does not name an argument of the layers: documents and padding are separated by {_MASK_NAME}"
        yield Problem(f"{_LTD}.model_mask_name", what, f"use {_MASK_NAME}")


def layers_are_causal_or_see_everything(c: NeoXConfig) -> Iterator[Problem]:
    """Require layers that see later tokens if tokens are predicted from all others."""
    sparsity = c.attention.sparsity_config
    if not is_masked(c) or sparsity.attention == "bidirectional" or not types_in(c):
        return
    if all(ATTENTION_FACTS[kind].is_in_blocks for kind in types_in(c)):
        yield Problem(
            "sparsity_config.attention",
            "leaves no layer that sees later tokens, from which masked tokens are predicted, too",
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
