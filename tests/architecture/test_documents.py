"""What people read is true: generated documents are current, examples load, commands that are shown exist."""

import importlib
import itertools
import re
import shlex
from pathlib import Path

import click
import pytest
import yaml

import neox_data.cli
import neox_data.preprocess.cli
import neox_kernels.cli
import neox_launcher.cli.config
import neox_launcher.cli.launch
import neox_model.convert.cli
import neox_model.inspection.cli
import neox_model.report.cli
from docs_site import anchors_of, navigation, problems_of_pages, public_names, without_code
from neox_config import load_config, resolve
from neox_config.errors import ConfigError
from neox_config.estimate.setup import fewest_devices
from neox_config.facts.hugging_face import CLASSES
from neox_launcher.backends import BACKENDS
from neox_launcher.plan.environment import TRAVELLING_PREFIXES
from support.documents import DOCUMENTS, REPORTS, RUN, blocks_of, problems_of, shows
from support.sources import PACKAGES, ROOT

COMMANDS = {
    "neox-config": neox_launcher.cli.config.main,
    "neox-data": neox_data.cli.main,
    "neox-kernels": neox_kernels.cli.main,
    "neox-launch": neox_launcher.cli.launch.main,
    "neox-report": neox_model.report.cli.main,
    "neox-checkpoint": neox_model.inspection.cli.main,
    "neox-convert": neox_model.convert.cli.main,
    "preprocess_data": neox_data.preprocess.cli.main,
}
EXAMPLES = sorted((ROOT / "configs").glob("*.yml"))


def shown_in_document(path: Path) -> list[str]:
    """Return the commands in a document's console blocks, continued lines joined."""
    blocks = [block for block in blocks_of(path.read_text()) if block.language == "console"]
    return [command.replace("\\\n", " ") for block in blocks for command, _ in block.commands]


def shown_in_example(path: Path) -> list[str]:
    """Return the commands in an example's comments, continued lines joined; wide space ends a command."""
    text = re.sub(r"\\\n#\s+", "", path.read_text())
    lines = re.findall(r"^#   ((?:neox|preprocess)\S* .*)$", text, re.MULTILINE)
    return [re.split(r"\s{2,}", line)[0] for line in lines]


SHOWN = [
    (str(path.relative_to(ROOT)), command)
    for paths, shown in ((DOCUMENTS, shown_in_document), (EXAMPLES, shown_in_example))
    for path in paths
    for command in shown(path)
]
# The first lines of the file in the README of neox-launcher; its wrong lines come after them.
NEEDED = [
    "num-layers: 2",
    "hidden-size: 1000",
    "max-position-embeddings: 32",
    "train-iters: 100",
    "train-micro-batch-size-per-gpu: 2",
    "optimizer: {type: Adam, params: {lr: 0.001}}",
]
# Configurations that the reader writes: of docs/finetuning.md and docs/huggingface.md, which
# tests/integration runs, and of configs/README.md.
WRITTEN = (
    "base.yml",
    "adapters.yml",
    "imported/model.yml",
    "imported-adapters/model.yml",
    "upcycled/model.yml",
    "my-run.yml",
    "job.yml",
    "run/config.yml",
)
TRAININGS = [
    (place, command)
    for place, command in SHOWN
    if command.startswith("neox-launch")
    and " --config " in command
    and not any(f"--config {name}" in command for name in WRITTEN)
]


@pytest.mark.parametrize(("place", "line"), SHOWN)
def test_a_command_that_is_shown_exists_with_its_options(place, line):
    words = shlex.split(line, comments=True)
    if words[0] == "make":
        assert f"\n{words[1]}:" in (ROOT / "Makefile").read_text()
        return
    if words[0] not in COMMANDS:
        assert words[0] in {
            *("curl", "git", "lm_eval", "mkdir", "pip", "printf", "python", "sed", "source", "tensorboard"),
            *("apptainer", "cp", "docker", "eval", "export", "kubectl", "pytest", "sbatch", "srun"),
        }
        return
    command: click.Command = COMMANDS[words[0]]
    options = {"--help"}
    for word in words[1:]:
        if isinstance(command, click.Group) and word in command.commands:
            options |= {name for option in command.params for name in option.opts}
            command = command.commands[word]
        if word.startswith("-"):
            known = options | {name for option in command.params for name in option.opts}
            assert word.split("=")[0] in known


