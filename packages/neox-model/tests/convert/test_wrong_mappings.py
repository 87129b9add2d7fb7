"""Faults are planted in the tables of a conversion and in folders; the proof must refuse every one.

A fault that changes neither a stored value nor a result is drawn again, so that all that are counted are
real. Faults in tables are shown to the comparison of results alone: other comparisons use the tables.
"""

import json
import random
import shutil
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from neox_config.errors import NeoXError
from neox_config.spec.values import ABSENT, Each
from neox_model.convert import from_hf as importing
from neox_model.convert import proof
from neox_model.convert import to_hf as exporting
from neox_model.convert.checkpoints import Checkpoint, build_sequential, load_into
from neox_model.convert.families import FAMILIES as TABLES
from neox_model.convert.families.rotary import RotaryBase, RotaryByType, RotaryFraction, RotaryScaling
from neox_model.convert.families.values import Optional
from neox_model.convert.families.windows import ChosenWindows, OneWindow, RepeatedWindows
from neox_model.convert.forms import FUSED_QKV, SEPARATE_QKV, Form
from neox_model.convert.reference import load_model
from neox_model.convert.verify import verify
from support.hf_models import FAMILIES, random_settings, write_model

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Changed:
    """An entry of the configuration that reads and writes changed values of paths with some ending."""

    entry: object
    ending: str
    change: object

    def read(self, config):
        return self._changed(self.entry.read(config))

    def write(self, model, config):
        self.entry.write(self._changed(model), config)

    def _changed(self, values):
        return {
            path: self._of_layers(value) if path.endswith(self.ending) else value
            for path, value in values.items()
        }

    def _of_layers(self, value):
        if isinstance(value, Each):
            return Each(tuple(each if each in (ABSENT, None) else self.change(each) for each in value.values))
        return self.change(value)


PATHS = {
    RotaryBase: ["position.base"],
    RotaryByType: ["position.base", "position.scaling"],
    RepeatedWindows: ["mixer.pattern", "pattern.before"],
    RotaryFraction: ["position.fraction"],
    RotaryScaling: ["position.scaling"],
    OneWindow: ["mixer.pattern", "pattern.before"],
    ChosenWindows: ["mixer.pattern", "pattern.before"],
}
# Of classes that only one family has.
PATHS_BY_NAME = {"_ScaleOfScores": ["mixer.scale"], "_EmbeddingScale": ["embedding.scale"]}


def paths_of(entry):
    if isinstance(entry, Optional):
        return [entry.ours]
    name = type(entry).__name__
    return PATHS.get(type(entry)) or PATHS_BY_NAME.get(name) or getattr(entry, "paths", ())


def with_entry(family, ending, change):
    found = [each for each in family.entries if any(path.endswith(ending) for path in paths_of(each))]
    if not found:
        return None
    entries = [Changed(each, ending, change) if each is found[0] else each for each in family.entries]
    return replace(family, entries=tuple(entries))


def with_form(family, draw, move, *, of_qkv=False):
    """Move the elements of a tensor of ours, in one drawn row of the tables."""
    rows = [
        row
        for row in (*family.in_layer, *family.outside)
        if not of_qkv or row.form in (SEPARATE_QKV, FUSED_QKV) or row.ours == "attention.qkv"
    ]
    row = draw.choice(rows)
    changed = replace(row, form=_moved(row.form, move))
    return replace(
        family,
        in_layer=tuple(changed if each is row else each for each in family.in_layer),
        outside=tuple(changed if each is row else each for each in family.outside),
    )


def _moved(form, move):
    return Form(
        lambda ours, attention: form.to_theirs(move(ours, attention), attention),
        lambda theirs, attention: move(form.to_ours(theirs, attention), attention),
    )


def rolled(tensor, attention):
    return tensor.roll(1, 0)


def transposed(tensor, attention):
    return tensor.t().reshape(tensor.shape) if tensor.dim() == 2 else tensor.flip(0)


def negated(tensor, attention):
    return -tensor


def truncated(tensor, attention):
    return tensor.to(torch.bfloat16).to(tensor.dtype)


def one_row_too_far(tensor, attention):
    """Read every row but the last from the next."""
    return torch.cat((tensor[1:], tensor[-1:]))


