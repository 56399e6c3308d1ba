"""Models of open_clip, of ``configs/models`` and of ``--model-config``; none that brings code of its own."""

import json
from importlib import resources
from pathlib import Path
from typing import Any

import open_clip

from vl_plugins.errors import MALFORMED_CONTENT, UserError, check_sizes, one_of, user_errors

__all__ = ["add_model_config", "check_model", "has_schema", "register_models"]

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
        UserError: there is no such file, it is not JSON, or the model would run code.
    """
    path = Path(path)
    for file in sorted(path.glob("*.json")) if path.is_dir() else [path]:
        with user_errors(f"--model-config {file}", *MALFORMED_CONTENT):
            _check_no_code(str(file), json.loads(file.read_bytes()))
    open_clip.add_model_config(path)


def check_model(name: str) -> None:
    """Register ``configs/models``; raise ``UserError`` if a model is unknown, or would run code."""
    register_models()
    if not has_schema(name):
        one_of("model", name, open_clip.list_models())
    with user_errors(f"model {name}", *MALFORMED_CONTENT):
        config = open_clip.get_model_config(name)
        _check_no_code(f"model {name}", config, name.partition("local-dir:")[2])
        check_sizes(f"model {name}", config)


def has_schema(model: str) -> bool:
    """Return whether a model's configuration and weights come from a folder or the hub: ``local-dir:``, ``hf-hub:``."""
    return model.startswith(("local-dir:", "hf-hub:"))


def _check_no_code(what: str, config: Any, folder: str = "") -> None:
    """Raise ``UserError`` if a model's configuration, or a file in a folder that it names, asks for code to be run."""
    text = config.get("text_cfg", {})
    folders = [Path(name) for name in (folder, text.get("hf_model_name"), text.get("hf_tokenizer_name")) if name]
    files = [file for path in folders for file in sorted(path.glob("*.json"))]
    for source, content in [(what, config), *((str(file), json.loads(file.read_bytes())) for file in files)]:
        for entry in CODE:
            if entry in str(content):
                raise UserError(f"{source}: {entry} is not supported: it runs code that comes with the model")
