"""Models of open_clip, of ``configs/models`` and of ``--model-config``."""

import json
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import open_clip
from torch import Tensor

from vl_plugins.data.files import read_bytes
from vl_plugins.errors import UserError, did_you_mean, user_errors
from vl_plugins.integrations.open_clip.names import check_model_name, has_schema

__all__ = ["add_model_config", "check_model", "check_pretrained", "get_tokenizer", "register_models"]

# What open_clip expects in a model configuration; it silently skips other JSON files.
ENTRIES = {"embed_dim", "vision_cfg", "text_cfg"}


def register_models() -> None:
    """Make the configurations of ``configs/models`` known to open_clip under their file names."""
    with resources.as_file(resources.files("vl_plugins.configs") / "models") as folder:
        if any(file.stem not in open_clip.list_models() for file in folder.glob("*.json")):
            open_clip.add_model_config(folder)


def add_model_config(path: str | Path) -> None:
    """Make the model configuration in a file, or those in a folder, known to open_clip under their file names.

    Raises:
        UserError: there is no such file, it is not a model configuration, or its tokenizer could run code.
    """
    path = Path(path)
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files:
        raise UserError(f"--model-config {path}: the folder has no .json files")
    for file in files:
        if file.suffix != ".json":
            raise UserError(f"--model-config {file}: expected a .json file or a folder of them")
        with user_errors(f"--model-config {file}"):
            config = json.loads(read_bytes(file))
        if not isinstance(config, dict) or not config.keys() >= ENTRIES:
            raise UserError(f"--model-config {file}: expected a model configuration with {', '.join(sorted(ENTRIES))}")
        _check_tokenizer(f"--model-config {file}", config)
    open_clip.add_model_config(path)


def check_model(name: str) -> None:
    """Register ``configs/models`` and raise ``UserError`` for an unknown model; names with a schema pass."""
    register_models()
    check_model_name(name)


def check_pretrained(model: str, pretrained: str | None, flag: str = "--pretrained") -> None:
    """Raise ``UserError`` unless ``pretrained`` is a tag of the model or a file that open_clip would read."""
    if not pretrained:
        return
    if has_schema(model):
        raise UserError(f"{flag} {pretrained}: {model} comes with its weights; drop one")
    if not Path(pretrained).is_file() and not open_clip.is_pretrained_cfg(model, pretrained):
        hint = did_you_mean(pretrained, open_clip.list_pretrained_tags_by_model(model))
        raise UserError(f"{flag} {pretrained}: no such file, nor a pretrained tag of {model}{hint}")


def get_tokenizer(model: str, context_length: int | None = None) -> Callable[[list[str]], Tensor]:
    """Return a model's tokenizer, from n texts to token ids (n, L).

    Raises:
        UserError: the model's configuration asks for a tokenizer that runs code.
    """
    _check_tokenizer(model, open_clip.get_model_config(model))
    return open_clip.get_tokenizer(model, context_length=context_length)


def _check_tokenizer(name: str, config: Any) -> None:
    if "trust_remote_code" in str(config):
        raise UserError(f"{name}: trust_remote_code is not supported: it runs code that comes with the tokenizer")
