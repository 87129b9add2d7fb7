"""When the replicas of a training begin to take steps alone."""

from neox_config.facts.optimizers import OPTIMIZER_FACTS
from neox_config.schema.config import NeoXConfig

__all__ = ["first_local_step"]


def first_local_step(config: NeoXConfig) -> int | None:
    """Return the first update after which the weights of replicas may differ; None if there is none.

    While the number of iterations is not known (train_epochs), the training is taken to be long enough.
    """
    optimizer = config.optimizer.optimizer
    facts, params = OPTIMIZER_FACTS.get(optimizer.kind), optimizer.params
    if facts is None or not facts.local_states or params.local_step_clipper == 1:
        return None
    first, last = params.var_freeze_step + params.local_step_scaler + 1, config.training.train_iters
    return first if last is None or first <= last else None
