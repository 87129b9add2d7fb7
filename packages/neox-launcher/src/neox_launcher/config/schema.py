"""The whole configuration: its sections, and where each name that users write is at home."""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, PrivateAttr
from pydantic.fields import FieldInfo

from neox_launcher.config.parameter import Parameter, Section, entry_section, inner_section, key_of
from neox_launcher.config.problems import Place, Problem
from neox_launcher.config.sections.activation_checkpointing import ActivationCheckpointingSection
from neox_launcher.config.sections.attention import AttentionSection
from neox_launcher.config.sections.autotuning import AutotuningSection
from neox_launcher.config.sections.checkpoint import CheckpointSection
from neox_launcher.config.sections.compression import CompressionSection
from neox_launcher.config.sections.data import DataSection
from neox_launcher.config.sections.data_efficiency import DataEfficiencySection
from neox_launcher.config.sections.elasticity import ElasticitySection
from neox_launcher.config.sections.engine import EngineSection
from neox_launcher.config.sections.generation import GenerationSection
from neox_launcher.config.sections.launch import LaunchSection
from neox_launcher.config.sections.logging import LoggingSection
from neox_launcher.config.sections.lr_schedule import LrScheduleSection
from neox_launcher.config.sections.model import ModelSection
from neox_launcher.config.sections.monitors import MonitorsSection
from neox_launcher.config.sections.optimizer import OptimizerSection
from neox_launcher.config.sections.parallelism import ParallelismSection
from neox_launcher.config.sections.precision import PrecisionSection
from neox_launcher.config.sections.tokenizer import TokenizerSection
from neox_launcher.config.sections.training import TrainingSection
from neox_launcher.config.sections.zero import ZeroSection

__all__ = [
    "NeoXConfig",
    "all_parameters",
    "build_section",
    "field_named",
    "parameter_named",
    "section_of",
    "sections",
]


class NeoXConfig(BaseModel):
    """Everything that the user decides; frozen.

    `sources` tells where each value that was given was written, by dotted name; what is not in it is a
    default. `notices` are findings that do not stop anything. Neither counts in comparisons.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    launch: LaunchSection
    parallelism: ParallelismSection
    model: ModelSection
    attention: AttentionSection
    precision: PrecisionSection
    optimizer: OptimizerSection
    zero: ZeroSection
    lr_schedule: LrScheduleSection
    training: TrainingSection
    activation_checkpointing: ActivationCheckpointingSection
    checkpoint: CheckpointSection
    data: DataSection
    tokenizer: TokenizerSection
    logging: LoggingSection
    generation: GenerationSection
    engine: EngineSection
    monitors: MonitorsSection
    data_efficiency: DataEfficiencySection
    compression: CompressionSection
    autotuning: AutotuningSection
    elasticity: ElasticitySection

    _sources: dict[str, Place] = PrivateAttr(default_factory=dict)
    _notices: tuple[Problem, ...] = PrivateAttr(default=())
    _files: tuple[str, ...] = PrivateAttr(default=())

    @property
    def sources(self) -> Mapping[str, Place]:
        """Where each given value was written."""
        return self._sources

    @property
    def notices(self) -> tuple[Problem, ...]:
        """What was found that stops nothing."""
        return self._notices

    @property
    def files(self) -> tuple[str, ...]:
        """The files that the configuration was read from."""
        return self._files

    @classmethod
    def from_sections(cls, values: Mapping[str, Mapping[str, Any]]) -> Self:
        """The configuration with these values; sections that are not in them are as declared.

        Raises:
            ValidationError: a value is wrong.
        """
        built = {name: build_section(kind, values.get(name, {})) for name, kind in sections().items()}
        return cls.model_construct(**built)  # type: ignore[arg-type]

    def given(self) -> dict[str, dict[str, Any]]:
        """What was given, by section, as JSON values; secrets are left out."""
        found = {}
        for name in sections():
            section: Section = getattr(self, name)
            if section.model_fields_set:
                found[name] = section.model_dump(mode="json", exclude_unset=True)
        return found

    def with_origin(
        self, *, sources: Mapping[str, Place], notices: tuple[Problem, ...], files: tuple[str, ...]
    ) -> Self:
        """The same configuration, knowing where it comes from."""
        copy = self.model_copy()
        copy._sources, copy._notices, copy._files = dict(sources), notices, files
        return copy

    def value_of(self, name: str) -> Any:
        """The value of a parameter by the dotted name that users write."""
        found: Any = getattr(self, section_of(name.partition(".")[0]))
        for part in name.split("."):
            found = found.get(part) if isinstance(found, dict) else getattr(found, part)
        return found

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NeoXConfig) and all(
            getattr(self, name) == getattr(other, name) for name in sections()
        )

    def __hash__(self) -> int:
        return hash(repr([getattr(self, name) for name in sections()]))


def build_section(kind: type[Section], values: Mapping[str, Any]) -> Section:
    """A section with these values; one without any costs no schema.

    Raises:
        ValidationError: a value is wrong or missing.
    """
    has_required = any(declared.is_required() for declared in kind.model_fields.values())
    return kind.model_validate(dict(values)) if values or has_required else kind.model_construct()


def all_parameters() -> Iterator[Parameter]:
    """Every parameter of every section, in order."""
    for section in sections().values():
        yield from section.parameters()


@cache
def _by_name() -> dict[str, Parameter]:
    return {parameter.name: parameter for parameter in all_parameters()}


def parameter_named(name: str) -> Parameter:
    """The parameter with that dotted name, which may hold names that the user chose; else KeyError."""
    return _by_name().get(name) or _by_name()[_declared_name(name)]


def field_named(name: str) -> FieldInfo | None:
    """How a parameter or block is declared; None when no field has that name, or a user chose it."""
    parts = iter(name.split("."))
    kind: type[Section] | None = sections().get(_homes().get(name.partition(".")[0], ""))
    declared: FieldInfo | None = None
    for part in parts:
        declared = None if kind is None else kind.model_fields.get(part)
        if declared is None:
            return None
        entry = entry_section(declared)
        kind = inner_section(declared) or entry
        if entry is not None and next(parts, None) is not None:
            declared = None
    return declared


def _declared_name(name: str) -> str:
    """The name as it is declared: `<group>` stands where the user chose a name."""
    found = []
    parts = iter(name.split("."))
    kind: type[Section] | None = sections()[section_of(name.partition(".")[0])]
    for part in parts:
        found.append(part)
        declared = None if kind is None else kind.model_fields.get(part)
        kind = None if declared is None else inner_section(declared) or entry_section(declared)
        if declared is not None and entry_section(declared) is not None and next(parts, None) is not None:
            found.append(key_of(declared))
    return ".".join(found)


@cache
def sections() -> dict[str, type[Section]]:
    """The sections by name."""
    found: dict[str, type[Section]] = {}
    for name, field in NeoXConfig.model_fields.items():
        if not (isinstance(field.annotation, type) and issubclass(field.annotation, Section)):
            raise TypeError(f"{name} is no section")
        found[name] = field.annotation
    return found


@cache
def _homes() -> dict[str, str]:
    homes: dict[str, str] = {}
    for section, kind in sections().items():
        for name in kind.model_fields:
            if name in homes:
                raise TypeError(f"{name} is declared in both {homes[name]} and {section}")
            homes[name] = section
    return homes


def section_of(name: str) -> str:
    """The section that declares a top-level name; KeyError when none does."""
    return _homes()[name]
