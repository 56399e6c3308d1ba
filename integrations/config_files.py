"""Configuration files: YAML of the user, or one that is shipped in ``configs/``."""

from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from vl_plugins.errors import UserError, require

__all__ = ["find_config", "read_yaml"]

MOST_VALUES = 10_000


def find_config(name: str | Path, folder: str) -> Path:
    """Return the path of a file, or of one of ``configs/<folder>`` by its name alone.

    Raises:
        UserError: there is no such file.

    >>> find_config("toy.yaml", "open_clip").name
    'toy.yaml'
    """
    path = Path(name)
    shipped = resources.files("vl_plugins.configs") / folder / str(name)
    if not path.is_file() and shipped.is_file():
        path = Path(str(shipped))
    if not path.is_file():
        raise UserError(f"--config: no such file: {name}")
    return path


def read_yaml(path: Path, extra: str) -> Any:
    """Return the content of a YAML file: plain data only.

    Args:
        path: of the file.
        extra: the extra with PyYAML.

    Raises:
        UserError: it is not YAML, contains objects or a duplicate key, is larger than any configuration, or names a
            program to read shards from (``pipe:``), which only the command line may.
    """
    yaml = require("yaml", extra=extra)

    base: Any = yaml.SafeLoader

    class UniqueKeys(base):
        def construct_mapping(self, node, deep=False):
            texts = [key.value for key, _ in node.value]
            for number, (key, _) in enumerate(node.value):
                if key.value in texts[:number]:
                    raise yaml.MarkedYAMLError(problem=f"duplicate key {key.value!r}", problem_mark=key.start_mark)
            return super().construct_mapping(node, deep)

    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=UniqueKeys)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    for number, value in enumerate(_values(content)):
        if number == MOST_VALUES:  # nested aliases can expand to billions
            raise UserError(f"{path}: a configuration of more than {MOST_VALUES:,} values")
        if isinstance(value, str) and "pipe:" in value:
            raise UserError(f"{path}: {value!r} would run a program; give pipe: on the command line")
    return content


def _values(content: Any) -> Iterator[Any]:
    """Yield everything in plain data, keys included."""
    waiting = [content]
    while waiting:
        value = waiting.pop()
        yield value
        if isinstance(value, Mapping):
            waiting += [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple, set)):
            waiting += value
