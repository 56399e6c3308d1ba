"""Command lines: help that starts with examples, options as ``key=value``, and configuration files."""

import argparse
import ast
import textwrap
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from vl_plugins.errors import UserError, all_values, require

__all__ = ["CommandParser", "KeyValues", "Parser", "find_config", "literal", "parse_key_values", "read_yaml"]


class CommandParser(argparse.ArgumentParser):
    """A parser whose help shows examples directly below the usage; the parsers of its subcommands are alike.

    Args:
        examples: command lines; a long one is continued after a backslash, its further lines indented by 4.
        description: one or two sentences, wrapped to 78 columns.
        options: of ``argparse.ArgumentParser``.
    """

    def __init__(self, *, examples: Sequence[str] = (), description: str = "", **options) -> None:
        heading = "example:" if len(examples) == 1 else "examples:"
        lines = textwrap.indent("\n".join(examples), "  ")
        super().__init__(
            description=f"{heading}\n{lines}\n\n{textwrap.fill(description, 78)}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            **{"allow_abbrev": False, **options},
        )


class Parser(CommandParser):
    """A parser whose errors are :class:`UserError` instead of a usage dump of all flags."""

    def error(self, message: str):
        raise UserError(message)


class KeyValues(argparse.Action):
    """``key=value ...`` into a dict, added to what an earlier occurrence of the flag has set."""

    def __init__(self, option_strings, dest, **options):
        super().__init__(option_strings, dest, nargs="+", default={}, metavar="KEY=VALUE", **options)

    def __call__(self, parser, namespace, values, option_string=None):
        parsed = parse_key_values(values, option_string)
        setattr(namespace, self.dest, {**getattr(namespace, self.dest), **parsed})


def parse_key_values(tokens: Sequence[str], flag: str) -> dict[str, Any]:
    """Parse ``key=value ...``; the last value of a repeated key counts.

    Raises:
        UserError: a token is not ``key=value``.

    >>> parse_key_values(["margin=0.2", "scale=learned", "symmetric=false"], "--loss-kwargs")
    {'margin': 0.2, 'scale': 'learned', 'symmetric': False}
    """
    parsed = {}
    for token in tokens:
        key, separator, value = token.partition("=")
        if not separator or not key.isidentifier():
            raise UserError(f"{flag}: expected key=value, got {token!r}")
        parsed[key] = literal(value)
    return parsed


def literal(value: str) -> Any:
    """Return a Python literal, or one of true, false and null; anything else is a string."""
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return {"true": True, "false": False, "null": None}.get(value, value)


def find_config(name: str | Path, folder: str) -> Path:
    """Return the path of a file, or of one of ``configs/<folder>`` by its name alone.

    >>> find_config("toy.yaml", "open_clip").name
    'toy.yaml'
    """
    shipped = resources.files("vl_plugins.configs") / folder / str(name)
    return Path(str(shipped)) if shipped.is_file() and not Path(name).is_file() else Path(name)


def read_yaml(path: Path) -> Any:
    """Return the content of a YAML file: plain data only.

    Raises:
        UserError: it is not YAML, or contains objects or a duplicate key.
        OSError: it cannot be opened.
    """
    yaml = require("yaml", extra="open-clip")
    base: Any = yaml.SafeLoader

    class UniqueKeys(base):
        def construct_mapping(self, node, deep=False):
            keys = [key.value for key, _ in node.value]
            if len({*keys}) < len(keys):
                raise yaml.YAMLError(f"a key is given twice: {', '.join(keys)}")
            return super().construct_mapping(node, deep)

    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=UniqueKeys)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    for _ in all_values(str(path), content):  # raises an error for too many
        pass
    return content
