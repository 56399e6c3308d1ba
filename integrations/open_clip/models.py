"""Models of open_clip, of ``configs/models`` and of ``--model-config``; none that brings code of its own."""

import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import open_clip

from vl_plugins.data.files import read_bytes
from vl_plugins.errors import UserError, did_you_mean, one_of, user_errors

__all__ = ["add_model_config", "check_model", "check_pretrained", "has_schema", "register_models"]

# What open_clip expects in a model configuration; it silently skips other JSON files.
ENTRIES = {"embed_dim", "vision_cfg", "text_cfg"}

# Entries with which transformers imports Python files of a model's folder.
CODE = ("trust_remote_code", "auto_map")


def register_models() -> None:
    """Make the configurations of ``configs/models`` known to open_clip under their file names."""
    with resources.as_file(resources.files("vl_plugins.configs") / "models") as folder:
        if any(file.stem not in open_clip.list_models() for file in folder.glob("*.json")):
            open_clip.add_model_config(folder)


def add_model_config(path: str | Path) -> None:
    """Make the model configuration in a file, or those in a folder, known to open_clip under their file names.

    Raises:
        UserError: there is no such file, it is not a model configuration, or the model would run code.
    """
    path = Path(path)
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files:
        raise UserError(f"--model-config {path}: the folder has no .json files")
    for file in files:
        if file.suffix != ".json":
            raise UserError(f"--model-config {file}: expected a .json file or a folder of them")
        config = _read_json(f"--model-config {file}", file)
        if not isinstance(config, dict) or not config.keys() >= ENTRIES:
            raise UserError(f"--model-config {file}: expected a model configuration with {', '.join(sorted(ENTRIES))}")
        _check_no_code(f"--model-config {file}", config)
    open_clip.add_model_config(path)


def check_model(name: str) -> dict[str, Any]:
    """Register ``configs/models`` and return the configuration of a model.

    Raises:
        UserError: the model is unknown, or would run code.
    """
    register_models()
    if not has_schema(name):
        one_of("model", name, open_clip.list_models())
    with user_errors(f"model {name}"):
        config = open_clip.get_model_config(name)
    _check_no_code(f"model {name}", config, name.partition("local-dir:")[2])
    return config


def check_pretrained(model: str, pretrained: str | None, flag: str = "--pretrained") -> None:
    """Raise ``UserError`` unless ``pretrained`` is a tag of the model or a file."""
    if not pretrained:
        return
    if has_schema(model):
        raise UserError(f"{flag} {pretrained}: {model} comes with its weights; drop one")
    if not Path(pretrained).is_file() and not open_clip.is_pretrained_cfg(model, pretrained):
        hint = did_you_mean(pretrained, open_clip.list_pretrained_tags_by_model(model))
        raise UserError(f"{flag} {pretrained}: no such file, nor a pretrained tag of {model}{hint}")


def has_schema(model: str) -> bool:
    """Return whether a model's configuration and weights come from a folder or the hub: ``local-dir:``, ``hf-hub:``."""
    return model.startswith(("local-dir:", "hf-hub:"))


def _read_json(what: str, file: Path) -> Any:
    with user_errors(what):
        return json.loads(read_bytes(file, name=what))


def _check_no_code(what: str, config: Mapping[str, Any], folder: str = "") -> None:
    """Raise ``UserError`` if a model's configuration, or a file in a folder that it names, asks for code to be run."""
    text = config.get("text_cfg") or {}
    folders = [Path(name) for name in (folder, text.get("hf_model_name"), text.get("hf_tokenizer_name")) if name]
    contents = {what: config}
    contents |= {str(file): _read_json(str(file), file) for path in folders for file in sorted(path.glob("*.json"))}
    for source, content in contents.items():
        for entry in CODE:
            if entry in str(content):
                raise UserError(f"{source}: {entry} is not supported: it runs code that comes with the model")
