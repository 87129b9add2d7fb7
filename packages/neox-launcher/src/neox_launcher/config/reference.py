"""The reference of all parameters, written from their declarations."""

import json
from collections.abc import Iterable, Iterator

from neox_launcher.config.aliases import COMPUTED, OLDER_SPELLINGS, RETIRED, SHORTHANDS
from neox_launcher.config.carried_out import carried_out_by
from neox_launcher.config.not_yet import NOT_YET
from neox_launcher.config.optimizers import OPTIMIZER_FACTS, OptimizerFacts
from neox_launcher.config.parameter import Parameter
from neox_launcher.config.schema import all_parameters, sections

__all__ = ["describe_parameter", "reference"]

_INTRODUCTION = """\
# Configuration

Written by `make docs` from the declarations in `packages/neox-launcher/src/neox_launcher/config`; a test
compares.

A configuration is one or more YAML files (JSON is YAML, too). Every parameter may stand in any of them; a
dash is the same as an underscore. `null` means: as if it were not written. The same parameter with two
values, in one file or in two, is an error; `--set name=value` wins over files, with dots for what is nested
(`--set optimizer.params.lr=0.001`). Numbers may be written `5e8`, `1_000` or `1e-8`.

```
neox-config check FILE ...      what is wrong, all at once
neox-config show FILE ...       every value and where it comes from
neox-config explain NAME        one parameter
neox-launch --config FILE       train
```

*Origin* names the family that a parameter's name comes from: DSL (DeepSpeed launcher), DSC (DeepSpeed
configuration), Meg (Megatron-LM), NeoX (GPT-NeoX), ours. A dagger (†) marks parameters some values of
which are documented but not built yet: `neox-config check` notes them, `neox-launch` refuses them.

*On resuming* says what happens when the value differs from that of the checkpoint: `model` values make
another model and are refused unless `finetune: true`; `training` values are listed in the log, and refused
where the optimizer states could not be used; `free` values may differ. Values without effect do not count.
"""


_ABOUT_OPTIMIZERS = """\
### Optimizers

Each trains, is saved and resumes to the last bit on one process and with tensor, pipeline and data
parallelism and ZeRO 1 to 3, in fp32, bf16 and fp16; what does not is refused before anything starts. ZeRO
cuts weights into flat parts and tensor parallelism splits them: an optimizer that needs means or norms
over whole weights works with neither. All take `lr` and `weight_decay`. An update whose gradients are not
finite is skipped on the device, or by the host, which then waits for the device once per update. (Adam with
`bias_correction: false` is skipped by the host.)
"""

_ON_RESUMING: dict[str | None, str] = {
    "model": "a change is refused unless finetune is true: it makes another model",
    "training": "a change is reported: it makes another training",
    "free": "free to change",
}


def reference() -> str:
    """The whole of docs/configuration.md."""
    parts = [_INTRODUCTION]
    for name, section in sections().items():
        title = name.replace("_", " ").capitalize()
        parts.append(f"## {title}\n\n{section.__doc__ or ''}\n\n" + _table(section.parameters()))
        if name == "optimizer":
            parts.append(_optimizers())
    parts.append(_aliases())
    parts.append(_not_yet())
    return "\n".join(parts)


def describe_parameter(parameter: Parameter) -> str:
    """Everything about one parameter, for a terminal."""
    rows = [
        ("type", parameter.type),
        ("choices", ", ".join(parameter.choices)),
        ("limits", parameter.limits),
        ("default", _default(parameter)),
        ("used when", parameter.used_when or ""),
        ("on resuming", _ON_RESUMING.get(parameter.resume, "")),
        ("origin", parameter.origin),
        ("source", parameter.source or ""),
        ("also called", ", ".join(name for name, target in SHORTHANDS.items() if target == parameter.name)),
        ("older names", ", ".join(_older_names(parameter.name))),
        ("not yet", f"some values; {NOT_YET[parameter.name].instead}" if parameter.name in NOT_YET else ""),
        ("holds", ", ".join(_names_inside(parameter))),
        ("carried out", "" if parameter.is_block else f"by {carried_out_by(parameter)}"),
    ]
    lines = [f"  {name:<12} {value}" for name, value in rows if value]
    return "\n".join([parameter.name, f"  {parameter.doc}", "", *lines])


