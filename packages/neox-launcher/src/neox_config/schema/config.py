"""The whole configuration: its sections, and lookup of parameters by name."""

from collections.abc import Mapping
from functools import cache
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, PrivateAttr
from pydantic.fields import FieldInfo

from neox_config.extras.compression.fields import CompressionSection
from neox_config.extras.data_efficiency.fields import DataEfficiencySection
from neox_config.problems import Place, Problem
from neox_config.schema.parameter import Parameter, Section, entry_section, inner_section, key_of
from neox_config.schema.paths import is_path, written_paths
from neox_config.schema.sections.activation_checkpointing import ActivationCheckpointingSection
from neox_config.schema.sections.adapters import AdaptersSection
from neox_config.schema.sections.attention import AttentionSection
from neox_config.schema.sections.autotuning import AutotuningSection
from neox_config.schema.sections.checkpoint import CheckpointSection
from neox_config.schema.sections.data import DataSection
from neox_config.schema.sections.elasticity import ElasticitySection
from neox_config.schema.sections.engine import EngineSection
from neox_config.schema.sections.experts import ExpertsSection
from neox_config.schema.sections.generation import GenerationSection
from neox_config.schema.sections.launch import LaunchSection
from neox_config.schema.sections.logging import LoggingSection
from neox_config.schema.sections.lr_schedule import LrScheduleSection
from neox_config.schema.sections.model import ModelSection
from neox_config.schema.sections.monitors import MonitorsSection
from neox_config.schema.sections.mup import MupSection
from neox_config.schema.sections.objective import ObjectiveSection
from neox_config.schema.sections.optimizer import OptimizerSection
from neox_config.schema.sections.parallelism import ParallelismSection
from neox_config.schema.sections.precision import PrecisionSection
from neox_config.schema.sections.serving import ServingSection
from neox_config.schema.sections.tokenizer import TokenizerSection
from neox_config.schema.sections.training import TrainingSection
from neox_config.schema.sections.zero import ZeroSection

__all__ = [
    "NeoXConfig",
    "all_parameters",
    "as_written",
    "build_section",
    "field_named",
    "parameter_named",
    "section_of",
    "sections",
]


class NeoXConfig(BaseModel):
    """All settings of the user; frozen.

    `sources` holds the location of each given value by dotted name; other values are defaults. `notices` are
    problems that are not errors. Both are ignored in comparisons.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    launch: LaunchSection
    parallelism: ParallelismSection
    model: ModelSection
    mup: MupSection
    attention: AttentionSection
    experts: ExpertsSection
    objective: ObjectiveSection
    adapters: AdaptersSection
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
    serving: ServingSection
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
        """Location of each given value."""
        return self._sources

    @property
    def notices(self) -> tuple[Problem, ...]:
        """Problems that are not errors."""
        return self._notices

    @property
    def files(self) -> tuple[str, ...]:
        """Files that the configuration was read from."""
        return self._files

    @classmethod
    def from_sections(cls, values: Mapping[str, Mapping[str, Any]]) -> Self:
        """Build a configuration from values by section; other sections have their defaults.

        Raises:
            ValidationError: A value is invalid.
        """
        built = {name: build_section(kind, values.get(name, {})) for name, kind in sections().items()}
        return cls.model_construct(**built)  # type: ignore[arg-type]

    def given(self) -> dict[str, dict[str, Any]]:
        """Return the given values by section as JSON values, without secrets."""
        found = {}
        for name in sections():
            section: Section = getattr(self, name)
            if section.model_fields_set:
                found[name] = section.model_dump(mode="json", exclude_unset=True)
        return found

    def with_origin(
        self, *, sources: Mapping[str, Place], notices: tuple[Problem, ...], files: tuple[str, ...]
    ) -> Self:
        """Return the configuration with its sources, notices and files."""
        copy = self.model_copy()
        copy._sources, copy._notices, copy._files = dict(sources), notices, files
        return copy

    def value_of(self, name: str) -> Any:
        """Return the value of a parameter by its dotted name."""
        found: Any = getattr(self, section_of(name.partition(".")[0]))
        rest = name
        while rest:
            # A name that is not declared may have a dot in it.
            extra = getattr(found, "model_extra", None) or {}
            if rest in extra:
                return extra[rest]
            part, _, rest = rest.partition(".")
            found = found.get(part) if isinstance(found, dict) else getattr(found, part)
        return found

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NeoXConfig) and all(
            getattr(self, name) == getattr(other, name) for name in sections()
        )

    def __hash__(self) -> int:
        return hash(repr([getattr(self, name) for name in sections()]))


def build_section(kind: type[Section], values: Mapping[str, Any]) -> Section:
    """Build a section from values; without values, this does not build the pydantic schema.

    Raises:
        ValidationError: A value is invalid or missing.
    """
    if values or any(declared.is_required() for declared in kind.model_fields.values()):
        return kind.model_validate(dict(values))
    return _of_defaults(kind)


@cache
def _of_defaults(kind: type[Section]) -> Section:
    """Return the section of defaults, which is frozen: one for all configurations."""
    return kind.model_construct()


@cache
def all_parameters() -> tuple[Parameter, ...]:
    """Return every parameter of every section, in order."""
    return tuple(parameter for section in sections().values() for parameter in section.parameters())


@cache
def _by_name() -> dict[str, Parameter]:
    return {parameter.name: parameter for parameter in all_parameters()}


def parameter_named(name: str) -> Parameter:
    """Return the parameter with a dotted name, which may contain names chosen by the user.

    Raises:
        KeyError: There is no such parameter.
    """
    return _by_name().get(name) or _by_name()[_declared(name)[0]]


def field_named(name: str) -> FieldInfo | None:
    """Return the field of a parameter or block, or None if it does not exist or is named by the user."""
    return _declared(name)[1]


def as_written(values: Mapping[str, Any], outer: str = "") -> dict[str, Any]:
    """Return values of parameters as written in a file: paths are expanded when it is read.

    Args:
        values: the values by name, with underscores or dashes.
        outer: the block that contains them, with a dot at its end.
    """
    found = {}
    for name, value in values.items():
        path = f"{outer}{name.replace('-', '_')}"
        declared = field_named(path)
        if declared is not None and is_path(declared):
            found[name] = written_paths(value)
        else:
            found[name] = as_written(value, f"{path}.") if isinstance(value, Mapping) else value
    return found


def _declared(name: str) -> tuple[str, FieldInfo | None]:
    """Return the declared name of a parameter, and its field; `<group>` is a name chosen by the user."""
    found = []
    parts = iter(name.split("."))
    kind: type[Section] | None = sections().get(_homes().get(name.partition(".")[0], ""))
    declared: FieldInfo | None = None
    for part in parts:
        found.append(part)
        declared = None if kind is None else kind.model_fields.get(part)
        kind = None if declared is None else inner_section(declared) or entry_section(declared)
        if declared is not None and entry_section(declared) is not None and next(parts, None) is not None:
            found.append(key_of(declared))
            declared = None
    return ".".join(found), declared


@cache
def sections() -> dict[str, type[Section]]:
    """Return the sections by name."""
    kinds = {name: field.annotation for name, field in NeoXConfig.model_fields.items()}
    return {
        name: kind for name, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, Section)
    }


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
    """Return the section that declares a top-level name.

    Raises:
        KeyError: No section declares the name.
    """
    return _homes()[name]
