"""What is said about a checkpoint that does not fit a run."""

from neox_config.spec.refusals import OR_FINETUNE, other_model
from neox_config.spec.resume import Change, Changes
from support.refusals import shows

TOKENIZER = Change("vocab_file", "sha256 74930513", "sha256 683f9522")
ENTRIES = Change("make_vocab_size_divisible_by", "512 entries", "384 entries")
WIDTH = Change("hidden_size", 128, 256)


def test_another_tokenizer_is_named_as_such_and_not_as_a_value_to_set() -> None:
    for changes in ((TOKENIZER,), (ENTRIES, TOKENIZER)):
        refusal = other_model(Changes(model=changes), remedy=OR_FINETUNE)
        assert refusal is not None
        assert refusal.what.startswith("the model was trained with another tokenizer: ")
        assert shows(refusal.what, "vocab-file: sha256 74930513", "sha256 683f9522")
        assert refusal.remedy.startswith("set vocab-file to the tokenizer of that run, or set load")


def test_another_model_is_not_reported_as_another_tokenizer() -> None:
    for changes in ((WIDTH,), (ENTRIES,), (WIDTH, TOKENIZER)):
        refusal = other_model(Changes(model=changes), remedy=OR_FINETUNE)
        assert refusal is not None
        assert refusal.what.startswith("the checkpoint contains a different model: ")
        assert refusal.remedy == OR_FINETUNE
