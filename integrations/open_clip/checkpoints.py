"""Saved models, with or without heads, for use outside of the launcher."""

import contextlib
import logging
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import open_clip
import torch
from open_clip import get_input_dtype
from open_clip.transform import PreprocessCfg, image_transform_v2
from pytorch_metric_learning.distances import BaseDistance
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from vl_plugins.integrations.key_values import literal
from vl_plugins.integrations.open_clip.heads import CLIPWithHeads, head_settings
from vl_plugins.integrations.open_clip.models import add_model_config, check_model, get_tokenizer
from vl_plugins.integrations.open_clip.names import has_schema
from vl_plugins.integrations.pytorch_metric_learning.checkpoints import is_checkpoint
from vl_plugins.integrations.pytorch_metric_learning.checkpoints import load_model as load_towers
from vl_plugins.integrations.torch_files import UnreadableFileError, read_torch_file
from vl_plugins.registry import create_component
from vl_plugins.utils.errors import UserError, first_line

__all__ = ["add_heads", "load_model"]

DESCRIPTION = "_extra_state"

# Options of open_clip's create_model that change what the weights mean. Its checkpoints do not hold them.
ARCHITECTURE = (
    "force_quick_gelu",
    "force_custom_text",
    "force_image_size",
    "force_context_length",
    "init_logit_bias",
)

# What CLIPWithHeads writes into its extra state.
HEAD_ENTRIES = {
    "model": str,
    "model_kwargs": Mapping,
    "preprocess": Mapping,
    "head": str,
    "head_kwargs": Mapping,
    "similarity": str | None,
    "similarity_kwargs": Mapping,
}

# The transform of images, by the names of a pretrained tag's configuration.
PREPROCESSING = ("mean", "std", "interpolation", "resize_mode")


def add_heads(
    clip: nn.Module,
    model: str,
    created_with: Mapping[str, Any],
    head: str,
    head_kwargs: Mapping[str, Any],
    similarity: BaseDistance | None = None,
) -> CLIPWithHeads:
    """Put heads on a model and write into it what :func:`load_model` will need.

    Args:
        clip: what open_clip's ``create_model_and_transforms`` made.
        model: the name it was made by.
        created_with: the options it was made with.
        head: ``"linear"`` or ``"set"``.
        head_kwargs: options of the head.
        similarity: the distance by which sets are compared.
    """
    description = {
        "model": model,
        "model_kwargs": {
            name: value for name in ARCHITECTURE if (value := created_with.get(name)) is not None and value is not False
        },
        "preprocess": dict(clip.visual.preprocess_cfg),
    }
    return CLIPWithHeads(clip, head, head_settings(head, head_kwargs), similarity, description)