@pytest.mark.parametrize(("place", "line"), TRAININGS)
def test_a_training_that_is_shown_has_a_valid_configuration(place, line):
    words = shlex.split(line, comments=True)
    given = list(itertools.pairwise(words))
    files = [value for option, value in given if option == "--config"]
    overrides = [value for option, value in given if option == "--set"]
    config = load_config(files, overrides=overrides, directory=ROOT)
    assert resolve(config, devices=fewest_devices(config)).run.batch.whole >= 1


def test_the_refused_configuration_in_the_readme_is_reported_as_shown(tmp_path, monkeypatch):
    text = (ROOT / "packages/neox-launcher/README.md").read_text()
    shown = re.search(
        r"^\$ neox-launch --config small.yml\n(.*?)\n```", text, re.DOTALL | re.MULTILINE
    ).group(1)
    wrong = {int(line): entry for line, entry in re.findall(r"^  line (\d+)  (.*)$", shown, re.MULTILINE)}
    assert len(wrong) == 2
    lines = [wrong.get(number, "") for number in range(1, max(wrong) + 1)]
    lines[: len(NEEDED)] = NEEDED
    (tmp_path / "small.yml").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as error:
        load_config(["small.yml"])
    assert str(error.value) == shown


@pytest.mark.parametrize("package", ["neox-launcher", "neox-model"])
def test_the_python_in_the_readme_of_a_package_runs(package, monkeypatch):
    monkeypatch.chdir(ROOT)
    blocks = blocks_of((ROOT / f"packages/{package}/README.md").read_text())
    sources = [block.text for block in blocks if block.language == "python"]
    assert sources
    names: dict[str, object] = {}
    for source in sources:
        exec(compile(source, package, "exec"), names)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_block_is_run_or_marked(path):
    name = str(path.relative_to(ROOT))
    assert problems_of(path.read_text(), has_runner=name in RUN) == []


MARKED = "Text.\n\n<!-- not run: gpu -->\n```console\n$ make gpu-check\n```\n"
UNMARKED = "Text.\n\n```console\n$ neox-config explain lr \\\n    rope\nlearning rate\n```\n"


@pytest.mark.parametrize(
    ("text", "has_runner", "problem"),
    [
        (MARKED, False, None),
        (UNMARKED, True, None),
        (MARKED + UNMARKED, True, None),
        (UNMARKED, False, "line 3: no test runs this block"),
        (MARKED + UNMARKED, False, "line 9: no test runs this block"),
        (MARKED, True, "no block is run"),
        (MARKED.replace("gpu -->", "later -->"), False, "unknown reason 'later'"),
        (MARKED.replace("-->\n", "-->\n\n"), True, "a mark is not directly before a console block"),
        (UNMARKED.replace("```", "   ```"), False, "an indented block is not found by tests"),
        (MARKED.replace("```console", "```yaml"), False, "a mark is not directly before a console block"),
    ],
)
def test_a_block_that_is_neither_run_nor_marked_is_found(text, has_runner, problem):
    found = problems_of(text, has_runner=has_runner)
    assert (found == []) if problem is None else any(problem in line for line in found)


@pytest.mark.parametrize(
    ("shown", "is_shown"),
    [
        ("devices  64\nmemory  19.86 GiB\n", True),
        ("devices  64\n...\nfits: 19.86 GiB of ...\n", True),
        ("memory  19.8", False),
        ("memory  19.87 GiB\n", False),
        ("devices  64\nfits: ...\n", False),
        ("fits: ...\n...\ndevices  64\n", False),
    ],
)
def test_shown_output_is_compared_line_by_line(shown, is_shown):
    assert shows(shown, "\ndevices  64\nmemory  19.86 GiB \n\nfits: 19.86 GiB of 80.00 GiB\n") is is_shown


def test_every_document_is_in_the_navigation_of_the_site_once():
    pages = [page for entry in navigation() for page in pages_of(entry)]
    reference = {page for page in pages if page.startswith("api/")}
    shown = set(DOCUMENTS) - set(REPORTS)
    assert sorted(set(pages) - reference) == sorted(str(path.relative_to(ROOT)) for path in shown)
    assert len(pages) == len(set(pages))
    assert reference == {f"api/{name}.md" for name in PACKAGES if name != "neox_launcher"}


