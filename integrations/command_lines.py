"""Command lines: help that starts with examples, options as ``key=value``, and configuration files."""

import argparse
import ast
import difflib
import re
import textwrap
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from vl_plugins.data.limits import MAX_IMAGE_PIXELS
from vl_plugins.errors import MALFORMED_CONTENT, UserError, all_values, require, user_errors

__all__ = [
    "CommandParser",
    "KeyValues",
    "add_caption_rule",
    "add_max_image_pixels",
    "find_config",
    "key_value",
    "literal",
    "read_yaml",
]


class CommandParser(argparse.ArgumentParser):
    """A parser whose help shows examples directly below the usage, and whose errors are :class:`UserError`.

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

    def error(self, message: str):
        unknown = re.match(r"unrecognized arguments: (--[\w-]+)", message)
        if unknown:
            similar = difflib.get_close_matches(unknown[1], self._option_string_actions, n=1)
            if similar:
                message += f" (did you mean {similar[0]}?)"
        raise UserError(message)


class KeyValues(argparse.Action):
    """``key=value ...`` into a dict, added to what an earlier occurrence of the flag has set."""

    def __init__(self, option_strings, dest, **options):
        super().__init__(option_strings, dest, nargs="+", type=key_value, default={}, metavar="KEY=VALUE", **options)

    def __call__(self, parser, namespace, values, option_string=None):
        setattr(namespace, self.dest, {**getattr(namespace, self.dest), **dict(values)})


def add_max_image_pixels(parser: Any) -> None:
    """Add ``--max-image-pixels`` to a parser or a group of its options."""
    parser.add_argument(
        "--max-image-pixels",
        type=_max_image_pixels,
        metavar="N",
        default=MAX_IMAGE_PIXELS,
        help="pictures of more pixels count as unreadable, and are not decoded; 0: no limit (default: %(default)s)",
    )


def add_caption_rule(parser: Any) -> None:
    """Add the options that say where the captions of other programs' shards are to a parser or a group."""
    parser.add_argument(
        "--caption-lines",
        choices=("auto", "yes", "no"),
        default="auto",
        help="whether each line of a .txt in other programs' shards is a caption; auto: if every .txt has several "
        "lines, as CLIP_benchmark's have (default: %(default)s)",
    )
    parser.add_argument(
        "--caption-fields",
        nargs="+",
        default=(),
        metavar="FIELD",
        help="fields of the .json in other programs' shards, each of which is a caption, in place of the .txt",
    )


def _max_image_pixels(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"expected a number of pixels, or 0 for no limit; got {text!r}")
    return int(text)


def key_value(text: str) -> tuple[str, Any]:
    """Return the key and the value of ``key=value``, as the ``type`` of an option.

    >>> dict(map(key_value, ["margin=0.2", "scale=learned", "symmetric=false"]))
    {'margin': 0.2, 'scale': 'learned', 'symmetric': False}
    """
    key, separator, value = text.partition("=")
    if not separator or not key.isidentifier():
        raise argparse.ArgumentTypeError(f"expected key=value, got {text!r}")
    return key, literal(value)


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


def read_yaml(file: Path) -> Any:
    """Return the content of a YAML file: plain data only.

    Raises:
        UserError: it is not YAML, contains objects or a duplicate key, or has more values than any configuration.
        OSError: it cannot be opened.
    """
    yaml = require("yaml", extra="open-clip")

    class UniqueKeys(yaml.SafeLoader):  # type: ignore[name-defined]
        def construct_mapping(self, node: Any, deep: bool = False) -> dict:
            keys = [key.value for key, _ in node.value]
            if len({*keys}) < len(keys):
                raise yaml.YAMLError(f"a key is given twice: {', '.join(keys)}")
            return super().construct_mapping(node, deep)

    with user_errors(f"{file}: not valid YAML", *MALFORMED_CONTENT), open(file, "rb") as stream:
        content = yaml.load(stream, Loader=UniqueKeys)
    for _ in all_values(str(file), content):  # raises an error for too many
        pass
    return content
