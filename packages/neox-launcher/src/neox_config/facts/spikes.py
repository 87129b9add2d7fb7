"""Loss spikes: the limit above which a loss is one, and the exit codes of runs that end with one."""

__all__ = ["DEVIATIONS_PER_MAD", "LEAST_DEVIATION", "LEFT_OUT", "REPEATED_SPIKES", "ROLLBACK"]

DEVIATIONS_PER_MAD = 1.4826
"""The standard deviation of a normal distribution, in median absolute deviations."""

LEAST_DEVIATION = 1e-3
"""Lower bound of the deviation, as a share of the median: losses that hardly vary have a deviation near 0."""

ROLLBACK = 4
"""Exit code of a run that ends in order to be resumed without the batches of a spike."""

REPEATED_SPIKES = 5
"""Exit code of a run that ends because spikes repeat; a restart would only repeat them."""

LEFT_OUT = "left-out.json"
"""File in the folder of checkpoints that lists the samples that a rollback leaves out."""
