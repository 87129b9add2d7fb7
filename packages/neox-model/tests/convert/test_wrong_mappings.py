"""Faults are planted in the tables of a conversion; the proof must refuse every result."""

import random
from dataclasses import dataclass, replace

import pytest

from neox_config.errors import NeoXError
from neox_model.convert import from_hf as importing
from neox_model.convert import to_hf as exporting
from neox_model.convert.families import FAMILIES as TABLES
from neox_model.convert.forms import FUSED_QKV, SEPARATE_QKV, Form
from support.hf_models import FAMILIES, random_settings, write_model


@dataclass(frozen=True)
class Changed:
    """An entry of the configuration that reads and writes a changed value."""

    entry: object
    change: object

    @property
    def field(self):
        return self.entry.field

    @property
    def keys(self):
        return self.entry.keys

    def read(self, config):
        return self.change(self.entry.read(config))

    def write(self, architecture, config):
        value = self.change(getattr(architecture, self.field))
        self.entry.write(replace(architecture, **{self.field: value}), config)


def with_entry(family, field, change):
    found = [each for each in family.entries if each.field == field]
    if not found:
        return None
    entries = [Changed(each, change) if each is found[0] else each for each in family.entries]
    return replace(family, entries=tuple(entries))


def with_form(family, draw, change, *, of_qkv=False):
    rows = [
        row
        for row in (*family.in_layer, *family.outside)
        if not of_qkv or row.form in (SEPARATE_QKV, FUSED_QKV)
    ]
    if not rows:
        return None
    row = draw.choice(rows)
    changed = replace(row, form=change(row.form))
    return replace(
        family,
        in_layer=tuple(changed if each is row else each for each in family.in_layer),
        outside=tuple(changed if each is row else each for each in family.outside),
    )


def moved(move):
    """Return a function that adds a movement of a tensor of ours to a form."""

    def change(form):
        return Form(
            lambda ours, architecture: form.to_theirs(move(ours, architecture), architecture),
            lambda theirs, architecture: move(form.to_ours(theirs, architecture), architecture),
        )

    return change


def rolled(tensor, architecture):
    return tensor.roll(1, 0)


def transposed(tensor, architecture):
    return tensor.t().reshape(tensor.shape) if tensor.dim() == 2 else tensor.flip(0)


def other_heads(tensor, architecture):
    """Reverse the heads of each group of rows."""
    width = architecture.hidden_size // architecture.heads
    return tensor.view(-1, width, *tensor.shape[1:]).flip(0).flatten(0, 1)


def swapped(family, draw):
    names = [(index, place) for index, row in enumerate(family.in_layer) for place in range(len(row.theirs))]
    one, other = draw.sample(names, 2)
    theirs = [list(row.theirs) for row in family.in_layer]
    (a, b), (c, d) = one, other
    theirs[a][b], theirs[c][d] = theirs[c][d], theirs[a][b]
    rows = [replace(row, theirs=tuple(each)) for row, each in zip(family.in_layer, theirs, strict=True)]
    return replace(family, in_layer=tuple(rows))


def without_bias(family, draw):
    fields = [each.field for each in family.entries if each.field in ("qkv_bias", "output_bias", "mlp_bias")]
    name = draw.choice(fields or ["qkv_bias"])
    if fields:
        return with_entry(family, name, lambda value: not value)
    return replace(family, fixed={**family.fixed, name: not family.fixed[name]})


