"""From text files to indexed datasets."""

from neox_data.preprocess.run import Options, preprocess
from neox_data.preprocess.summary import Summary

__all__ = ["Options", "Summary", "preprocess"]
