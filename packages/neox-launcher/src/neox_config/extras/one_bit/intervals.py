"""When 0/1 Adam changes its variance, and when it synchronizes the weights of replicas."""

from dataclasses import dataclass

__all__ = ["Intervals"]


@dataclass(frozen=True, slots=True)
class Intervals:
    """Which updates change the variance, and after which the weights of replicas are synchronized.

    Args:
        var_freeze_step: last update that may change the variance.
        var_update_scaler: number of changes of the variance after which their interval doubles, from 1.
        local_step_scaler: number of updates, after `var_freeze_step`, after which the interval between
            synchronizations doubles, from 1.
        local_step_clipper: largest interval between synchronizations.

    Source: arXiv:2202.06009, section 6 (the policies for both sets of steps); the names are DeepSpeed's.
    """

    var_freeze_step: int = 100_000
    var_update_scaler: int = 16
    local_step_scaler: int = 32_678
    local_step_clipper: int = 16

    def updates_variance(self, update: int) -> bool:
        """Return True if an update, counted from 1, changes the variance."""
        if update > self.var_freeze_step:
            return False
        doublings = ((update - 1) // self.var_update_scaler + 1).bit_length() - 1
        last_of_smaller_interval = self.var_update_scaler * ((1 << doublings) - 1)
        return (update - last_of_smaller_interval) % (1 << doublings) == 0

    def synchronizes(self, update: int) -> bool:
        """Return True if the weights of replicas are the same after an update, counted from 1."""
        return update % self._interval(update) == 0

    def last_synchronized(self, update: int) -> int:
        """Return the last update, up to this one, after which the weights of replicas are the same."""
        while not self.synchronizes(update):
            begin = self.var_freeze_step + 1 + self._doublings(update) * self.local_step_scaler
            # Where the present interval has no such update, the last one of the interval before.
            update = max(update - update % self._interval(update), begin - 1)
        return update

    def _interval(self, update: int) -> int:
        return min(1 << self._doublings(update), self.local_step_clipper)

    def _doublings(self, update: int) -> int:
        local = max(update - self.var_freeze_step - 1, 0)
        return min(local // self.local_step_scaler, self.local_step_clipper.bit_length())
