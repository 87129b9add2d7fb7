"""Rules about maximal update parametrization (muP)."""

from collections.abc import Iterator

from neox_config.derive.attention_layers import types_in
from neox_config.facts.attention import ATTENTION_FACTS
from neox_config.facts.optimizers import OPTIMIZER_FACTS
from neox_config.problems import Problem, refusals
from neox_config.schema.config import NeoXConfig
from neox_config.schema.sections.mup import BaseShapes

_OPTIONAL = "num_layers"
_NOT_HERE = "is not described by muP"


def mup_knows_its_base(c: NeoXConfig) -> Iterator[Problem]:
    """Require the sizes of the base model, unless this run saves its own."""
    mup = c.mup
    missing = [name for name in BaseShapes.model_fields if getattr(mup.mup_base, name) is None]
    missing = [f"mup_base.{name}" for name in missing if name != _OPTIONAL]
    if mup.use_mup and mup.save_base_shapes and mup.base_shapes_file is None:
        yield Problem("save_base_shapes", "has no file to write", "set base-shapes-file")
    elif mup.use_mup and not mup.save_base_shapes and missing:
        yield Problem(
            "use_mup",
            f"requires the sizes of the base model, of which {', '.join(missing)} are not given",
            "set them, or a base-shapes-file, which a start of the base model with save-base-shapes: true "
            "writes",
        )


def mup_knows_the_optimizer(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse optimizers without a rule for widths, and weight decay that is a part of Adam's gradient."""
    optimizer = c.optimizer.optimizer
    facts = OPTIMIZER_FACTS.get(optimizer.kind)
    if not c.mup.use_mup or facts is None:
        return
    if facts.width_rule is None:
        known = [each.name for each in OPTIMIZER_FACTS.values() if each.width_rule is not None]
        yield Problem("optimizer.type", "has no known rule for the widths of muP", f"use {', '.join(known)}")
    is_coupled = {"cpu_torch_adam": True, "adam": not optimizer.params.adam_w_mode}
    is_coupled["cpu_adam"] = is_coupled["adam"]
    if is_coupled.get(optimizer.kind) and optimizer.params.weight_decay:
        yield Problem(
            "optimizer.params.weight_decay",
            "is a part of the gradient with this optimizer, where no multiple of it acts alike at all widths",
            "use AdamW, or set weight_decay: 0",
        )


def mup_knows_the_layers(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse layers, heads and positions whose weights have no rule, and init methods without a scale."""
    if not c.mup.use_mup:
        return iter(())
    others = sorted(kind for kind in types_in(c) if not ATTENTION_FACTS[kind].has_heads)
    positions, no_std = c.attention.pos_emb, "has no standard deviation that muP can change"
    return refusals(
        (others, "attention_config", f"has {', '.join(others)} layers: their gate {_NOT_HERE}", "use global"),
        (
            c.model.objective == "ict",
            "use_mup",
            f"with objective: ict: its head {_NOT_HERE}",
            "set use-mup: false",
        ),
        (positions == "rpe", "pos_emb", f"rpe: its table {_NOT_HERE}", "use rotary"),
        (
            positions == "sinusoidal" and c.mup.mup_embedding_mult * c.mup.mup_rp_embedding_mult != 1,
            "mup_rp_embedding_mult",
            "times mup-embedding-mult multiplies learned positions only, and these are sinusoidal",
            "set both to 1, or pos-emb: learned",
        ),
        ("orthogonal" in c.model.init_method, "init_method", no_std, "use normal"),
        ("orthogonal" in c.model.output_layer_init_method, "output_layer_init_method", no_std, "use normal"),
    )


def mup_scales_branches_before_they_are_added(c: NeoXConfig) -> Iterator[Problem]:
    """Refuse another depth than the base model's where 1/L of a branch is not 1/L of its last matrix."""
    depth = c.mup.mup_base.num_layers
    if not c.mup.use_mup or depth in (None, c.model.num_layers):
        return
    if c.model.norm_placement != "before":
        yield Problem(
            "mup_base.num_layers",
            "is not num-layers, but a norm of what sublayers return undoes any factor of it",
            f"set it to {c.model.num_layers}, or norm-placement: before",
        )
    if c.model.num_unique_layers not in (None, c.model.num_layers):
        yield Problem(
            "mup_base.num_layers",
            "is not num-layers, and layers share weights, which are then updated for several places",
            f"set it to {c.model.num_layers}, or remove num-unique-layers",
        )