def other_heads(tensor, attention):
    """Reverse the heads of each group of rows."""
    width = attention.head_width
    return tensor.view(-1, width, *tensor.shape[1:]).flip(0).flatten(0, 1)


def interleaved(tensor, attention):
    """Order the rows of heads as if the channels of a pair were neighbors, not half a head apart."""
    width = attention.head_width
    heads = tensor.view(-1, 2, width // 2, *tensor.shape[1:])
    return heads.transpose(1, 2).reshape(tensor.shape)


def without_bias(tensor, attention):
    return tensor * 0 if tensor.dim() == 1 else tensor


def swapped(family, draw):
    names = [(index, place) for index, row in enumerate(family.in_layer) for place in range(len(row.theirs))]
    one, other = draw.sample(names, 2)
    theirs = [list(row.theirs) for row in family.in_layer]
    (a, b), (c, d) = one, other
    theirs[a][b], theirs[c][d] = theirs[c][d], theirs[a][b]
    rows = [replace(row, theirs=tuple(each)) for row, each in zip(family.in_layer, theirs, strict=True)]
    return replace(family, in_layer=tuple(rows))


def other_bias(family, draw):
    biases = ("qkv_bias", "output_bias", "channel.bias")
    endings = [each for each in biases if with_entry(family, each, lambda value: value)]
    if endings:
        return with_entry(family, draw.choice(endings), lambda value: not value)
    path = "layers.mixer.qkv_bias"
    return replace(family, fixed={**family.fixed, path: not family.fixed.get(path, False)})


def other_scaling(value):
    values = dict(value)
    values |= {"factor": values["factor"] * 1.5} if values else {"type": "linear", "factor": 2.0}
    return tuple(values.items())


OTHER = {
    "gelu": "gelu_tanh",
    "gelu_tanh": "gelu",
    "relu": "gelu",
    "silu": "gelu",
    "swiglu": "geglu",
    "geglu": "swiglu",
    "geglu_tanh": "geglu",
    "parallel": "serial",
    "serial": "parallel",
}
IN_TABLES = {
    "names": swapped,
    "rolled": lambda family, draw: with_form(family, draw, rolled),
    "transposed": lambda family, draw: with_form(family, draw, transposed),
    "negated": lambda family, draw: with_form(family, draw, negated),
    "truncated": lambda family, draw: with_form(family, draw, truncated),
    "next row": lambda family, draw: with_form(family, draw, one_row_too_far),
    "order of heads": lambda family, draw: with_form(family, draw, other_heads, of_qkv=True),
    "interleaved": lambda family, draw: with_form(family, draw, interleaved, of_qkv=True),
    "dropped bias": lambda family, draw: with_form(family, draw, without_bias),
    "other biases": other_bias,
    "theta": lambda family, draw: with_entry(
        family, "position.base", lambda value: round(value * draw.choice([0.5, 1.01, 2.0]))
    ),
    "epsilon": lambda family, draw: with_entry(
        family, "norm.epsilon", lambda value: value * draw.choice([0.1, 0.5, 2.0, 10.0])
    ),
    "tying": lambda family, draw: with_entry(family, "head.tied", lambda value: not value),
    "activation": lambda family, draw: with_entry(family, "channel.activation", OTHER.__getitem__),
    "residual": lambda family, draw: with_entry(family, "residual", OTHER.__getitem__),
    "rotary fraction": lambda family, draw: with_entry(
        family, "position.fraction", lambda value: 1.5 - value
    ),
    "window": lambda family, draw: with_entry(family, "pattern.before", lambda value: value + 1),
    "no window": lambda family, draw: with_entry(family, "mixer.pattern", lambda value: None),
    "softcap of scores": lambda family, draw: with_entry(
        family, "mixer.softcap", lambda value: (value or 3.0) * 0.7
    ),
    "softcap of logits": lambda family, draw: with_entry(
        family, "head.softcap", lambda value: (value or 9.0) * 0.7
    ),
    "scale of scores": lambda family, draw: with_entry(
        family, "mixer.scale", lambda value: (value or 0.4) * 1.5
    ),
    "scale of embeddings": lambda family, draw: with_entry(family, "embedding.scale", lambda value: 1.0),
    "scaling": lambda family, draw: with_entry(family, "position.scaling", other_scaling),
}


def import_from(folder, output, table):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importing, "family_of_config", lambda config: table)
        importing.from_hf(folder, output)
    return Checkpoint(output / "global_step0")


