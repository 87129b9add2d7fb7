"""One home per fact: what the configuration and an implementation both know is written once.

A fact is a table, a formula, a name of a file or a size. A second copy would agree today and differ after a
change of one of them. neox_data is independent of the other packages and has its own copy of the facts that
it shares with them; `tests/integration/test_facts_of_data.py` compares the copies.
"""

import re
from dataclasses import dataclass

import pytest

from support.sources import ROOT, sources


@dataclass(frozen=True)
class Fact:
    """Where a fact is written.

    Args:
        home: module that contains it.
        users: modules that import it from there.
        text: pattern of a copy; may match in no other module.
    """

    home: str
    users: tuple[str, ...]
    text: str


FACTS = {
    "learning-rate formulas": Fact(
        home="neox_config.facts.learning_rate",
        users=("neox_config.derive.learning_rate", "neox_config.schema.sections.lr_schedule"),
        text=r"0\.693|cos\(math\.pi",
    ),
    "learning-rate formulas of DeepSpeed": Fact(
        home="neox_config.facts.deepspeed_schedules",
        users=("neox_config.derive.learning_rate", "neox_config.schema.sections.optimizer"),
        text=r"math\.log\(steps?\b|cycle_first_step_size /",
    ),
    "limit of a loss, and exit codes after spikes": Fact(
        home="neox_config.facts.spikes",
        users=(
            "neox_launcher.controller.restarts",
            "neox_model.train.callbacks.spikes",
            "neox_model.train.loading",
            "neox_model.train.recent_losses",
        ),
        text=r"= 1\.4826|left-out\.json",
    ),
    "names in a folder of checkpoints": Fact(
        home="neox_config.facts.checkpoints",
        users=(
            "neox_launcher.controller.restarts",
            "neox_launcher.plan.preflight",
            "neox_launcher.protocol.kept_checkpoints",
            "neox_launcher.verify_resume.phases",
            "neox_model.checkpoint.contents",
            "neox_model.checkpoint.directory",
            "neox_model.checkpoint.save",
        ),
        text=r"[\"']global_step(?!s)|[\"'/]manifest\.json|= [\"']latest[\"']|[\"']embedding\.word_embeddings",
    ),
    "header and files of a dataset": Fact(
        home="neox_launcher.plan.dataset_files",
        users=("neox_launcher.plan.kinds", "neox_launcher.plan.usable_documents"),
        text=r"MMIDIDX|TNTIDX|\}\.manifest\.json\b",
    ),
    "size of the padded vocabulary": Fact(
        home="neox_config.facts.vocabulary",
        users=("neox_config.spec.model",),
        text=r"// multiple\b|make_vocab_size_divisible_by\)? [*/]",
    ),
    "activations, and which are gated": Fact(
        home="neox_config.facts.activations",
        users=(
            "neox_config.schema.sections.model",
            "neox_config.derive.widths",
            "neox_config.estimate.mixers",
            "neox_config.spec.mixers",
        ),
        text=r"[\"']softsign[\"'](?!: functional)|[\"']reglu[\"'](?!: functional)",
    ),
    "attention types": Fact(
        home="neox_config.facts.attention",
        users=(
            "neox_config.schema.sections.attention",
            "neox_config.derive.attention_layers",
            "neox_config.spec.read_model",
            "neox_config.rules.attention",
        ),
        text=r"[\"'](sparse_variable|amlp)[\"'](?!: (_|SpatialMLP))",
    ),
    "epsilons and weights of norms": Fact(
        home="neox_config.facts.norms",
        users=(
            "neox_config.schema.sections.model",
            "neox_config.estimate.mixers",
            "neox_config.spec.model",
            "neox_model.assembly.norms",
        ),
        text=r"[\"']scalenorm[\"'](?!: ScaleNorm)|\.(rms_norm|scalenorm)_epsilon",
    ),
    "sizes of the parts of the loss": Fact(
        home="neox_config.facts.loss",
        users=("neox_config.estimate.memory", "neox_model.parallel.cross_entropy"),
        text=r"(CHUNK|BLOCK)_NUMBERS\b.* = ",
    ),
    "files and vocabulary sizes of tokenizers": Fact(
        home="neox_config.facts.tokenizers",
        users=(
            "neox_config.schema.sections.tokenizer",
            "neox_config.estimate.setup",
            "neox_launcher.plan.preflight",
        ),
        text=r"50_?257|[\"']CharLevelTokenizer[\"']|[\"']added_tokens[\"']",
    ),
    "order of ranks": Fact(
        home="neox_config.facts.topology",
        users=("neox_model.parallel.topology", "neox_model.train.data.description"),
        text=r"rank // \S*(model|self\._step)\S* % |reshape\((self\.)?pipe",
    ),
}


def modules_matching(pattern: str) -> set[str]:
    return {
        source.module
        for source in sources()
        if not source.module.startswith("neox_data") and re.search(pattern, (ROOT / source.path).read_text())
    }


@pytest.mark.parametrize("name", FACTS)
def test_a_fact_is_written_in_one_module(name):
    assert modules_matching(FACTS[name].text) == {FACTS[name].home}


@pytest.mark.parametrize("name", FACTS)
def test_the_modules_that_need_a_fact_import_it(name):
    fact = FACTS[name]
    importing = {
        source.module for source in sources() for found in source.imports if found.module == fact.home
    }
    assert importing >= set(fact.users)
