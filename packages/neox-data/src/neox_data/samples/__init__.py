"""Sample index: which tokens belong to which training sample, and its files."""

from neox_data.samples.build_index import SampleIndex, build_sample_index
from neox_data.samples.index_cache import load_or_build

__all__ = ["SampleIndex", "build_sample_index", "load_or_build"]
