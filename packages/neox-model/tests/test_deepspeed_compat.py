"""The range of DeepSpeed's versions."""

import pytest

from neox_model.deepspeed_compat import refuse_other_versions
from neox_model.errors import ModelError


def test_the_installed_version_and_the_ends_of_the_range_are_accepted():
    refuse_other_versions()
    refuse_other_versions((0, 19, 8))
    refuse_other_versions((0, 19, 99))


@pytest.mark.parametrize("version", [(0, 19, 7), (0, 20, 0), (1, 0, 0)])
def test_another_version_is_refused_with_the_command_that_installs_one(version):
    named = ".".join(map(str, version))
    with pytest.raises(ModelError, match=rf"DeepSpeed {named} is installed, .*'deepspeed>=0.19.8,<0.20'$"):
        refuse_other_versions(version)
