"""A trained model in this process: load, generate, logits."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args, overload

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from neox_config import NeoXConfig, Resolved, resolve
from neox_config import load_config as load_files
from neox_config.derive.objective import WITHOUT_TEXTS
from neox_config.errors import ConfigError, NeoXError
from neox_config.names import answer
from neox_config.pluralize import pluralize
from neox_config.problems import Problem, config_error, in_words
from neox_config.read.wording import sentence_about
from neox_config.rules import broken_rules
from neox_config.schema.config import as_written
from neox_config.schema.sections.checkpoint import CheckpointSection
from neox_config.schema.sections.generation import GenerationSection
from neox_config.schema.sections.precision import PrecisionSection
from neox_config.spec.model import ModelSpec, Retrieval, Vocabulary
from neox_config.spec.recorded import MODEL_SECTIONS, fusions_off
from neox_config.spec.run import AnyDataType, DataType, RunSpec
from neox_data.preprocess.chat_template import ChatTemplate, load_chat_template
from neox_data.preprocess.chat_tokens import encode_conversation, end_of_answer, ends_of_answers
from neox_data.preprocess.conversations import messages_in
from neox_data.tokenizers import Tokenizer
from neox_launcher.plan.epochs import without_passes
from neox_launcher.plan.preflight import refuse_worker_by_hand
from neox_model.api.alone import plain_state
from neox_model.api.configuration import as_text, load_config
from neox_model.assembly.as_sequential import SequentialModel
from neox_model.assembly.choices import DTYPES, computing_device
from neox_model.checkpoint.contents import Manifest
from neox_model.checkpoint.errors import CheckpointError
from neox_model.checkpoint.names import is_score
from neox_model.convert.checkpoints import Checkpoint, build_sequential, load_into
from neox_model.convert.from_hf import HuggingFaceModel, open_hf
from neox_model.convert.yaml_file import TRAINING
from neox_model.generate.chat_template import configured_template
from neox_model.generate.engine import Reply, Update
from neox_model.generate.forward import Forward
from neox_model.generate.modes import Job, check_numbers, replies
from neox_model.generate.run import explained_shortage, load_forward
from neox_model.inspection.finding import find_checkpoint, is_model
from neox_model.parallel.groups import SINGLE_PROCESS
from neox_model.parallel.logical import Writable, named_logical_parameters
from neox_model.processes import load_tokenizer
from neox_model.worker import our_errors

__all__ = ["DataType", "Model", "load_model"]

# Other parameters of generation are about prompts and files of the command, and evaluations.
_SETTINGS = (
    *("maximum_tokens", "temperature", "top_k", "top_p", "repetition_penalty"),
    *("stop_strings", "stop_tokens"),
    *("sampling_seed", "generation_batch_size", "recompute"),
)
# Endings of configuration files.
_CONFIGURATIONS = (".yml", ".yaml")


@dataclass(eq=False, repr=False)
class Model:
    """A model that generates text and computes logits. Build one with `load_model`, or `Trainer.model`.

    Args:
        module: the model, in evaluation.
        resolved: its configuration.
        tokenizer: its tokenizer.
        source: where its weights were read from.

    Attributes:
        module: the model, a `torch.nn.Module`: `module(tokens_BS)` returns logits over the padded vocabulary,
            with gradients.
        config: its configuration.
        tokenizer: its tokenizer: `encode`, `decode`, `vocab_size`, `end_of_document`.
        source: where its weights were read from.
    """

    module: SequentialModel
    resolved: Resolved
    tokenizer: Tokenizer
    source: str = "a run"

    @property
    def config(self) -> NeoXConfig:
        """Return its configuration."""
        return self.resolved.config

    def __repr__(self) -> str:
        section, count = self.config.model, sum(each.numel() for each in self.module.parameters())
        dtype = str(next(self.module.parameters()).dtype).removeprefix("torch.")
        return (
            f"<Model of {self.source}: {pluralize(section.num_layers, 'layer')}, hidden size "
            f"{section.hidden_size:,}, {pluralize(count, 'parameter')} in {dtype} on {self.device}>"
        )

    @property
    def settings(self) -> dict[str, Any]:
        """Return the parameters of the model, its tokenizer, stop tokens and class that are not the default.

        Together with parameters of a run they are a configuration: `load_config(model.settings, {...})`.
        """
        found: dict[str, Any] = {}
        for name in MODEL_SECTIONS:
            section = getattr(self.config, name)
            # How the model is computed is not part of it.
            computed = set(fusions_off(section))
            found |= section.model_dump(mode="json", exclude_defaults=True, exclude=computed)
        others = (self.config.generation, "stop_tokens"), (self.config.checkpoint, "hf_family")
        for section, name in others:
            found |= section.model_dump(mode="json", exclude_defaults=True, include={name})
        return as_written(found)

    @property
    def device(self) -> torch.device:
        """Return the device of the model."""
        return self._forward().device

    @overload
    def generate(self, prompts: str, **settings: Any) -> Reply: ...

    @overload
    def generate(self, prompts: Sequence[str], **settings: Any) -> list[Reply]: ...

    def generate(self, prompts: str | Sequence[str], **settings: Any) -> Reply | list[Reply]:
        """Return the continuation of a prompt, or of each of several, which are generated together.

        The texts are those of `neox-launch generate` with the same prompts and parameters.

        Args:
            prompts: a prompt or several; an empty one starts a new document.
            settings: parameters of the configuration: `maximum_tokens`, `temperature`, `top_k`, `top_p`,
                `repetition_penalty`, `stop_strings`, `stop_tokens`, `sampling_seed`,
                `generation_batch_size`, `recompute`; others have the values of `config`.

        Raises:
            ConfigError: a setting is unknown or has an invalid value.
            NeoXError: the device has too little memory, or the model's output is not finite.
        """
        contexts = _texts(prompts)
        job = self._job(settings)
        with self._computing(), explained_shortage():
            found = list(replies(job, contexts, range(len(contexts))))
        return found[0] if isinstance(prompts, str) else found

    def stream(self, prompt: str, **settings: Any) -> Iterator[str]:
        """Yield the continuation of a prompt as it is generated.

        Args:
            prompt: the prompt; an empty one starts a new document.
            settings: as for `generate`.

        Raises:
            ConfigError: a setting is unknown or has an invalid value.
            NeoXError: the prompt fills the model's longest sequence, the device has too little memory, or the
                model's output is not finite.
        """
        job = self._job(settings)
        _texts([prompt])
        with our_errors():
            tokens = job.tokenizer.encode(prompt) if prompt else []
        yield from (update.text for update in self._updates(job, tokens) if update.text)

    def chat(
        self, messages: list[dict[str, Any]], *, template: str | Path | None = None, **settings: Any
    ) -> Reply:
        """Return the answer to a conversation, which the chat template writes as a prompt.

        It ends where an answer of `neox-launch serve` ends: at end-of-document, `stop_tokens`, and the
        special token with which the template ends an answer.

        Args:
            messages: dictionaries with `role` and `content`, in a list.
            template: a file of Jinja, or the folder of a tokenizer; None: `serve.chat_template`, or the one
                in the folder of the tokenizer.
            settings: as for `generate`.

        Raises:
            ConfigError: a setting is unknown or has an invalid value.
            NeoXError: there is no template, it does not accept the messages, they fill the model's longest
                sequence, the device has too little memory, or the model's output is not finite.
        """
        with our_errors():
            found = self._template(template)
            text = _written(found, messages)
            tokens = encode_conversation(text, self.tokenizer)
            ends = ends_of_answers(found, end_of_answer(found, self.tokenizer))
        job = self._job(settings)
        stops = {"stop_strings": (*job.settings.stop_strings, *ends)}
        job = replace(job, settings=job.settings.model_copy(update=stops))
        (reply,) = [update.reply for update in self._updates(job, tokens) if update.reply is not None]
        return reply

    def _template(self, given: str | Path | None) -> ChatTemplate:
        if given is not None:
            return load_chat_template(Path(given))
        file = self.config.tokenizer.vocab_file
        found = configured_template(self.config.serving.serve.chat_template, file)
        if found is None:
            raise NeoXError(
                f"there is no chat template next to the tokenizer{f' {file}' if file else ''}; pass "
                "template=PATH of a file of Jinja, or of the folder of a tokenizer"
            )
        return found

    def _updates(self, job: Job, tokens: Sequence[int]) -> Iterator[Update]:
        """Yield what each step adds to the continuation of token ids."""
        capacity = min(job.seq_length, max(1, len(tokens)) + job.settings.maximum_tokens)
        with self._computing(), explained_shortage():
            engine = job.engine(1, capacity)
        engine.submit(job.request(tokens, 0))
        while engine.is_busy:
            with self._computing(), explained_shortage():
                updates = engine.step()
            for update in updates:
                yield update
                if update.reply is not None and update.reply.finish_reason == "prompt-too-long":
                    raise NeoXError(f"{update.reply.message}; use a shorter prompt")
                if update.reply is not None:
                    check_numbers(update.reply, 0)

    def logits(self, text: str | Sequence[int]) -> Tensor:
        """Return logits_SV of the token after each token of a text, over the tokenizer's vocabulary.

        Those of a masked model are of the token at each place.

        Args:
            text: a text, or token ids.

        Raises:
            NeoXError: it has no token, more than the model's longest sequence, or one outside the vocabulary.
        """
        with our_errors():
            tokens = self.tokenizer.encode(text) if isinstance(text, str) else [int(token) for token in text]
        longest, entries = self.config.model.seq_length, self.tokenizer.vocab_size
        if not tokens:
            raise NeoXError("an empty text has no logits; pass a text or token ids")
        if len(tokens) > longest:
            raise NeoXError(
                f"the text has {len(tokens):,} tokens, but the model's longest sequence has {longest:,}; "
                "pass at most as many"
            )
        if not 0 <= min(tokens) <= max(tokens) < entries:
            raise NeoXError(
                f"token {max(tokens) if max(tokens) >= entries else min(tokens)} is outside the vocabulary, "
                f"which has {entries:,} entries; pass ids of the model's tokenizer"
            )
        with self._computing(), explained_shortage():
            return self.module(torch.tensor([tokens], device=self.device))[0, :, :entries]

    def copy_to(self, module: nn.Module, *, writable: Writable = nullcontext) -> None:
        """Copy the weights to a module with the same logical parameters; see `Trainer(start_from=...)`.

        Args:
            module: the module.
            writable: context manager that returns the tensor to fill for one of its parameters; None: other
                ranks fill it.

        Raises:
            NeoXError: it is a model of another architecture or vocabulary.
        """
        held = dict(named_logical_parameters(self.module))
        # A run that prunes has new scores.
        wanted = {
            name: parameter
            for name, parameter in named_logical_parameters(module)
            if name in held or not is_score(name)
        }
        for name in sorted(held.keys() ^ wanted.keys()):
            has, lacks = ("start_from", "the run") if name in held else ("the run", "start_from")
            raise NeoXError(
                f"{name} is in the model of {has} but not of {lacks}; start from model.settings in the "
                "configuration"
            )
        with torch.no_grad():
            for name, parameter in wanted.items():
                there = tuple(parameter.logical.shape)  # type: ignore[attr-defined]
                if there != tuple(held[name].shape):
                    raise NeoXError(
                        f"{name} has the shape {tuple(held[name].shape)} here and {there} in the run; "
                        "start from model.settings in the configuration"
                    )
                with writable(parameter) as target:
                    if target is not None:
                        target.copy_(held[name])

    def _forward(self) -> Forward:
        """Return a forward pass with its own key-value caches, so that generations can be interleaved."""
        return Forward(
            self.module,
            hidden_size=self.resolved.model.width,
            vocab_size=self.tokenizer.vocab_size,
            model_vocab_size=self.resolved.model.embedding.entries(self.tokenizer.vocab_size),
        )

    def _job(self, settings: Mapping[str, Any]) -> Job:
        section, problems = _changed(self.config.generation, settings)
        config = self.config.model_copy(update={"generation": section})
        problems += [problem for problem in broken_rules(config, {}) if problem.name in _SETTINGS]
        if problems:
            raise config_error(problems, ["generate"])
        if self.resolved.model.is_encoder:
            raise ConfigError(f"objective: {self.config.model.objective}: {WITHOUT_TEXTS}")
        return Job(
            section,
            self._forward(),
            self.tokenizer,
            SINGLE_PROCESS,
            seed=self.config.training.seed,
            seq_length=self.config.model.seq_length,
        )

    @contextmanager
    def _computing(self) -> Iterator[None]:
        was_training = self.module.training
        self.module.eval()
        try:
            with plain_state(), torch.no_grad(), our_errors():
                yield
        finally:
            self.module.train(was_training)


def _texts(prompts: Any) -> list[str]:
    """Return a prompt or several as a list.

    Raises:
        NeoXError: one is not a text.
    """
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    if not all(isinstance(text, str) for text in texts):
        raise NeoXError(
            "a prompt is a text; for token ids, pass model.tokenizer.decode(ids), and for messages use "
            "model.chat(messages)"
        )
    return texts


def _written(template: ChatTemplate, messages: list[dict[str, Any]]) -> str:
    """Return the text of a conversation up to the answer.

    Raises:
        NeoXError: these are not messages, or the template does not accept them.
    """
    try:
        found = messages_in(messages, "messages")
        if not found:
            raise ValueError("messages is empty")
        return template.prompt(found)
    except ValueError as error:
        raise NeoXError(
            f'{error}; pass [{{"role": "user", "content": "..."}}], as {template.name} accepts them'
        ) from error


def _changed(
    section: GenerationSection, settings: Mapping[str, Any]
) -> tuple[GenerationSection, list[Problem]]:
    """Return the parameters of generation with others in place of some, and what is wrong with these."""
    unknown = settings.keys() - set(_SETTINGS)
    problems = []
    for name in sorted(unknown):
        found = answer(name)
        meant = [each for each in (found.parameters if found else ()) if each in _SETTINGS]
        remedy = f"use {', '.join(meant[:1] or _SETTINGS)}"
        problems.append(Problem(name, "is not a setting of a call", remedy))
    known = {name: value for name, value in settings.items() if name not in unknown}
    try:
        section = GenerationSection.model_validate({**section.model_dump(), **known})
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            name = str(detail["loc"][0])
            problems.append(Problem(name, *sentence_about(name, [detail]), value=in_words(settings[name])))
    return section, problems


def load_model(
    source: NeoXConfig | str | Path,
    *,
    precision: DataType | None = None,
    vocab_file: str | Path | None = None,
    merge_file: str | Path | None = None,
) -> Model:
    """Load a model on this process's device: the current GPU, or the CPU.

    Args:
        source: a folder of checkpoints (its latest is loaded) or one checkpoint in it; a folder of a model of
            transformers (GPT-NeoX, Llama, Mistral, GPT-2, Qwen2); or a configuration or its YAML file, whose
            `load` names the folder or object store.
        precision: dtype of the weights and activations; None: that of the run; of a model of
            transformers, that in which it is stored.
        vocab_file: file of the tokenizer, if that which a folder of checkpoints records was moved.
        merge_file: the same for a tokenizer of two files.

    Raises:
        ConfigError: the configuration is invalid.
        NeoXError: there is no model, or it cannot be loaded.
    """
    given = {"vocab_file": vocab_file, "merge_file": merge_file}
    files = {name: Path(path) for name, path in given.items() if path is not None}
    if precision not in (None, *get_args(DataType)):
        raise NeoXError(f"precision {precision!r} is unknown; use one of {', '.join(get_args(DataType))}")
    with plain_state(), our_errors(), explained_shortage():
        if not isinstance(source, NeoXConfig):
            folder = Path(source)
            if folder.is_dir() or folder.suffix not in _CONFIGURATIONS:
                if not is_model(folder):
                    return _of_checkpoint(find_checkpoint(folder), precision, files)
                _refuse_files(files, "a model of transformers has its tokenizer in its folder; copy it there")
                return _of_hf(open_hf(folder), precision)
            source = load_config(source)
        _refuse_files(files, "a configuration names the tokenizer's files itself; set them there")
        if source.checkpoint.load is None:
            raise NeoXError("the configuration has no weights to load; set load to a folder with checkpoints")
        config = without_passes(source)
        resolved = resolve(config, devices=1)
        refuse_worker_by_hand(config, program="model")
        if precision is not None:
            resolved = resolved.replaced(precision=_in_precision(source.precision, precision))
        _refuse_towers(resolved.model.head)
        tokenizer, load = load_tokenizer(source.tokenizer), source.checkpoint.load
        forward, _ = load_forward(resolved, load, SINGLE_PROCESS, tokenizer)
        return Model(forward.model, resolved, tokenizer, load)


def _in_precision(section: PrecisionSection, precision: DataType) -> PrecisionSection:
    """Return the section with weights in another precision."""
    return section.replaced(
        precision={"fp32": "fp32", "bf16": "bfloat16", "fp16": "fp16"}[precision],
        fp16=section.fp16.replaced(enabled=False),
        bf16=section.bf16.replaced(enabled=False),
    )


def _refuse_files(files: Mapping[str, Path], reason: str) -> None:
    if files:
        raise NeoXError(f"{' and '.join(files)} cannot be used: {reason}")


def _refuse_towers(head: Vocabulary | Retrieval) -> None:
    if isinstance(head, Retrieval):
        raise NeoXError(
            "a retrieval model (objective: ict) has no logits over a vocabulary; evaluate it with "
            "neox-launch evaluate"
        )


def _of_checkpoint(folder: Path, precision: DataType | None, files: Mapping[str, Path]) -> Model:
    if Manifest.read(folder).config.get("lora_rank"):
        raise CheckpointError(
            f"{folder} contains low-rank adapters alone; pass the configuration of their training, as in "
            'load_model(load_config("base.yml", "adapters.yml")), or merge them into their base with '
            "neox-checkpoint merge and pass the merged checkpoint"
        )
    checkpoint = Checkpoint(folder)
    resolved = checkpoint.resolved
    _refuse_towers(resolved.model.head)
    tokenizer = checkpoint.tokenizer(**files, options="vocab_file=... (and merge_file=...)")
    read = {name: str(path) for name, path in checkpoint.tokenizer_files(**files).items()}
    checkpoint.check_shapes()
    kind = precision or checkpoint.precision
    module = _built(resolved.model, resolved.run, checkpoint.vocab_size, kind)
    load_into(module, checkpoint, DTYPES[kind])
    resolved = resolved.replaced(
        generation=GenerationSection(stop_tokens=checkpoint.stop_tokens),
        tokenizer=resolved.config.tokenizer.replaced(**read),
        checkpoint=CheckpointSection(hf_family=checkpoint.family),
    )
    return Model(module, resolved, tokenizer, str(folder))


def _of_hf(found: HuggingFaceModel, precision: DataType | None) -> Model:
    settings = {**found.settings(found.folder.absolute()), **TRAINING}
    text = as_text(as_written(settings), str(found.folder / "config.json"))
    resolved = resolve(load_files([], texts=[text]), devices=1)
    kind = precision or resolved.run.precision.weights
    module = _built(resolved.model, resolved.run, found.rows, kind)
    parameters = dict(named_logical_parameters(module))
    shapes = {name: tuple(each.logical.shape) for name, each in parameters.items()}  # type: ignore[attr-defined]
    for tensor in found.reader.plan(found.family.tensors(resolved.model, shapes)):
        values, start = parameters[tensor.ours].data.view(-1), 0
        for chunk in found.reader.chunks(tensor):
            values[start : start + chunk.numel()] = chunk.reshape(-1)
            start += chunk.numel()
    return Model(module, resolved, found.tokenizer.tokenizer, str(found.folder))


def _built(spec: ModelSpec, run: RunSpec, rows: int, kind: AnyDataType) -> SequentialModel:
    """Build a model whose weights have a precision, for which its operators are chosen."""
    run = replace(run, precision=replace(run.precision, weights=kind))
    module = build_sequential(spec, run, rows, device=computing_device())
    for parameter in module.parameters():
        parameter.data = parameter.data.to(DTYPES[kind])
    return module
