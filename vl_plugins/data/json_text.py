"""JSON documents of unknown origin: parsed, and checked against a type, with errors that say where they come from."""

import json
from typing import Any

from vl_plugins.utils.errors import UserError
from vl_plugins.utils.optional import require

__all__ = ["check_type", "parse_json"]


def parse_json(data: bytes, name: str) -> Any:
    """Parse the content of a JSON document.

    Args:
        data: UTF-8 text.
        name: of the document, for errors.

    Raises:
        UserError: the content is not UTF-8, not JSON, nested too deeply, or has numbers of thousands of digits.
    """
    try:
        return json.loads(data.decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        raise UserError(f"{name} is not valid JSON: {error}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    except ValueError as error:  # a number of thousands of digits
        raise UserError(f"{name} cannot be read: {error}") from error
    except RecursionError as error:
        raise UserError(f"{name} is nested too deeply to be an annotation or index file") from error


def check_type(value: Any, expected: Any) -> Any:
    """Return a JSON value as a type that msgspec knows: a dataclass, a ``TypedDict``, ``list[int | str]``, ...

    Keys that a dataclass or ``TypedDict`` does not have are left out.

    Raises:
        UserError: the value is of another type; the message says what was expected where, in a line.

    >>> check_type({"a": [1, "2"]}, dict[str, list[int]])
    Traceback (most recent call last):
        ...
    vl_plugins.utils.errors.UserError: Expected `int`, got `str` - at `$[...][1]`
    """
    msgspec = require("msgspec", extra="data")
    try:
        return msgspec.convert(value, expected, str_keys=True)
    except msgspec.ValidationError as error:
        raise UserError(str(error)) from None
