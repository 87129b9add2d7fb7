"""Read the records written by the ranks of a run (`neox_model.train.callbacks.record`)."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from neox_config import finite_json
from neox_config.errors import NeoXError

__all__ = ["Record", "read_record"]

Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Record:
    """Records of all ranks of a run.

    Args:
        places: rank to its coordinates in the layout.
        steps: iteration to rank to its record of that step.
        states: iteration to rank to its record of the state after it.
    """

    places: dict[int, Line] = field(default_factory=dict)
    steps: dict[int, dict[int, Line]] = field(default_factory=lambda: defaultdict(dict))
    states: dict[int, dict[int, Line]] = field(default_factory=lambda: defaultdict(dict))

    def samples(self, iteration: int) -> tuple[list[str], str]:
        """Gather the digests of an iteration's samples, in the order of the whole batch.

        Returns:
            The digests, and which ranks read different samples although they must read the same.
        """
        lines = self.steps[iteration]
        readers: dict[int, tuple[int, list[list[str]]]] = {}
        apart = ""
        for rank, line in sorted(lines.items()):
            micro_batches, replica = line["samples"], self.places[rank]["data"]
            if not micro_batches:
                continue
            first, known = readers.setdefault(replica, (rank, micro_batches))
            if known != micro_batches:
                apart = (
                    apart or f"ranks {first} and {rank}, which share a copy of the model, read other samples"
                )
        most = max((len(found) for _, found in readers.values()), default=0)
        in_order = [
            sample
            for number in range(most)
            for _, (_, found) in sorted(readers.items())
            for sample in (found[number] if number < len(found) else [])
        ]
        return in_order, apart

    def micro_batches(self, iteration: int) -> dict[int, list[int]]:
        """Map each rank to the number of samples of each micro-batch that it read in an iteration."""
        return {
            rank: [len(found) for found in line["samples"]] for rank, line in self.steps[iteration].items()
        }


def read_record(folder: Path) -> Record:
    """Read the files of all ranks.

    Raises:
        NeoXError: a record is missing or damaged.
    """
    files = sorted(folder.glob("rank-*.jsonl"))
    if not files:
        raise NeoXError(
            f"{folder} contains no record; set --work-dir to a folder that all hosts and this machine share"
        )
    record = Record()
    tables = {"step": record.steps, "state": record.states}
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
            first, *lines = [finite_json.loads(line) for line in text.splitlines()]
            record.places[first["rank"]] = first
            for line in lines:
                tables[line["kind"]][line["iteration"]][first["rank"]] = line
        except OSError as error:
            raise NeoXError(f"cannot read {file}: {error.strerror}") from error
        except (ValueError, LookupError, TypeError) as error:
            raise NeoXError(f"{file} is damaged ({type(error).__name__}); run the command again") from error
    return record