def _table(parameters: Iterable[Parameter]) -> str:
    heads = "| parameter | type | default | meaning | on resuming | origin |"
    rows = [heads, "| --- | --- | --- | --- | --- | --- |"]
    rows += [_row(parameter) for parameter in parameters]
    return "\n".join(rows) + "\n"


def _row(parameter: Parameter) -> str:
    kind = parameter.type
    if parameter.choices:
        listed = ", ".join(f"`{choice}`" for choice in parameter.choices)
        is_listed = kind.endswith("choice")
        kind = kind.replace("choice", listed) if is_listed else f"{kind}: {', '.join(parameter.choices)}"
    if parameter.limits:
        kind += f" {parameter.limits}"
    doc = parameter.doc
    if parameter.used_when:
        doc += f" Used when {parameter.used_when}."
    if parameter.source:
        doc += f" ({parameter.source})"
    name = f"`{parameter.name}`" + (" †" if parameter.name in NOT_YET else "")
    cells = (name, kind, _default(parameter), doc, parameter.resume or "", parameter.origin)
    return "| " + " | ".join(map(_cell, cells)) + " |"


def _default(parameter: Parameter) -> str:
    if parameter.required:
        return "required"
    if parameter.is_block:
        return ""
    if parameter.none_means and parameter.default is None:
        return f"null: {parameter.none_means}"
    return json.dumps(parameter.default)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _optimizers() -> str:
    is_missing = NOT_YET["optimizer.type"].is_asked_for
    rows = [
        "| optimizer | arguments | states | ZeRO, tensor parallelism | skips an update |",
        "| --- | --- | --- | --- | --- |",
    ]
    for facts in OPTIMIZER_FACTS.values():
        if is_missing(facts.name):
            rows.append(f"| `{facts.name}` † |  |  |  |  |")
            continue
        arguments = ", ".join(f"`{name}`" for name in facts.arguments) if facts.arguments else "those above"
        states = ", ".join(f"`{name}`" for name in facts.kept)
        skips = "on the device" if facts.skips_on_device else "by the host"
        rows.append(f"| `{facts.name}` | {arguments} | {states} | {_under_zero(facts)} | {skips} |")
    remarks = [f"- `{facts.name}`: {facts.remark}" for facts in OPTIMIZER_FACTS.values() if facts.remark]
    return "\n".join([_ABOUT_OPTIMIZERS, *rows, "", *remarks, ""])


def _under_zero(facts: OptimizerFacts) -> str:
    if not facts.is_elementwise:
        return "neither"
    return "both" if facts.is_tried_with_zero else "both; ZeRO with `zero-allow-untested-optimizer`"


def _aliases() -> str:
    return "\n".join(
        [
            "## Other names\n",
            "### Shorthands\n",
            _pairs(("name", "stands for"), ((name, f"`{target}`") for name, target in SHORTHANDS.items())),
            "### Older spellings\n",
            _pairs(("name", "means"), ((name, older.doc) for name, older in OLDER_SPELLINGS.items())),
            "### Computed\n",
            "Accepted with a note; the value given is not used.\n",
            _pairs(("name", "what it is"), COMPUTED.items()),
            "### Without effect\n",
            "Accepted with a note.\n",
            _pairs(("name", "why"), ((name, f"it {why}") for name, why in RETIRED.items())),
        ]
    )


def _not_yet() -> str:
    introduction = "Some values of these parameters have no part that carries them out.\n"
    rows = ((name, row.instead) for name, row in NOT_YET.items())
    return "\n".join(
        ["## Not built yet (†)\n", introduction, _pairs(("parameter", "what to do today"), rows)]
    )


def _pairs(heads: tuple[str, str], rows: Iterable[tuple[str, str]]) -> str:
    lines = [f"| {heads[0]} | {heads[1]} |", "| --- | --- |"]
    lines += [f"| `{name}` | {_cell(text)} |" for name, text in rows]
    return "\n".join(lines) + "\n"


def _names_inside(block: Parameter) -> Iterator[str]:
    """The parameters that stand directly in a block, and the blocks."""
    for parameter in all_parameters():
        outer, _, own = parameter.name.rpartition(".")
        if outer == block.name:
            yield own


def _older_names(name: str) -> Iterator[str]:
    for older, spelling in OLDER_SPELLINGS.items():
        if name in spelling.targets:
            yield f"{older} ({spelling.doc})"
