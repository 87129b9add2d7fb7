"""Read the last collective of each process group from PyTorch's flight recorder.

It records if TORCH_FR_BUFFER_SIZE is set; agents set it for jobs with hang reports. Numbers count started
collectives: with gloo, finished ones keep the state `scheduled`.
"""

import json
from typing import Any

from neox_model.torch_compat import flight_recorder_entries

__all__ = ["last_collectives", "newest_per_group"]


def last_collectives() -> str:
    """Return JSON: process group -> [number, name] of the last started collective. Callable in any thread."""
    return json.dumps(newest_per_group(flight_recorder_entries()), allow_nan=False)


def newest_per_group(entries: list[dict[str, Any]]) -> dict[str, tuple[int, str]]:
    """Return the last collective of each group in a flight recorder's entries; sends are skipped."""
    newest: dict[str, tuple[int, str]] = {}
    for entry in entries:
        if entry.get("is_p2p"):
            continue
        group = ":".join(entry["process_group"])
        begun = (int(entry["collective_seq_id"]), str(entry["profiling_name"]))
        newest[group] = max(begun, newest.get(group, begun))
    return newest
