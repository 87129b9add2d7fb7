"""Migration replaces shorthands and older spellings by parameter names and keeps everything else."""

import json

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from neox_config.errors import ConfigError
from neox_config.names import answers
from neox_config.read.migrate import migrate_text
from neox_config.read.older import OLDER_SPELLINGS
from neox_launcher.cli.config import main
from support.refusals import refused, shows

BLOCKS = """\
# a model
num-layers: 2   # two
gas: 4  # accumulate
lr: 0.001  # peak
adam_beta1: 0.8
geglu: true
rms-norm: false
fp16:
  # half
  type: bfloat16
  enabled: true
optimizer:
  type: Adam
  params:
    max_grad_norm: 1.0 # clip
    weight_decay: 0.1
"zero_optimization": {"cpu_offload": true}
"""
MIGRATED_BLOCKS = """\
# a model
num-layers: 2   # two
gradient-accumulation-steps: 4  # accumulate
# peak
activation: "geglu"
bf16: {enabled: true}
fp16:
  # half
  enabled: false
gradient_clipping: 1.0
optimizer:
  type: Adam
  params:
    betas: [0.8, 0.999]
    lr: 0.001
    # clip
    weight_decay: 0.1
"zero_optimization": {"offload_optimizer": {"device": "cpu"}}
"""
BRACES = """\
{
  # hi
  "gas": 4, "lr": 1e-3, # peak
  "zero_optimization": true,
  "adam_beta2": 0.9,
  "min_scale": 1,
  "activation_checkpointing": {"profile": true},
}
"""
MIGRATED_BRACES = """\
{
  # hi
  "gradient-accumulation-steps": 4, "optimizer": {"params": {"betas": [0.9, 0.9], "lr": 1e-3}}, # peak
  "zero_optimization": {"stage": 1},
  "fp16": {"min_loss_scale": 1},
  "profile-backward": true,
}
"""


@pytest.mark.parametrize(("text", "expected"), [(BLOCKS, MIGRATED_BLOCKS), (BRACES, MIGRATED_BRACES)])
def test_names_are_rewritten_and_the_rest_stays(text, expected):
    migrated, changes = migrate_text(text, "a.yml")
    assert migrated == expected
    assert changes
    assert migrate_text(migrated, "a.yml") == (migrated, [])


def test_two_values_are_not_merged():
    with refused(ConfigError, "optimizer.params.lr"):
        migrate_text("lr: 1\noptimizer: {params: {lr: 2}}\n", "a.yml")


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from([*answers("shorthands"), *OLDER_SPELLINGS]).filter(lambda name: "." not in name),
        st.sampled_from([True, False, 1, 0.5, "none", {}]),
        max_size=5,
    ),
    st.sampled_from([None, 2]),
)
def test_migration_keeps_the_meaning_or_is_refused(document, indent):
    """`migrate_text` compares the meanings itself; here it must end, with a text that stays as it is."""
    try:
        text, _ = migrate_text(json.dumps(document, indent=indent), "a.yml")
    except ConfigError:
        return
    assert migrate_text(text, "a.yml") == (text, [])


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments], catch_exceptions=False)


def test_the_file_is_replaced_only_on_request(tmp_path):
    path = tmp_path / "a.yml"
    path.write_text(BLOCKS)
    path.chmod(0o640)
    assert run("migrate", path).stdout == MIGRATED_BLOCKS
    assert path.read_text() == BLOCKS
    assert run("migrate", path, "--in-place").stdout == ""
    assert path.read_text() == MIGRATED_BLOCKS
    assert path.stat().st_mode & 0o777 == 0o640
    assert run("migrate", path, "--in-place").stderr == f"{path}: nothing to do\n"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.yml"]


def test_several_files_are_replaced_each_by_itself(tmp_path):
    for name in ("a.yml", "b.yml"):
        (tmp_path / name).write_text(BLOCKS)
    (tmp_path / "c.yml").write_text("num-layers: 2\n")
    refused = run("migrate", "-d", tmp_path, "a", "b.yml")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert shows(refused.stderr, "2", "--in-place")
    assert "neox-config show --changed " in refused.stderr
    result = run("migrate", "-d", tmp_path, "a", "b.yml", "c.yml", "--in-place")
    assert (result.exit_code, result.stdout) == (0, "")
    assert [(tmp_path / name).read_text() for name in ("a.yml", "b.yml")] == [MIGRATED_BLOCKS] * 2
    assert result.stderr.splitlines()[-1] == f"{tmp_path}/c.yml: nothing to do"


def test_of_several_files_none_is_replaced_if_one_is_refused(tmp_path):
    (tmp_path / "a.yml").write_text(BLOCKS)
    (tmp_path / "b.yml").write_text("lr: 1\noptimizer: {params: {lr: 2}}\n")
    result = run("migrate", tmp_path / "a.yml", tmp_path / "b.yml", tmp_path / "absent.yml", "--in-place")
    assert result.exit_code == 2
    assert shows(result.stderr, "b.yml", "optimizer.params.lr")
    assert "absent.yml" in result.stderr
    assert (tmp_path / "a.yml").read_text() == BLOCKS