def load_model(
    checkpoint: str | Path,
    model: str | None = None,
    *,
    model_config: str | Path | None = None,
    device: str | torch.device = "cpu",
    precision: str = "fp32",
) -> tuple[nn.Module, Callable, Callable]:
    """Load what open_clip's trainer or the launcher saved, or what was trained by pytorch-metric-learning.

    A checkpoint with heads specifies its model, and so does one of
    :mod:`vl_plugins.integrations.pytorch_metric_learning`. For other checkpoints of a training run, the model and the
    options that it was built with are read from the run's ``params.txt``.

    Args:
        checkpoint: a file that the trainer wrote, a file of weights, a pretrained tag of ``model``, or a model that
            brings its own weights: ``hf-hub:ORG/NAME``, ``local-dir:FOLDER``.
        model: name of an open_clip model, or one of ``configs/models``; needed where none is specified. The name of a
            model of the hub or a folder must always be given: tokenizers in there can run code.
        model_config: a model configuration file or a folder of them, for models that open_clip does not know; by
            default what the run's ``params.txt`` says.
        device: where to put the model.
        precision: as open_clip's ``--precision``.

    Returns:
        The model in evaluation mode, the transform of images for evaluation, and the tokenizer.

    Raises:
        UserError: an unknown model or tag, a file that is not there, cannot be read or does not fit the model, or
            weights that did not arrive in the model.
    """
    is_file = Path(checkpoint).is_file()
    recorded = _read_params(Path(checkpoint)) if is_file else {}
    model_config = model_config or recorded.get("model_config")
    if model_config is not None:
        add_model_config(str(model_config))
    if not is_file:
        return _load_published(str(checkpoint), model, device, precision)
    saved = _read(checkpoint)
    if is_checkpoint(saved):
        towers, *transforms = load_towers(checkpoint, model, device=device)
        return towers.to(dtype=get_input_dtype(precision)), *transforms
    weights = _weights(checkpoint, saved)
    head = weights.get(DESCRIPTION)
    if head is not None and not _describes_head(head):
        raise UserError(f"checkpoint {checkpoint}: the description of its head is damaged")
    name = _model_name(checkpoint, model, recorded if head is None else head)
    options = _recorded_options(name, recorded) if head is None else _head_options(checkpoint, head)
    try:
        with suppress_warnings():  # open_clip warns of random weights, which the file replaces
            loaded, _, preprocess = open_clip.create_model_and_transforms(
                name, load_weights=False, pretrained_text=False, precision=precision, device=device, **options
            )
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"model {name} cannot be built: {first_line(error)}") from error
    try:
        if head is None:
            open_clip.load_checkpoint(loaded, str(checkpoint))
        else:
            loaded, preprocess = _with_heads(loaded, name, options, head)
            loaded.load_state_dict(weights)
        _check_weights(loaded, weights)
    # open_clip asserts that the widths of position embeddings agree, and looks into whatever a file holds.
    except (AssertionError, IndexError, KeyError, RuntimeError, TypeError) as error:
        raise UserError(f"checkpoint {checkpoint} does not fit model {name}: {first_line(error)}") from error
    return loaded.eval(), preprocess, get_tokenizer(name, options.get("force_context_length"))


@contextlib.contextmanager
def suppress_warnings() -> Iterator[None]:
    """Log errors only."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _load_published(
    checkpoint: str, model: str | None, device: str | torch.device, precision: str
) -> tuple[nn.Module, Callable, Callable]:
    """Load what is no file: a pretrained tag, or the weights of a model of the hub or a folder."""
    if has_schema(checkpoint) and model in (None, checkpoint):
        model, tag = checkpoint, None
    else:
        if model is None:
            raise UserError(f"checkpoint {checkpoint}: no such file")
        check_model(model)
        if checkpoint not in open_clip.list_pretrained_tags_by_model(model):
            raise UserError(f"checkpoint {checkpoint}: no such file, nor a pretrained tag of {model}")
        tag = checkpoint
    try:
        loaded, preprocess = open_clip.create_model_from_pretrained(model, tag, precision=precision, device=device)
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(f"checkpoint {checkpoint} cannot be loaded: {first_line(error)}") from error
    return loaded.eval(), preprocess, get_tokenizer(model)


def _read_params(checkpoint: Path) -> dict[str, Any]:
    """Return the options of the run that wrote a checkpoint, from its ``params.txt``; none if there is none."""
    file = checkpoint.absolute().parent.parent / "params.txt"
    if not file.is_file():
        return {}
    pairs = (line.partition(": ") for line in file.read_text(encoding="utf-8", errors="replace").splitlines())
    return {name: literal(value) for name, separator, value in pairs if separator}


def _model_name(checkpoint: str | Path, asked: str | None, recorded: Mapping[str, Any]) -> str:
    name = str(recorded["model"]) if "model" in recorded else asked
    if name is None:
        raise UserError(f"checkpoint {checkpoint} does not specify its model: name the model")
    if asked not in (None, name):
        raise UserError(f"checkpoint {checkpoint} is of model {name}, not {asked}")
    if has_schema(name) and asked is None:
        raise UserError(f"checkpoint {checkpoint} is of model {name}: name that model if you trust it")
    check_model(name)
    return name


def _recorded_options(model: str, recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ``create_model_and_transforms`` was called with in training, as far as weights do not tell."""
    options = {name: recorded.get(name) for name in ARCHITECTURE}
    if recorded.get("siglip"):
        options["init_logit_bias"] = -10  # as open_clip's trainer; what counts is that there is one
    preprocessing = open_clip.get_pretrained_cfg(model, recorded.get("pretrained") or "")
    options |= {f"image_{name}": recorded.get(f"image_{name}") or preprocessing.get(name) for name in PREPROCESSING}
    return {name: value for name, value in options.items() if value is not None}