def export_from(folder, output, table):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporting, "fitting_family", lambda *arguments: table)
        exporting.to_hf(folder / "global_step0", output)
    return SimpleNamespace(folder=output, family=table)


def without_proof(convert, *arguments):
    with pytest.MonkeyPatch.context() as patch:
        for module in (importing, exporting):
            patch.setattr(module, "prove", lambda *arguments, **options: {})
        return convert(*arguments)


def by_results_alone(convert, *arguments):
    with pytest.MonkeyPatch.context() as patch:
        for name in ("differences", "compare_tensors"):
            patch.setattr(proof, name, lambda *arguments: [])
        return convert(*arguments)


def logits_of(side):
    """Return all logits of a whole sequence, and the numbers that are stored."""
    if isinstance(side, Checkpoint):
        rows, length = side.vocab_size, side.model.max_positions
        model = build_sequential(side.model, side.resolved.run, rows)
        load_into(model, side, torch.float32)
    else:
        model = load_model(side.folder, side.family)
        rows, length = model.config.vocab_size, model.config.max_position_embeddings
    tokens = torch.randint(0, rows, (2, length), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found = model(tokens)
    return [getattr(found, "logits", found), *model.state_dict().values()]


def is_real(one, other):
    """Return whether two conversions of a model differ in what they store or compute."""
    a, b = logits_of(one), logits_of(other)
    return len(a) != len(b) or not all(map(torch.equal, a, b))


def planted_in_a_table(folder, family, draw, number):
    """Plant a real fault in the table of a conversion; return what it is, and the refusal."""
    settings = random_settings(family, draw.randrange(10**6))
    model = write_model(folder / "model", family, settings, seed=number)
    convert = import_from
    if draw.random() < 0.5:
        without_proof(import_from, model, folder / "ours", TABLES[family])
        model, convert = folder / "ours", export_from
    right = without_proof(convert, model, folder / "right", TABLES[family])
    for attempt in range(100):
        name = draw.choice(list(IN_TABLES))
        table = IN_TABLES[name](TABLES[family], draw)
        if table is None:
            continue
        try:
            # A conversion that ends before its proof is refused too.
            wrong = without_proof(convert, model, folder / f"wrong {attempt}", table)
            if not is_real(right, wrong):
                continue
        except NeoXError:
            pass
        what = f"{convert.__name__}, {family}, {name}"
        return what, refusal(folder, by_results_alone, convert, model, folder / "wrong", table)
    raise AssertionError("no real fault was drawn")


def refusal(folder, convert, *arguments):
    """Return the message of a refused conversion that leaves nothing; None if it was not refused."""
    try:
        convert(*arguments)
    except NeoXError as error:
        assert not (folder / "wrong").exists()
        assert [path for path in folder.iterdir() if path.name.startswith(".")] == []
        return str(error)
    return None


def swap_tensors(tensors, config, draw):
    one = draw.choice(sorted(tensors))
    alike = [name for name in sorted(tensors) if name != one and tensors[name].shape == tensors[one].shape]
    if alike:
        other = draw.choice(alike)
        tensors[one], tensors[other] = tensors[other], tensors[one]


def swap_parts(tensors, config, draw):
    """Exchange two parts of one tensor of one dimension, such as the biases of queries and keys."""
    name = draw.choice([name for name in sorted(tensors) if len(tensors[name]) > 1])
    values = tensors[name].clone()
    size = draw.randint(1, len(values) // 2)
    start = draw.randint(0, len(values) - 2 * size)
    values[start : start + 2 * size] = values[start : start + 2 * size].roll(size, 0)
    tensors[name] = values


def one_value(tensors, config, draw):
    name = draw.choice(sorted(tensors))
    values = tensors[name].clone().view(-1)
    values[draw.randrange(len(values))] *= draw.choice([-1.0, 0.0, 1.001])
    tensors[name] = values.view(tensors[name].shape)


def each_tensor(move):
    def change(tensors, config, draw):
        name = draw.choice(sorted(tensors))
        tensors[name] = move(tensors[name], None).contiguous()

    return change


def without_tensor(tensors, config, draw):
    tensors.pop(draw.choice(sorted(tensors)))


def zero_bias(tensors, config, draw):
    names = [name for name in sorted(tensors) if tensors[name].dim() == 1]
    name = draw.choice(names)
    tensors[name] = torch.zeros_like(tensors[name])


def other_number(tensors, config, draw):
    """Change one number of the configuration, in any block."""
    places = [(config, name) for name in sorted(config)]
    places += [(config["rope_parameters"], name) for name in sorted(config.get("rope_parameters", ()))]
    ignored = ("_dropout", "_pdrop", "_token_id", "initializer_range", "classifier_dropout", "pretraining_tp")
    numbers = [
        (block, name)
        for block, name in places
        if isinstance(block[name], int | float) and not isinstance(block[name], bool)
        if not name.endswith(ignored)
    ]
    block, name = draw.choice(numbers)
    if isinstance(block[name], int):
        block[name] += draw.choice([-1, 1])
    else:
        block[name] *= draw.choice([0.5, 1.01, 2.0])


def other_truth(tensors, config, draw):
    names = [name for name in sorted(config) if isinstance(config[name], bool)]
    name = draw.choice(names)
    config[name] = not config[name]


def other_word(tensors, config, draw):
    name = "activation_function" if "activation_function" in config else "hidden_act"
    config[name] = draw.choice(
        [each for each in ("gelu", "gelu_new", "silu", "relu") if each != config[name]]
    )


IN_FOLDERS = {
    "two tensors": swap_tensors,
    "two parts": swap_parts,
    "one value": one_value,
    "rolled": each_tensor(rolled),
    "transposed": each_tensor(transposed),
    "truncated": each_tensor(truncated),
    "next row": each_tensor(one_row_too_far),
    "missing": without_tensor,
    "bias": zero_bias,
    "number": other_number,
    "truth": other_truth,
    "word": other_word,
}


def planted_in_a_folder(folder, family, draw, number):
    """Plant a real fault in a folder that was converted; return what it is, and the refusal by `verify`."""
    settings = random_settings(family, draw.randrange(10**6))
    model = write_model(folder / "model", family, settings, seed=number)
    ours = without_proof(import_from, model, folder / "ours", TABLES[family])
    right = SimpleNamespace(folder=model, family=TABLES[family])
    for attempt in range(100):
        wrong = shutil.copytree(model, folder / f"folder {attempt}")
        tensors = load_file(wrong / "model.safetensors")
        config = json.loads((wrong / "config.json").read_text())
        name = draw.choice(list(IN_FOLDERS))
        IN_FOLDERS[name](tensors, config, draw)
        save_file(tensors, wrong / "model.safetensors", metadata={"format": "pt"})
        (wrong / "config.json").write_text(json.dumps(config))
        try:
            if not is_real(right, SimpleNamespace(folder=wrong, family=TABLES[family])):
                continue
        except (NeoXError, RuntimeError, IndexError):
            pass  # transformers cannot even compute it.
        return f"verify, {family}, {name}", refusal(folder, verify, ours.folder, wrong)
    raise AssertionError("no real fault was drawn")


def planted(folder, number):
    """Plant fault `number`; return what it is, and the message that refuses it (None if none does)."""
    family = FAMILIES[number % len(FAMILIES)]
    plant = planted_in_a_folder if number // len(FAMILIES) % 3 == 2 else planted_in_a_table
    return plant(folder, family, random.Random(number), number)


@pytest.mark.parametrize("number", range(5, 15))
def test_a_wrong_mapping_is_refused(tmp_path, number):
    what, message = planted(tmp_path, number)
    assert message is not None, what


@pytest.mark.sweep
def test_200_wrong_mappings_are_refused(tmp_path):
    refused, accepted = {}, []
    for number in range(200):
        what, message = planted(tmp_path / str(number), number)
        if message is None:
            accepted.append(f"{number}: {what}")
        else:
            refused[f"{number}: {what}"] = message
        shutil.rmtree(tmp_path / str(number))
    assert accepted == []
    assert len(refused) == 200
    kinds = {what.partition(": ")[2] for what in refused}
    assert len(kinds) > 60  # Directions by families by faults.
