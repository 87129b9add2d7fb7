"""Tasks of lm-evaluation-harness (lm_eval): our model as one of its models, and running tasks.

Every rank runs the harness on all questions, so that all build the same requests; each replica then computes
its share of them, and all receive the results.
"""

import logging
import os
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import filter as matching
from typing import Any, TypeVar

import evaluate as metric_hub
import lm_eval.api.task
import tqdm
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import evaluate
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import make_table

from neox_config.errors import ConfigError, NeoXError
from neox_config.problems import did_you_mean
from neox_model.errors import ModelError
from neox_model.generate.batch import Request
from neox_model.generate.engine import Reply, not_finite
from neox_model.generate.modes import Job
from neox_model.generate.sampling import Sampling
from neox_model.metrics.progress_lines import ProgressLines
from neox_model.parallel.random import mixed_seed
from neox_model.scoring.endings import NotFiniteError, gather_in_sections
from neox_model.scoring.scorer import Part, Scorer, rolling_parts
from neox_model.scoring.texts import TextEncoder

__all__ = ["HarnessModel", "Tasks", "table_of"]

# As in the harness: the default of its command line, and of its models.
_FEWSHOT_SEED = 1234
_MAXIMUM_TOKENS = 256
# For standard errors of metrics that have no formula; these are then known to about 2 %.
_RESAMPLES = 1000
# Arguments of generation that change nothing at these values.
_NO_EFFECT: Mapping[str, Any] = {"num_beams": 1, "num_return_sequences": 1, "use_cache": True, "min_p": 0.0}

logger = logging.getLogger(__name__)

_Item = TypeVar("_Item")
_Found = TypeVar("_Found")