def pages_of(entry):
    (value,) = entry.values()
    return [value] if isinstance(value, str) else [page for inner in value for page in pages_of(inner)]


def test_the_reference_of_the_site_has_what_users_import():
    assert public_names("neox_model")["neox_model"]["Trainer"] == "neox_model.api.trainer.Trainer"
    assert "ParallelAttention" in public_names("neox_model")["neox_model.layers.attention"]
    for package in PACKAGES:
        for module, names in public_names(package).items():
            for name, path in names.items():
                home = importlib.import_module(path.rpartition(".")[0])
                assert getattr(importlib.import_module(module), name) is getattr(home, name)


def test_the_documents_list_and_count_the_classes_of_transformers():
    table = (ROOT / "docs/huggingface.md").read_text()
    assert [name for name in CLASSES.values() if f"\n| `{name}` |" not in table] == []
    for path, number in (("README.md", 1), ("docs/limits.md", 2)):
        assert (
            re.findall(r"(\w+) classes(?:\]|, verified)", (ROOT / path).read_text())
            == [str(len(CLASSES))] * number
        )


def test_every_example_explains_its_use():
    shown = "\n".join(line for _, line in TRAININGS)
    assert [path.name for path in EXAMPLES if f"--config configs/{path.name}" not in shown] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_document_points_to_files_and_headings_that_exist(path):
    assert broken_links(path, path.read_text()) == []


def broken_links(path, text):
    """Return the links of a document that lead to no file, or to no heading of a document."""
    found = []
    for link, name, anchor in re.findall(r"\]\((([^)#:\s]*)(?:#([^)\s]*))?)\)", without_code(text)):
        target = path.parent / name if name else path
        if not target.exists():
            found.append(link)
            continue
        headings = anchors_of(text if target == path else target.read_text()) if anchor else set()
        if anchor and anchor not in headings:
            found.append(link)
    return found


@pytest.mark.parametrize(
    ("link", "is_broken"),
    [
        ("#a-heading", False),
        ("#heading", True),
        ("#not-a-heading", True),
        ("formats.md#checkpoint-directory", False),
        ("formats.md#checkpoints", True),
        ("../README.md", False),
        ("README.md", True),
        ("https://example.org/#missing", False),
    ],
)
def test_a_link_to_a_file_or_heading_that_is_missing_is_found(link, is_broken):
    text = f"## `A` heading\n\n[b]({link})\n\n```text\n# Not a heading\n[x](missing.md)\n```\n"
    assert broken_links(ROOT / "docs/index.md", text) == ([link] if is_broken else [])


def test_two_headings_with_one_anchor_are_refused():
    with pytest.raises(AssertionError, match="#a-b"):
        anchors_of("# A b\n\n## `a` [b](c.md)\n")


def test_a_page_that_lacks_a_target_or_loads_from_the_internet_is_found(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/b.html").write_text('<h1 id="x">X</h1><a href="https://example.org/">out</a>')
    (tmp_path / "index.html").write_text(
        '<a href="a/b.html#x">1</a><a href="a/b.html#y">2</a><img src="c.png"><a href="#">top</a>'
        '<script src="https://example.org/s.js"></script>'
    )
    assert problems_of_pages(tmp_path) == [
        "index.html: a/b.html#y has no such anchor",
        "index.html: c.png does not exist",
        "index.html: loads https://example.org/s.js",
    ]


def test_the_page_about_launching_names_the_variables_that_are_passed_on():
    text = (ROOT / "docs/launching.md").read_text()
    assert [prefix for prefix in TRAVELLING_PREFIXES if f"`{prefix}" not in text] == []


def test_every_way_to_several_hosts_has_an_example_that_the_page_shows():
    text = (ROOT / "docs/launching.md").read_text()
    for name in set(BACKENDS) - {"local"}:
        path = ROOT / "configs" / f"multinode-{name}.yml"
        assert load_launcher(path) == name
        assert f"--config configs/{path.name}" in text


def load_launcher(path: Path) -> str:
    return yaml.safe_load(path.read_text())["launcher"]
