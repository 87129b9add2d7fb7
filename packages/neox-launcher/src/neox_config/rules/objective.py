"""Rules about the objective of the training."""

from collections.abc import Iterator

from neox_config.problems import Problem
from neox_config.schema.config import NeoXConfig


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
