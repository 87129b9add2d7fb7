"""Prove that a folder of transformers and a checkpoint of ours contain the same model.

Each side is computed by its own program: transformers reads the folder, and neox-model builds the model from
the parameters that the checkpoint records. Of the conversion's tables only the names of stored tensors are
used. In addition, every stored tensor is compared value by value, through these tables.
"""

import hashlib
import logging
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from neox_config.facts.checkpoints import MANIFEST
from neox_config.spec.model import ModelSpec
from neox_config.spec.run import RunSpec
from neox_model.convert.differences import differences
from neox_model.convert.errors import ProofError
from neox_model.convert.proof.comparison import Figures
from neox_model.convert.proof.keys import check_keys
from neox_model.convert.proof.layers import compare_layers
from neox_model.convert.proof.sides import Sides
from neox_model.convert.proof.tensors import compare_tensors
from neox_model.convert.proof.tokens import compare_tokenizers, parts_replaced
from neox_model.convert.proof.whole import compare_whole
from neox_model.convert.tokenizer_files import read_json
from neox_model.convert.weights import open_weights
from neox_model.versions import package_versions

__all__ = ["WHOLE_LIMIT", "Sides", "prove", "provenance"]

logger = logging.getLogger(__name__)

WHOLE_LIMIT = 1_000_000_000
"""Parameters of the largest model that is compared as a whole, in addition to each layer."""
_BLOCK_BYTES = 2**24


def prove(
    sides: Sides,
    model: ModelSpec,
    run: RunSpec,
    *,
    source: Path,
    output: Path,
    whole_limit: int = WHOLE_LIMIT,
) -> dict[str, Any]:
    """Compare the two sides, and return what was seen, for `verification.json`.

    Args:
        sides: both models.
        model: ours.
        run: how it runs.
        source: the folder that was converted, for the hashes.
        output: the folder that was written.
        whole_limit: parameters of the largest model that is compared as a whole.
    """
    figures = Figures()
    logger.info("comparing architectures and tokenizers")
    stated = sides.family.read(read_json(sides.folder / "config.json"))
    files, theirs = open_weights(sides.folder, sides.family, stated)
    if options := "; ".join(differences(model, theirs)):
        raise ProofError(
            f"{sides.folder / 'config.json'} is of another model than {sides.weights.folder}: {options}"
        )
    counted = check_keys(sides, files)
    texts = compare_tokenizers(
        sides.tokenizer, sides.folder, rows=sides.rows, as_stored=sides.as_stored
    )  # First: the next comparisons use ids of the tokenizer.
    rounded = compare_tensors(sides, model, files)
    compare_layers(sides, model, run, files, figures)
    if counted["parameters"] <= whole_limit:
        logger.info("comparing whole models")
        compare_whole(sides, model, run, files, figures)
    return {
        "verdict": "equal after rounding" if rounded else "equal",
        "rounded": rounded,
        "class": sides.family.class_name,
        **counted,
        "largest_differences": figures.plain(),
        "limit": figures.limit,
        "compared_as_a_whole": counted["parameters"] <= whole_limit,
        "texts_tokenized_alike": texts,
        **({"tokenizer_as_stored": parts_replaced(sides.tokenizer, sides.folder)} if sides.as_stored else {}),
        **provenance(source, output, packages=("transformers", "tokenizers")),
    }


def provenance(
    source: Path, output: Path, *, packages: Iterable[str], read: Sequence[Path] = ()
) -> dict[str, Any]:
    """Return what was converted with which versions, for `verification.json`.

    Args:
        source: the folder that was converted.
        output: the folder that was written.
        packages: names of the packages that took part, in addition to ours.
        read: the files that were read, in the source or not; none: all files of the source.
    """
    inside = {
        path: path.relative_to(source) if path.is_relative_to(source) else path.absolute() for path in read
    }
    hashes = {str(name): _hash(path) for path, name in inside.items()} or _hashes(source)
    return {
        "versions": {**package_versions(), **{package: version(package) for package in packages}},
        "source": {"folder": str(source.absolute()), "sha256": hashes},
        "sha256": _hashes(output),
    }


def _hashes(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file; of a checkpoint of ours, that of its manifest, which has checksums.

    Hidden files and folders are left out: what is being written may be in the folder that is read.
    """
    if (folder / MANIFEST).is_file():
        return {MANIFEST: _hash(folder / MANIFEST)}
    names = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    visible = [name for name in names if not any(part.startswith(".") for part in name.parts)]
    return {str(name): _hash(folder / name) for name in visible}


def _hash(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
