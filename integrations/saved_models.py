"""Saved models of either host, with all that another file needs to hold such a model."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from vl_plugins.data.files import write_complete
from vl_plugins.errors import UserError
from vl_plugins.integrations.loading import find_checkpoint, is_of_pml, load_content, read_content

__all__ = ["SavedModel", "check_same_model", "read_saved_model"]

# By which tokenizers and transforms are compared.
TEXT = "A photo of 2 dogs that don't sleep."
PICTURE = Image.radial_gradient("L").resize((300, 200)).convert("RGB")
LONGEST_VALUE = 60  # characters that an error shows


@dataclass(frozen=True, eq=False)
class SavedModel:
    """A model on the CPU in evaluation mode, and what a file holds beside its weights.

    Attributes:
        name: by which errors call it.
        model, transform, tokenizer: see :func:`vl_plugins.integrations.loading.load_model`.
        weights: all parameters and buffers of the model by name, in half precision where its file has them so.
        options: what tells models of equal weights apart, by name; JSON values.
        content_with: maps weights to the content of a file for ``torch.save``, which ``load_model`` reads.
        file: the checkpoint of a run's folder, otherwise the checkpoint itself.
        content: of the file without tensors, such as its ``epoch``; {} of a tag and of a model of the hub.
        settings: of open_clip, which make the model; None for the trainer for pytorch-metric-learning.
    """

    name: str
    model: Any
    transform: Callable
    tokenizer: Callable
    weights: dict[str, Tensor]
    options: Mapping[str, Any]
    content_with: Callable[[Mapping[str, Tensor]], dict[str, Any]]
    file: str | Path
    content: Mapping[str, Any]
    settings: Mapping[str, Any] | None

    def write(self, file: str | Path, weights: Mapping[str, Tensor], **notes: Any) -> None:
        """Write a checkpoint of this model with other weights and with notes, completely or not at all."""
        with write_complete(file) as stream:
            torch.save(self.content_with(weights) | notes, stream)


def read_saved_model(
    checkpoint: str | Path, model: str | None = None, model_config: str | Path | None = None
) -> SavedModel:
    """Read a model in float32.

    Args:
        checkpoint, model, model_config: as for :func:`vl_plugins.integrations.loading.load_model`.
    """
    file = find_checkpoint(checkpoint)
    content = read_content(file)
    loaded, transform, tokenizer = load_content(file, content, model, model_config=model_config)
    weights = {name: tensor.detach() for name, tensor in loaded.state_dict().items()}
    if is_of_pml(content):
        host = importlib.import_module("vl_plugins.integrations.pytorch_metric_learning.checkpoints")
        options = {"head": content["config"]["head"], "inputs": loaded.inputs, "vocabulary": content["vocabulary"]}
        settings = None
        content_with = partial(host.checkpoint_of, content, loaded)
    else:
        host = importlib.import_module("vl_plugins.integrations.open_clip.checkpoints")
        settings = host.settings_of_model(file, content, model, model_config)
        options = {name: settings.get(name) for name in ("head", "head_kwargs", "similarity", "similarity_kwargs")}
        content_with = partial(host.checkpoint_of, settings)
        for name, dtype in host.half_types(file, content).items():
            if name in weights:
                weights[name] = weights[name].to(dtype)
    return SavedModel(
        name=str(checkpoint),
        model=loaded,
        transform=transform,
        tokenizer=tokenizer,
        weights=weights,
        options=options,
        content_with=content_with,
        file=file,
        content={name: content[name] for name in ("epoch", "args", "merged") if name in (content or {})},
        settings=settings,
    )


def check_same_model(first: SavedModel, second: SavedModel) -> None:
    """Raise ``UserError`` unless two models differ in the values of their weights alone."""
    difference = _difference(first, second)
    if difference is not None:
        raise UserError(f"{first.name} and {second.name} are different models: {difference}")


def _difference(first: SavedModel, second: SavedModel) -> str | None:
    """Return the first difference between two models, None if there is none."""
    for name, value in first.options.items():
        other_value = second.options.get(name)
        if value != other_value:
            values = f"{name} {value!r} and {other_value!r}"
            return values if len(values) <= LONGEST_VALUE else f"their {name} differ"
    for name in first.weights | second.weights:
        shapes = []
        for model in (first, second):
            shapes.append(str(tuple(model.weights[name].shape)) if name in model.weights else "none")
        if shapes[0] != shapes[1]:
            return f"{name} of the shape {shapes[0]} and {shapes[1]}"
    # Activations and pooling have no weights.
    lines, other_lines = str(first.model).splitlines(), str(second.model).splitlines()
    for line, other_line in zip(lines, other_lines, strict=False):
        if line != other_line:
            return f"{line.strip()} and {other_line.strip()}"
    if len(lines) != len(other_lines):
        return "their layers differ"
    if getattr(first.model, "inputs", "images") == "images" and not torch.equal(
        first.transform(PICTURE), second.transform(PICTURE)
    ):
        return f"they transform pictures by {_one_line(first.transform)} and {_one_line(second.transform)}"
    if not torch.equal(first.tokenizer([TEXT]), second.tokenizer([TEXT])):
        return "their tokenizers differ"
    return None


def _one_line(transform: Any) -> str:
    return " ".join(str(transform).split())