class HarnessModel(TemplateLM):
    """A copy of our model, with the interface of a model of the harness.

    Args:
        scorer: computes log-likelihoods.
        job: how texts are generated.
    """

    def __init__(self, scorer: Scorer, job: Job) -> None:
        super().__init__()
        self._scorer, self._job, self._tokenizer = scorer, job, job.tokenizer
        self._encoder = TextEncoder(job.tokenizer)
        self._prefix_text = job.tokenizer.decode([self._encoder.prefix])

    @property
    def eot_token_id(self) -> int:
        """Return the id of end-of-document."""
        return self._tokenizer.end_of_document

    @property
    def prefix_token_id(self) -> int:
        """Return the id of the token before a text."""
        return self._encoder.prefix

    @property
    def max_length(self) -> int:
        """Return the maximum number of tokens of the model's input."""
        return self._scorer.seq_length

    @property
    def tokenizer_name(self) -> str:
        """Return a name for caches of requests; none are used."""
        return "neox"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the ids of a text, as the harness's Hugging Face backend does.

        They include those that the tokenizer adds to a text, unless `add_special_tokens` is False or the text
        begins with the token before texts.
        """
        has_prefix = add_special_tokens is None and string.startswith(self._prefix_text)
        if has_prefix or add_special_tokens is False:
            return self._encoder.inner(string)
        return self._tokenizer.encode(string)

    def _shared(
        self, items: Sequence[_Item], work: Callable[[Sequence[_Item]], Iterator[list[tuple[int, _Found]]]]
    ) -> list[_Found]:
        """Return what `work` yields for all items, by number; each replica processes every n-th. Collective.

        If the harness distributed the questions, their examples would depend on the number of replicas.
        """
        replicas = self._job.groups.data
        mine = items[replicas.rank :: replicas.size]
        found = gather_in_sections(self._job.groups.control, _logged(work(mine), len(mine)))
        parts = [dict(found[rank]) for rank in replicas.ranks]
        return [parts[number % replicas.size][number // replicas.size] for number in range(len(items))]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """Return (log-likelihood, whether it is the greedy text) of each (texts, context, continuation)."""
        parts = [Part(context, continuation) for _, context, continuation in requests]
        # Every rank has all of them, and so raises the same error.
        self._scorer.check(parts)
        scores = self._shared(parts, self._scorer.turns)
        return [(score.log_likelihood, score.is_greedy) for score in scores]

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each whole text, after the token before texts.

        As in the harness's Hugging Face backend, the text has what the tokenizer adds to it, so that a BOS
        occurs twice and the second one is scored.
        """
        parts = [
            rolling_parts(
                self.tok_encode(request.args[0]), prefix=self.prefix_token_id, seq_length=self.max_length
            )
            for request in requests
        ]
        scores = iter(self._shared([part for each in parts for part in each], self._scorer.turns))
        return [sum(next(scores).log_likelihood for _ in each) for each in parts]

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the continuation of each context, up to its first stop string.

        A context that leaves no room for the maximum number of tokens loses its beginning.
        """
        seen: Counter[Any] = Counter()
        made = []
        for request in requests:
            seen[request.doc_id] += 1
            made.append(self._request(*request.args, number=(request.doc_id, seen[request.doc_id])))
        return self._shared(made, self._generate)

    def _generate(self, requests: Sequence[Request]) -> Iterator[list[tuple[int, str]]]:
        """Yield (number, text) of the texts that some tokens completed, longest prompts first."""
        if not requests:
            return
        capacity = max(max(1, len(one.prompt)) + one.maximum_tokens for one in requests)
        order = sorted(range(len(requests)), key=lambda number: -len(requests[number].prompt))
        slots = min(self._job.settings.generation_batch_size, len(requests))
        engine = self._job.engine(slots, min(self.max_length, capacity))
        numbers = {engine.submit(requests[number]): number for number in order}
        while engine.is_busy:
            self._scorer.continue_or_stop()
            updates = [(numbers[update.ticket], update.reply) for update in engine.step()]
            replies = [(number, reply) for number, reply in updates if reply is not None]
            if not all(reply.is_finite for _, reply in replies):
                raise NotFiniteError(not_finite())
            yield [(number, self._alone(reply)) for number, reply in replies]

    def _alone(self, reply: Reply) -> str:
        """Return a text as the harness's backend for transformers does, which decodes it without its prompt.

        Decoders of SentencePiece then drop its first space.
        """
        keeps = self._tokenizer.decode(reply.tokens).startswith(" ")
        return reply.text if keeps else reply.text.removeprefix(" ")

    def _request(self, context: str, given: Mapping[str, Any], *, number: tuple[Any, int]) -> Request:
        settings = dict(normalize_gen_kwargs(dict(given), _MAXIMUM_TOKENS))
        maximum_tokens = int(settings.pop("max_gen_toks"))
        until = settings.pop("until", None) or []
        stop_strings = tuple(one for one in ([until] if isinstance(until, str) else until) if one)
        is_sampled = bool(settings.pop("do_sample", False))
        temperature = float(settings.pop("temperature", 1.0))
        sampling = Sampling(
            temperature=temperature if is_sampled else 0.0,
            top_k=int(settings.pop("top_k", 0) or 0),
            top_p=float(settings.pop("top_p", 0.0) or 0.0),
            repetition_penalty=float(settings.pop("repetition_penalty", 1.0)),
            seed=mixed_seed("task", self._job.sampling_seed, *number),
        )
        unknown = [name for name, value in settings.items() if value != _NO_EFFECT.get(name)]
        if unknown:
            raise ModelError(
                f"a task sets {', '.join(unknown)} in generation_kwargs, which this model does not have; use "
                "until, max_gen_toks, do_sample, temperature, top_k, top_p and repetition_penalty"
            )
        room = self.max_length - maximum_tokens
        if room <= 0:
            raise ModelError(
                f"a task generates up to {maximum_tokens:,} tokens, but seq-length is {self.max_length:,}; "
                "set a smaller max_gen_toks in its generation_kwargs"
            )
        return Request(
            prompt=self.tok_encode(context)[-room:],
            maximum_tokens=maximum_tokens,
            sampling=sampling,
            stop_strings=stop_strings,
        )


class Tasks:
    """Tasks that were found and loaded, which may run many times.

    Args:
        names: names of tasks, groups or tags, and patterns (`mmlu_*`) of names of tasks.
        include_path: folder with further tasks; None: only those of the harness.
        num_fewshot: examples before each question; None: as each task declares.
        limit: examples of each task; None: all.
        shows_progress: show the harness's progress bars.

    Raises:
        ConfigError: there is no such task, or it cannot be loaded.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        include_path: str | None,
        num_fewshot: int | None,
        limit: int | None,
        shows_progress: bool = True,
    ) -> None:
        logger.info("loading the tasks of lm_eval: %s", ", ".join(names))
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        for name in ("datasets", "huggingface_hub"):
            # Their records also reach our handler.
            logging.getLogger(name).handlers.clear()
        self._shows_progress = shows_progress
        manager = TaskManager(include_path=include_path)
        names = _named(names, manager, include_path)
        with _guarded(names, "loaded", failure=ConfigError), _progress_bars(shows_progress):
            self._loaded = manager.load(names)
        self._limit = limit
        for task in self._loaded["tasks"].values():
            own = task.get_config("num_fewshot")
            # As the harness does: a task that declares 0 always has no examples.
            if own is None or (num_fewshot is not None and own != 0):
                task.set_config(key="num_fewshot", value=num_fewshot or 0)

    def run(self, model: HarnessModel) -> dict[str, Any]:
        """Run the tasks. Collective over all ranks; returns the harness's results.

        Raises:
            ModelError: a task fails, requests a metric that would be downloaded, or has a request that this
                model does not serve.
        """
        for task in self._loaded["tasks"].values():
            # Each run draws the same examples.
            task.set_fewshot_seed(seed=_FEWSHOT_SEED)
        # Otherwise the harness starts processes, which a process with threads of gloo and CUDA must not.
        os.environ["DISABLE_MULTIPROC"] = "1"
        with (
            _guarded(list(self._loaded["tasks"]), "run", failure=ModelError),
            _progress_bars(self._shows_progress),
        ):
            found = evaluate(
                lm=model,
                task_dict=self._loaded,
                limit=self._limit,
                bootstrap_iters=_RESAMPLES,
                log_samples=False,
            )
        assert found is not None, "the harness returns results on each of its ranks 0, which all ranks are"
        return dict(found)


