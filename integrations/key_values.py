"""Command lines: options as ``key=value``, and parsers whose errors are one line."""

import argparse
import ast
from collections.abc import Iterable
from typing import Any

from vl_plugins.errors import UserError
from vl_plugins.integrations.command_lines import CommandParser

__all__ = ["KeyValues", "Parser", "literal", "parse_key_values"]


def parse_key_values(tokens: Iterable[str], flag: str) -> dict[str, Any]:
    """Parse ``key=value ...``: Python literals, also true, false and null; anything else is a string.

    Args:
        tokens: one ``key=value`` each; the last value of a repeated key counts.
        flag: the option that they follow, for errors.

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


def literal(value: str) -> Any:
    """Return a Python literal, or one of true, false and null; anything else is a string."""
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return {"true": True, "false": False, "null": None}.get(value, value)
