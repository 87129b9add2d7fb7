"""What PyTorch's flight recorder knows of this process: the last collective of each process group.

It records when TORCH_FR_BUFFER_SIZE is set, as nodes set it for jobs whose hangs are reported. Numbers are
those of begun collectives: over gloo, finished ones keep the state `scheduled`.
"""

import json
from typing import Any

from torch._C import _distributed_c10d

__all__ = ["last_collectives", "newest_per_group"]

# Which of them a build of PyTorch has depends on its communication libraries.
_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")


def last_collectives() -> str:
    """Process group -> [number, name] of the last collective begun, as JSON; callable in any thread."""
    entries: list[dict[str, Any]] = []
    for name in _DUMPS:
        dump = getattr(_distributed_c10d, name, None)
        if dump is not None:
            entries += json.loads(dump()).get("entries", [])
    return json.dumps(newest_per_group(entries))


def newest_per_group(entries: list[dict[str, Any]]) -> dict[str, tuple[int, str]]:
    """The last collective of each group among a flight recorder's entries; sends have no order."""
    newest: dict[str, tuple[int, str]] = {}
    for entry in entries:
        if entry.get("is_p2p"):
            continue
        group = ":".join(entry["process_group"])
        begun = (int(entry["collective_seq_id"]), str(entry["profiling_name"]))
        newest[group] = max(begun, newest.get(group, begun))
    return newest
