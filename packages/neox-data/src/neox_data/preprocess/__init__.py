"""From text files to indexed datasets."""

from neox_data.preprocess.run import Options, Summary, preprocess

__all__ = ["Options", "Summary", "preprocess"]
