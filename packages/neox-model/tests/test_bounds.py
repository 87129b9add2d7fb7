"""Versions outside the bounds of our packages are named, in one line, and nothing is refused."""

import logging
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest
from packaging.specifiers import SpecifierSet

from neox_model import bounds, processes
from neox_model.bounds import untested_versions
from neox_model.versions import package_versions
from support.refusals import shows

REQUIRES = {
    "neox-kernels": ["click>=8.4", "torch<2.16,>=2.11"],
    "neox-model": [
        "neox-data[torch]==0.1.0",
        "ftfy",
        "torch<2.16,>=2.13",
        "deepspeed<0.20,>=0.19.8",
        'backport>=1; python_version < "3.12"',
        'transformers<5.9,>=5.0; extra == "hf"',
    ],
}


@pytest.fixture
def installed(monkeypatch):
    """Return the versions that are installed, to be changed; others are not."""
    versions = dict.fromkeys(REQUIRES, "0.1.0") | {"torch": "2.13.0+cu130", "deepspeed": "0.19.8"}

    def version(package):
        if package not in versions:
            raise PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr(bounds, "version", version)
    monkeypatch.setattr(bounds, "requires", REQUIRES.get)
    return versions


def test_packages_with_an_upper_bound_are_those_of_which_we_use_more_than_the_documents(installed):
    assert bounds.tested_versions() == {
        "torch": ">=2.13,<2.16",
        "deepspeed": ">=0.19.8,<0.20",
        "transformers": ">=5.0,<5.9",
    }
    del installed["neox-model"]
    assert bounds.tested_versions() == {"torch": ">=2.11,<2.16"}


def test_untested_versions_are_named_with_the_bounds(installed):
    assert untested_versions() == ""
    installed |= {"torch": "2.16.0+cpu", "transformers": "5.8.1", "deepspeed": "0.19.7"}
    named = "torch 2.16.0+cpu (tested: >=2.13,<2.16), deepspeed 0.19.7 (tested: >=0.19.8,<0.20)"
    assert untested_versions() == named
    assert package_versions()["untested"] == named
    installed |= {"torch": "2.15.0", "transformers": "5.9.0", "deepspeed": "0.19.8"}
    assert shows(untested_versions(), "transformers 5.9.0", ">=5.0,<5.9")
    del installed["transformers"]
    assert "untested" not in package_versions()


VERSIONS = (
    "2.9.1 2.12.1 2.13 2.13.0 2.13.0+cu130 2.14.0a0+git1 2.15.99 2.16 2.16.0rc1 2.16.0.dev20261101 3 10.1"
)


@pytest.mark.parametrize("version", VERSIONS.split())
def test_versions_are_compared_as_pip_does(version, installed):
    installed["torch"] = version
    is_tested = SpecifierSet(">=2.13,<2.16").contains(version, prereleases=True)
    assert ("torch" not in untested_versions()) == is_tested


@pytest.mark.parametrize(("rank", "lines"), [(0, 1), (1, 0)])
def test_rank_0_logs_untested_versions_in_one_line(rank, lines, installed, monkeypatch, caplog):
    installed["torch"] = "2.16.0"
    monkeypatch.setattr(processes, "read_rank", lambda: SimpleNamespace(rank=rank, local_rank=0))
    for name in ("configure_allocator", "join_process_group", "create_groups", "answer_questions"):
        monkeypatch.setattr(processes, name, lambda *given: None)
    layout = SimpleNamespace(backend=None, world=2, tensor=1, stages=1, experts=1)
    with caplog.at_level(logging.WARNING, "neox_model"):
        processes.join_processes(layout, None)
    message = (
        "versions that were not tested: torch 2.16.0 (tested: >=2.13,<2.16); neox-launch doctor checks them"
    )
    assert caplog.messages == [message] * lines
