"""The names that a configuration may contain are the keys of the tables of facts."""

from typing import get_args

import pytest

from neox_config.facts import activations, learning_rate, norms, tokenizers

CHOICES = {
    "activation": (activations.ActivationName, activations.ACTIVATION_FACTS),
    "decay style": (learning_rate.DecayStyle, learning_rate.DECAY_STYLES),
    "form of the decay of wsd": (learning_rate.StableDecayStyle, learning_rate.FINAL_DECAYS),
    "norm": (norms.NormName, norms.NORM_FACTS),
    "tokenizer": (tokenizers.TokenizerName, tokenizers.TOKENIZER_FACTS),
}


@pytest.mark.parametrize("choice", CHOICES)
def test_every_name_has_a_row(choice):
    names, table = CHOICES[choice]
    assert list(get_args(names)) == list(table)
