"""The table of who reads which parameter, which `neox-config explain` prints, is true."""

from support.readers import TABLE, read_by, table


def test_the_table_is_what_the_packages_say():
    assert TABLE.read_text() == table(), "run `make docs`"


def test_a_reader_is_found_by_section_and_name():
    assert "neox_model.build.attention" in read_by("rotary_pct")
    assert "neox_model.optim.build" in read_by("optimizer.params.lr")


def test_a_method_of_text_is_no_reader():
    """`split` is a parameter, too."""
    assert "neox_launcher.config.reading" not in read_by("split")
    assert "neox_model.train.datasets" in read_by("split")


def test_a_variable_of_the_same_name_is_no_reader():
    assert "neox_launcher.config.resolve" not in read_by("split")
    assert "neox_launcher.plan" not in read_by("optimizer.type")
    assert "neox_model.optim.build" in read_by("optimizer.type")


def test_what_nobody_names_is_read_with_the_block_around_it():
    assert read_by("comet.api_key") == read_by("comet") != []


def test_a_block_that_is_handed_on_whole_is_left_to_the_table_of_those():
    assert read_by("flops_profiler.module_depth") == []
    assert "neox_launcher.config.engine_json" in read_by("flops_profiler.enabled")
