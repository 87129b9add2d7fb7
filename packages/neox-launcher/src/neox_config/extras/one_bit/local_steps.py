"""When the replicas of a run take steps alone."""

from neox_config.extras.one_bit.intervals import Intervals
from neox_config.facts.optimizers import OPTIMIZER_FACTS
from neox_config.schema.config import NeoXConfig

__all__ = ["first_local_step", "last_average"]


def first_local_step(config: NeoXConfig) -> int | None:
    """Return the first update after which the weights of replicas may differ; None if there is none.

    While the number of iterations is not known (train_epochs), the run is taken to be long enough.
    """
    optimizer = config.optimizer.optimizer
    facts, params = OPTIMIZER_FACTS.get(optimizer.kind), optimizer.params
    if facts is None or not facts.local_states or params.local_step_clipper == 1:
        return None
    first, last = params.var_freeze_step + params.local_step_scaler + 1, config.training.train_iters
    return first if last is None or first <= last else None


def last_average(config: NeoXConfig) -> int | None:
    """Return the last iteration after which the weights of replicas are the same, if no update is skipped.

    None if they always are, or if the number of iterations is not known.
    """
    last = config.training.train_iters
    if last is None or first_local_step(config) is None:
        return None
    params = config.optimizer.optimizer.params
    intervals = Intervals(
        var_freeze_step=params.var_freeze_step,
        var_update_scaler=params.var_update_scaler,
        local_step_scaler=params.local_step_scaler,
        local_step_clipper=params.local_step_clipper,
    )
    return intervals.last_synchronized(last)
