"""Configuration files: YAML of the user's, or one that is shipped in ``configs/``."""

from importlib import resources
from pathlib import Path
from typing import Any

from vl_plugins.errors import UserError
from vl_plugins.optional import require

__all__ = ["find_config", "read_yaml"]


def find_config(name: str | Path, folder: str) -> Path:
    """Return the path of a file, or of one of ``configs/<folder>`` by its name alone.

    Raises:
        UserError: there is neither.

    >>> find_config("toy_vl_tiny.yaml", "open_clip").name
    'toy_vl_tiny.yaml'
    """
    path = Path(name)
    shipped = resources.files("vl_plugins.configs") / folder / str(name)
    if not path.is_file() and shipped.is_file():
        path = Path(str(shipped))
    if not path.is_file():
        raise UserError(f"--config: no such file: {name}")
    return path


def read_yaml(path: Path, extra: str) -> Any:
    """Return the content of a YAML file: plain data, whatever it asks for.

    Args:
        path: of the file.
        extra: that brings what reads it.

    Raises:
        UserError: it is not YAML, or asks for objects.
    """
    yaml = require("yaml", extra=extra)
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