def _describes_head(state: Any) -> bool:
    return isinstance(state, Mapping) and all(isinstance(state.get(name), kind) for name, kind in HEAD_ENTRIES.items())


def _head_options(checkpoint: str | Path, head: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the model inside was created with; a file may choose an architecture, but no other files."""
    unknown = head["model_kwargs"].keys() - set(ARCHITECTURE)
    if unknown:
        raise UserError(f"checkpoint {checkpoint}: {', '.join(sorted(unknown))} must not be set by a checkpoint")
    return {**head["model_kwargs"], "output_dict": True}


def _with_heads(
    clip: nn.Module, model: str, options: Mapping[str, Any], head: Mapping[str, Any]
) -> tuple[CLIPWithHeads, Callable]:
    similarity = None
    if head["similarity"] is not None:
        similarity = create_component("distance", head["similarity"], **head["similarity_kwargs"])
    clip.visual.preprocess_cfg = dict(head["preprocess"])
    loaded = add_heads(clip, model, options, head["head"], head["head_kwargs"], similarity)
    return loaded, image_transform_v2(PreprocessCfg(**head["preprocess"]), is_train=False)


def _check_weights(model: nn.Module, weights: Mapping[str, Any]) -> None:
    """Compare a model with what was read; weights under other names were converted by open_clip, all or none.

    Raises:
        RuntimeError: a weight differs, such as one that open_clip resized.
    """
    for name, tensor in model.state_dict().items():
        saved = weights.get(name)
        if not isinstance(tensor, Tensor) or not isinstance(saved, Tensor):
            continue
        if tensor.squeeze().shape != saved.squeeze().shape:  # logit scales are (), or (1,) for some loaders
            raise RuntimeError(f"{name} is {tuple(saved.shape)} in the file and {tuple(tensor.shape)} in the model")
        loaded, expected = tensor.squeeze().cpu(), saved.squeeze().to(tensor.dtype)
        if not ((loaded == expected) | (loaded.isnan() & expected.isnan())).all():
            raise RuntimeError(f"{name} of the model is not that of the file")


def _read(checkpoint: str | Path) -> Any:
    """Read a file of weights; tensors of torch's own files stay in the file until they are used.

    Of arrays of big_vision, which open_clip reads and converts itself, return None.
    """
    if Path(checkpoint).suffix in (".npz", ".npy"):
        return None
    try:
        if Path(checkpoint).suffix == ".safetensors":
            return load_file(checkpoint)
        return read_torch_file(checkpoint, mmap=zipfile.is_zipfile(checkpoint))
    except (UnreadableFileError, SafetensorError) as error:
        raise UserError(f"checkpoint {checkpoint}: {error}") from error


def _weights(checkpoint: str | Path, saved: Any) -> dict[str, Any]:
    """Return what a file holds, by the names that the model has for it; nothing of what open_clip reads itself."""
    if saved is None:
        return {}
    weights = saved.get("state_dict", saved) if isinstance(saved, Mapping) else saved
    if not isinstance(weights, Mapping) or not all(isinstance(name, str) for name in weights):
        raise UserError(f"checkpoint {checkpoint} holds a {type(weights).__name__}, expected weights by name")
    if not weights:
        raise UserError(f"checkpoint {checkpoint} holds no weights")
    prefix = "module." if all(name.startswith("module.") for name in weights) else ""
    return {name.removeprefix(prefix): value for name, value in weights.items()}
