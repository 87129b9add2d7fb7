"""transformers' side of a proof."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from neox_model.convert.errors import ConversionError, ProofError
from neox_model.convert.families import Family
from neox_model.optional import require

__all__ = [
    "adapted_names",
    "computed",
    "linear_names",
    "load_adapted_model",
    "load_config",
    "load_model",
    "load_tokenizer",
    "lora_defaults",
    "meta_model",
    "one_layer_model",
    "pack_integers",
    "require_packing",
    "require_peft",
    "require_transformers",
]

_INSTALL = "'neox-model[hf]'"
_INSTALL_PEFT = "'neox-model[peft]'"
_INSTALL_PACKED = "'neox-model[packed]'"


def require_transformers(because: str) -> ModuleType:
    """Import transformers, without its progress bars and advice.

    Raises:
        MissingPackageError: it is not installed.
    """
    transformers = require("transformers", because=because, install=_INSTALL)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def require_peft(because: str) -> ModuleType:
    """Import peft.

    Raises:
        MissingPackageError: it is not installed.
    """
    return require("peft", because=because, install=_INSTALL_PEFT)


def require_packing(because: str) -> ModuleType:
    """Import the part of compressed-tensors that packs weights as transformers reads them with its help.

    Raises:
        MissingPackageError: it or transformers is not installed.
        ConversionError: it packs otherwise.
    """
    require_transformers(because)
    helpers = "compressed_tensors.compressors.pack_quantized.helpers"
    try:
        return require(helpers, because=because, install=_INSTALL_PACKED)
    except ModuleNotFoundError as error:
        raise ConversionError(
            f"{because} requires compressed-tensors 0.20 or later, and another version is installed; install "
            f"it with: pip install --upgrade {_INSTALL_PACKED}"
        ) from error


def pack_integers(numbers: Tensor, bits: int) -> Tensor:
    """Return rows of int8 numbers of some bits as rows of int32, in the format pack-quantized."""
    packed: Tensor = require_packing("packing of weights").pack_to_int32(numbers, bits)
    return packed


def linear_names(folder: Path, family: Family) -> set[str]:
    """Return the names of the weights of matrices that are a `torch.nn.Linear` in transformers."""
    model = meta_model(load_config(folder, family), family)
    return {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)}


# Experts are computed one after the other: grouped products require widths of 16 bytes.
_PLAIN = {"experts_implementation": "eager"}


def load_config(folder: Path, family: Family) -> Any:
    """Return the configuration as the class reads it."""
    kind = _class(family)
    with _reporting(ConversionError, f"cannot read {folder / 'config.json'}"):
        return kind.config_class.from_pretrained(folder, local_files_only=True, **_PLAIN)


def load_model(folder: Path, family: Family) -> Any:
    """Return the model in float32; raise ProofError if weights are missing, unexpected or misshapen."""
    kind, config = _class(family), load_config(folder, family)
    with _reporting(ProofError, f"cannot load {folder}"):
        model, info = kind.from_pretrained(
            folder,
            config=config,
            local_files_only=True,
            output_loading_info=True,
            dtype=torch.float32,
            attn_implementation="eager",
            **_PLAIN,
        )
    problems = [
        f"{what.removesuffix('_keys').replace('_', ' ')}: {', '.join(sorted(map(str, info[what])))}"
        for what in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")
        if info[what]
    ]
    if problems:
        raise ProofError(f"transformers loads {folder} with {'; '.join(problems)}")
    return model.eval()


def load_adapted_model(folder: Path, family: Family, adapters: Path) -> Any:
    """Return the model in float32 with adapters that peft adds."""
    peft = require_peft("the proof of a conversion")
    model = load_model(folder, family)
    with _reporting(ProofError, f"with peft cannot load {adapters}"), _older_name_of_peft():
        return peft.PeftModel.from_pretrained(model, adapters).get_base_model().eval()


def adapted_names(model: Any, adapters: Path) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the tensors of adapters that peft reads; adds them to a model.

    Args:
        model: of transformers, possibly without memory.
        adapters: folder with `adapter_config.json`.
    """
    peft = require_peft("the proof of a conversion")
    with (
        _reporting(ProofError, f"with peft cannot read {adapters}"),
        _older_name_of_peft(),
        torch.device("meta"),
    ):
        config = peft.PeftConfig.from_pretrained(adapters)
        adapted = peft.PeftModelForCausalLM(model, config)
        found = peft.get_peft_model_state_dict(adapted, save_embedding_layers=False)
    return {name: tuple(each.shape) for name, each in found.items()}


def lora_defaults() -> dict[str, Any]:
    """Return the options of LoRA adapters with peft's defaults."""
    defaults: dict[str, Any] = require_peft("the conversion of adapters").LoraConfig().to_dict()
    return defaults


def meta_model(config: Any, family: Family) -> Any:
    """Return the whole model without memory for its weights."""
    kind = _class(family)
    with (
        _reporting(ConversionError, f"cannot build {family.class_name} from its config.json"),
        torch.device("meta"),
    ):
        return kind(config)


def one_layer_model(config: Any, family: Family, layer: int) -> Any:
    """Return a model with one layer of the kind of layer `layer`, and without a vocabulary."""
    kind = _class(family)
    with _reporting(ConversionError, f"cannot build {family.class_name} from its config.json"):
        layers = config.num_hidden_layers
        # Of what is listed for each layer, the entry of this one.
        values = {
            name: [value[layer]] if isinstance(value, list) and len(value) == layers else value
            for name, value in config.to_dict().items()
        }
        count = getattr(type(config), "attribute_map", {}).get("num_hidden_layers", "num_hidden_layers")
        values |= {count: 1, "vocab_size": 1}
        if "mlp_only_layers" in values:
            has_experts = (
                layer not in config.mlp_only_layers and (layer + 1) % config.decoder_sparse_step == 0
            )
            values |= {"mlp_only_layers": [] if has_experts else [0], "decoder_sparse_step": 1}
        values |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
        return kind(type(config)(**values, **_PLAIN)).eval().base_model


def computed(model: Any, *arguments: Any, **options: Any) -> Any:
    """Return what a model computes."""
    with _reporting(ProofError, f"cannot compute a {type(model).__name__} with its config.json"):
        return model(*arguments, **options)


def load_tokenizer(folder: Path, *, as_stored: bool = False) -> Any:
    """Return transformers' tokenizer of a folder.

    Args:
        folder: with its files.
        as_stored: with all parts that its tokenizer.json has, whatever class the files name.
    """
    kind = "PreTrainedTokenizerFast" if as_stored else "AutoTokenizer"
    transformers = require_transformers("the proof of a conversion")
    with _reporting(ProofError, f"cannot load the tokenizer of {folder}"):
        # Without False, transformers asks on the terminal whether to run code in the folder, and runs it.
        return getattr(transformers, kind).from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )


@contextmanager
def _reporting(kind: type[ConversionError], what: str) -> Iterator[None]:
    """Report what transformers refuses in the block as an error of ours."""
    try:
        yield
    except Exception as error:  # What transformers and its libraries raise has no common class.
        raise kind(f"transformers {what}: {error}; correct the file, or copy the folder again") from error


@contextmanager
def _older_name_of_peft() -> Iterator[None]:
    """Hide one warning: transformers renamed a property that peft reads (0.21 by its older name)."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is", category=FutureWarning)
        yield


def _class(family: Family) -> Any:
    return getattr(require_transformers("the proof of a conversion"), family.class_name)