OTHER = {
    "gelu": "gelu_tanh",
    "gelu_tanh": "gelu",
    "relu": "gelu",
    "silu": "gelu",
    "swiglu": "geglu",
    "geglu": "swiglu",
}
FAULTS = {
    "two names swapped": swapped,
    "rolled": lambda family, draw: with_form(family, draw, moved(rolled)),
    "transposed": lambda family, draw: with_form(family, draw, moved(transposed)),
    "order of heads": lambda family, draw: with_form(family, draw, moved(other_heads), of_qkv=True),
    "theta": lambda family, draw: with_entry(
        family, "rotary_base", lambda value: round(value * draw.choice([0.5, 1.01, 2.0]))
    ),
    "epsilon": lambda family, draw: with_entry(
        family, "norm_epsilon", lambda value: value * draw.choice([0.1, 0.5, 2.0, 10.0])
    ),
    "tying": lambda family, draw: with_entry(family, "tied", lambda value: not value),
    "a bias": without_bias,
    "activation": lambda family, draw: with_entry(family, "activation", OTHER.__getitem__),
    "residual": lambda family, draw: with_entry(family, "parallel_residual", lambda value: not value),
    "rotary fraction": lambda family, draw: with_entry(family, "rotary_fraction", lambda value: 1.5 - value),
    "window": lambda family, draw: with_entry(
        family, "windows", lambda value: tuple(None if each is None else each + 1 for each in value)
    ),
    "scaling": lambda family, draw: with_entry(
        family, "rotary_scaling", lambda value: {**value, "factor": value["factor"] * 1.5} if value else value
    ),
}


def import_from(folder, output, monkeypatch, table):
    with monkeypatch.context() as patch:
        patch.setattr(importing, "family_of_config", lambda config: table)
        return importing.from_hf(folder, output)


def export_from(folder, output, monkeypatch, table):
    with monkeypatch.context() as patch:
        patch.setattr(exporting, "fitting_family", lambda *arguments: table)
        return exporting.to_hf(folder / "global_step0", output)


def contents(folder):
    """Return the bytes of all files that depend on the tables."""
    ignored = ("verification.json", "model.yml", "manifest.json")
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in ignored]
    return [(path.relative_to(folder), path.read_bytes()) for path in files]


def planted(folder, number, monkeypatch, *, names=tuple(FAULTS)):
    """Plant a fault; return "refused", "harmless" (the same files) or "accepted", and what."""
    draw = random.Random(number)
    family = FAMILIES[number % len(FAMILIES)]
    right, wrong = TABLES[family], None
    while wrong is None:
        name = draw.choice(names)
        wrong = FAULTS[name](right, draw)
    model = write_model(folder / "model", family, random_settings(family, number), seed=number)
    convert = import_from
    if number % 2:
        # The export starts from a checkpoint that was imported with the right table.
        with monkeypatch.context() as patch:
            patch.setattr(importing, "prove", lambda *arguments, **options: {})
            importing.from_hf(model, folder / "ours")
        model, convert = folder / "ours", export_from
    try:
        convert(model, folder / "wrong", monkeypatch, wrong)
    except NeoXError as error:
        assert not (folder / "wrong").exists()
        assert [path for path in folder.iterdir() if path.name.startswith(".")] == []
        return "refused", f"{family}, {name}: {error}"
    convert(model, folder / "right", monkeypatch, right)
    is_same = contents(folder / "right") == contents(folder / "wrong")
    return ("harmless" if is_same else "accepted"), f"{family}, {name}, number {number}"


SAMPLE = ("two names swapped", "rolled", "theta", "epsilon")


@pytest.mark.slow
@pytest.mark.parametrize("number", range(10))
def test_a_wrong_mapping_is_refused(tmp_path, monkeypatch, number):
    outcome, what = planted(
        tmp_path, number, monkeypatch, names=("two names swapped", "rolled", "theta", "epsilon")
    )
    assert outcome != "accepted", what


@pytest.mark.sweep
def test_200_wrong_mappings_are_refused(tmp_path, monkeypatch):
    refused, number = [], 0
    while len(refused) < 200:
        folder = tmp_path / str(number)
        outcome, what = planted(folder, number, monkeypatch)
        assert outcome != "accepted", what
        refused += [what] if outcome == "refused" else []
        number += 1
    kinds = {what.partition(":")[0] for what in refused}
    assert len(kinds) > 40  # Families by faults.