def _logged(turns: Iterable[list[_Item]], count: int) -> Iterator[list[_Item]]:
    """Yield the results of turns, and log from time to time how many there are."""
    progress = ProgressLines("eval-tasks", "answers scored", count)
    for found in turns:
        progress.add(len(found))
        yield found


def _named(names: Sequence[str], manager: TaskManager, include_path: str | None) -> list[str]:
    """Return the names of tasks, groups and tags, with the tasks that patterns match in their place."""
    found: list[str] = []
    for name in names:
        # Not groups, because the harness refuses a task that is also in one of its groups.
        matches = [name] if name in manager.all_tasks else matching(manager.all_subtasks, name)
        if not matches:
            where = f" and the valid YAML files (.yaml) of {include_path}" if include_path else ""
            hint = did_you_mean(name, manager.all_tasks) or "see lm_eval ls tasks"
            raise ConfigError(f"eval-tasks: there is no task {name!r} in lm_eval{where}; {hint}")
        found += matches
    return list(dict.fromkeys(found))


@contextmanager
def _progress_bars(shows: bool) -> Iterator[None]:
    """Hide the progress bars of all libraries within the block, unless they are shown."""
    if shows:
        yield
        return
    begin = tqdm.tqdm.__init__

    def hidden(bar: tqdm.tqdm, *arguments: Any, **options: Any) -> None:
        begin(bar, *arguments, **{**options, "disable": True})

    tqdm.tqdm.__init__ = hidden
    try:
        yield
    finally:
        tqdm.tqdm.__init__ = begin


def table_of(results: Mapping[str, Any]) -> str:
    """Return the results of tasks, and of groups if there are any, as text."""
    tables = [make_table(results)]
    if results.get("groups"):
        tables.append(make_table(results, "groups"))
    return "\n".join(tables).rstrip()


@contextmanager
def _guarded(names: Sequence[str], action: str, *, failure: type[NeoXError]) -> Iterator[None]:
    """Convert what tasks raise, which are YAML, templates and functions of others; refuse their downloads.

    The harness would download and run metrics that it does not have, and may ignore the refusal. What our
    model raises while it computes is raised as it is.
    """
    refused: list[str] = []

    def refuse(name: str, *_: Any, **__: Any) -> None:
        refused.append(name)
        raise ModelError(f"the metric {name} would be downloaded")

    def refusal() -> NeoXError:
        return failure(
            f"eval-tasks: the metric {', '.join(dict.fromkeys(refused))} is not part of lm_eval and would be "
            "downloaded; use a metric of lm_eval, or process_results"
        )

    kept, metric_hub.load = metric_hub.load, refuse
    try:
        yield
    except Exception as error:
        if refused:
            raise refusal() from error
        # While the model computes.
        computing = HarnessModel._shared.__code__
        frames = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
        if isinstance(error, NeoXError) or computing in frames:
            raise
        raise failure(_reason(names, action, error)) from error
    finally:
        metric_hub.load = kept
    if refused:
        raise refusal()


def _reason(names: Sequence[str], action: str, error: Exception) -> str:
    owners = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    found = [owner.task_name for owner in owners if isinstance(owner, lm_eval.api.task.ConfigurableTask)]
    # The task in whose methods it was raised; all if it is unknown.
    failed = [name for name in found[:1] if name in names] or names
    what = f"eval-tasks: {', '.join(failed)} cannot be {action}"
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ConnectionError):
        cause = cause.__cause__ or cause.__context__
    if action == "loaded" and cause is not None:
        return (
            f"{what}: the task's data cannot be downloaded ({type(error).__name__}); run the evaluation once "
            "on a host with a network, copy the folder that HF_HOME names from there to this host, and set "
            "HF_DATASETS_OFFLINE=1 and HF_HUB_OFFLINE=1"
        )
    last = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{last.filename}:{last.lineno}"
    return (
        f"{what}: {type(error).__name__}: {error} ({place}); correct the task, or make its data available on "
        "this host"
    )
