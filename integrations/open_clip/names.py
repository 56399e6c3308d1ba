"""Misspelled names and missing files on a command line, found before open_clip and torch are imported."""

import importlib.util
import sys
from argparse import Namespace
from importlib import resources
from pathlib import Path

from vl_plugins.errors import UserError, one_of, require
from vl_plugins.integrations.open_clip.options import PluginOptions, option_flag
from vl_plugins.registry import list_losses

__all__ = ["check_command_line", "check_file", "check_model_name", "has_schema", "is_shards"]


def check_command_line(options: PluginOptions, host_options: Namespace) -> None:
    """Check the command line of the launcher.

    Raises:
        UserError: an unknown model or loss, or a file that is missing or has an unknown suffix.
    """
    check_model_name(host_options.model, options.model_config)
    # Packages of classes take seconds to import.
    if options.loss is not None and not options.loss[:1].isupper() and ":" not in options.loss:
        one_of("loss", options.loss, list_losses())
    for flag in ("train_data", "val_data"):
        path = getattr(host_options, flag)
        if path:
            _check_data(option_flag(flag), path, host_options.dataset_type)
    for flag in ("pretrained", "resume"):
        check_file(f"--{flag}", getattr(host_options, flag))


def check_model_name(name: str, model_config: str | None = None) -> None:
    """Raise ``UserError`` unless a configuration file has that name; names with a schema pass.

    Args:
        name: of a model of open_clip, ``configs/models`` or ``model_config``.
        model_config: a file or folder of ``--model-config``.
    """
    if has_schema(name):
        return
    spec = importlib.util.find_spec("open_clip") or require("open_clip", extra="open-clip").__spec__
    assert spec is not None
    assert spec.origin is not None
    folders = [Path(str(resources.files("vl_plugins.configs")), "models"), Path(spec.origin).parent / "model_configs"]
    known = {file.stem for folder in folders for file in folder.glob("*.json")}
    if model_config is not None:
        path = Path(model_config)
        known |= {file.stem for file in (path.glob("*.json") if path.is_dir() else [path])}
    if "open_clip" in sys.modules:  # it knows those that were added, too
        known |= set(sys.modules["open_clip"].list_models())
    one_of("model", name, known)


def check_file(flag: str, value: str | None) -> None:
    """Raise ``UserError`` for what can only be a path, and does not exist; URLs, tags and ``latest`` pass."""
    if value is None or ":" in value:
        return
    path = Path(value)
    if (path.suffix or len(path.parts) > 1) and not path.is_file():
        raise UserError(f"{flag} {value}: no such file")


def has_schema(model: str) -> bool:
    """Return whether a model's configuration and weights come from a folder or the hub: ``local-dir:``, ``hf-hub:``."""
    return model.startswith(("local-dir:", "hf-hub:"))


def is_shards(path: str | None, dataset_type: str) -> bool:
    """Return whether open_clip reads its ``--train-data`` or ``--val-data`` as shards."""
    return bool(path and (dataset_type == "webdataset" or (dataset_type == "auto" and path.endswith(".tar"))))


def _check_data(flag: str, path: str, dataset_type: str) -> None:
    if dataset_type == "auto" and not path.endswith((".tar", ".csv", ".tsv")):
        what = "it is a folder" if Path(path).is_dir() else "unknown suffix"
        raise UserError(
            f"{flag} {path}: {what}; give shards, such as 'FOLDER/NAME-{{000000..000007}}.tar', a .csv or .tsv file, "
            "or --dataset-type"
        )
