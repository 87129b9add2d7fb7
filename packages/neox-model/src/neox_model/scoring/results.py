"""Results of an evaluation on texts and tasks: as text, as metrics, and as a file."""

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any

from neox_config import finite_json
from neox_config.atomic import write_new
from neox_config.errors import NeoXError
from neox_config.pluralize import pluralize
from neox_model.scoring.perplexity import CONFIDENCE, Perplexity

__all__ = ["Results", "write_results"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Results of one evaluation, on rank 0.

    Args:
        iteration: finished updates of the weights that were evaluated.
        perplexity: of the configured data; None without.
        per_character: also report the perplexity per character.
        tasks: what the harness returned; None without tasks.
        tables: the results of the tasks as text.
        seconds: duration.
    """

    iteration: int
    perplexity: Perplexity | None
    per_character: bool
    tasks: Mapping[str, Any] | None
    tables: str
    seconds: float

    def metrics(self) -> dict[str, float]:
        """Return the results as metrics: `eval_data/NAME`, `task/TASK/METRIC` and `.../METRIC_stderr`."""
        found: dict[str, float] = {}
        if self.perplexity is not None:
            rows = self.perplexity.rows(per_character=self.per_character)
            found |= {f"eval_data/{name}": ratio.value for name, ratio in rows.items()}
        for task, values in (self.tasks or {}).get("results", {}).items():
            for key, value in values.items():
                metric, comma, chosen = key.partition(",")
                if comma and isinstance(value, int | float):
                    suffix = "" if chosen == "none" else f"/{chosen}"
                    found[f"task/{task}/{metric}{suffix}"] = float(value)
        return found

    def __str__(self) -> str:
        lines = []
        if self.perplexity is not None:
            one = self.perplexity
            empty = (
                f" ({pluralize(one.empty_documents, 'empty one')} left out)" if one.empty_documents else ""
            )
            lines.append(
                f"{one.source}: {pluralize(one.documents, 'document')}{empty}, "
                f"{pluralize(one.tokens, 'token')}, {pluralize(one.num_bytes, 'byte')}, "
                f"{pluralize(one.characters, 'character')}"
            )
            rows = one.rows(per_character=self.per_character)
            width = max(map(len, rows))
            lines += [f"{name:{width}} {ratio}" for name, ratio in rows.items()]
            lines.append(f"in brackets: {CONFIDENCE:.0%} confidence intervals over {one.units}")
        return "\n".join([*lines, *filter(None, [self.tables])])

    def as_object(self) -> dict[str, Any]:
        """Return the results for JSON; those of tasks have the names that the harness gives them."""
        # Configurations of tasks may contain functions.
        tasks = json.loads(finite_json.dumps(dict(self.tasks or {}), default=str))
        found: dict[str, Any] = {"iteration": self.iteration, "seconds": round(self.seconds, 3), **tasks}
        if self.perplexity is not None:
            rows = self.perplexity.rows(per_character=self.per_character)
            over = f"{CONFIDENCE:.0%}, ratio estimator, normal approximation over {self.perplexity.units}"
            values = {name: asdict(ratio) for name, ratio in rows.items()}
            found["perplexity"] = {**self.perplexity.counts(), **values, "interval": over}
        return found


def write_results(prefix: str, results: Results, about: Mapping[str, Any]) -> Path:
    """Write `PREFIX_eval_results_yy-mm-dd-HH-MM.json`, GPT-NeoX's name; a number follows if it exists.

    Args:
        prefix: beginning of the file's name, with its folder; empty: the file is in the working directory.
        results: what to write.
        about: further entries: configuration and versions.

    Raises:
        NeoXError: the file cannot be written.
    """
    stamp = time.strftime("%y-%m-%d-%H-%M")
    name = f"{prefix}_eval_results_{stamp}" if prefix else f"eval_results_{stamp}"
    # Not ensure_ascii=False: a file name may have bytes that are not UTF-8.
    content = finite_json.dumps({**results.as_object(), **about}, indent=2)
    try:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        others = (Path(f"{name}-{number}.json") for number in count(2))
        path = write_new(chain([Path(f"{name}.json")], others), f"{content}\n")
    except OSError as error:
        raise NeoXError(
            f"cannot write the results of the evaluation to {name}.json: {error.strerror}; set another "
            "eval-results-prefix"
        ) from error
    logger.info("wrote the results to %s", path.absolute())
    return path
