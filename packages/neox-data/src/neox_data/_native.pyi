import numpy as np

class MersenneTwister:
    def __init__(self, seed: int) -> None: ...
    def shuffle(self, values: np.ndarray) -> None: ...

class SampleReader:
    def __init__(
        self,
        tokens: np.ndarray,
        is_signed: bool,
        places: np.ndarray,
        place_bytes: int,
        sizes: np.ndarray,
        documents: np.ndarray,
        starts: np.ndarray,
        shuffle: np.ndarray,
        length: int,
    ) -> None: ...
    def read(self, item: int) -> np.ndarray | None: ...

def count_tokens(documents: np.ndarray, sizes: np.ndarray) -> int: ...
def sample_starts(stream: np.ndarray, sizes: np.ndarray, starts: np.ndarray, seq_length: int) -> None: ...
def blend_order(
    weights: np.ndarray,
    order: np.ndarray,
    taken_before: np.ndarray,
    block: int,
    most_scanned: int,
    most_lanes: int = 8,
) -> None: ...
