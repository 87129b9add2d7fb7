"""Documentation generated from the declarations, and the declarations."""

import json
import subprocess
import sys
from pathlib import Path

from neox_config import resolve
from neox_config.describe.reference import describe_parameter, reference
from neox_config.schema.config import all_parameters, parameter_named
from neox_config.schema.parameter import Section, param
from neox_config.spec.resolve import derived_values
from support.refusals import refused, shows

DOCS = Path(__file__).parents[5] / "docs"


def test_the_reference_in_docs_is_current():
    assert (DOCS / "configuration.md").read_text(encoding="utf-8") == reference(), "run: make docs"


def test_every_parameter_is_documented():
    for parameter in all_parameters():
        assert len(parameter.doc) > 5, parameter.name
        assert parameter.origin in ("DSL", "DSC", "Meg", "NeoX", "ours"), parameter.name
        assert not parameter.doc.endswith(" "), parameter.name


def test_a_parameter_has_all_its_properties():
    rotary = parameter_named("rotary_pct")
    assert (rotary.type, rotary.default, rotary.limits) == ("number", 1.0, ">= 0, <= 1")
    assert parameter_named("elasticity.version").limits == ""
    assert parameter_named("elasticity.min_time").limits == ">= 0, <= 1e18"
    assert rotary.used_when == "pos_emb is rotary"
    assert parameter_named("pos_emb").choices == ("learned", "rotary", "sinusoidal", "rpe", "alibi", "none")
    assert parameter_named("optimizer.params.betas").type == "list of numbers"
    assert parameter_named("num_layers").required
    assert not parameter_named("seq_length").required
    text = describe_parameter(parameter_named("zero_optimization.stage"))
    assert "also called  zero_stage" in text
    assert shows(text, "zero_optimization", "stage 1", "0")


def test_a_parameter_without_a_meaning_of_none_is_refused():
    with refused(TypeError, "needs none_means"):
        param(None, doc="x", origin="ours")
    with refused(TypeError, "needs a doc"):
        param(1, doc="", origin="ours")


def test_a_section_is_frozen_and_strict():
    class Example(Section):
        """An example."""

        size: int = param(1, doc="size", origin="ours")

    with refused(ValueError, "frozen"):
        Example().size = 2
    with refused(ValueError, "Extra inputs"):
        Example(sise=2)


def test_configuration_is_light():
    code = "import sys, neox_launcher.cli.launch, neox_launcher.cli.config, neox_launcher.agent.agent;"
    code += "import neox_launcher.worker.reporting;"
    code += "print(*sorted({'torch', 'numpy', 'deepspeed', 'neox_model', 'neox_data'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_configuration_imports_no_other_package_of_the_project():
    code = "import sys, neox_config, neox_config.describe.reference, neox_config.describe.display;"
    code += "print(*sorted({name.split('.')[0] for name in sys.modules if name.startswith('neox_')}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["neox_config"]


def test_derived_values_are_plain(load):
    derived = derived_values(resolve(load(), devices=1))
    assert derived["backend"] is None
    assert json.loads(json.dumps(derived))["attention_types"] == ["global"] * 4
