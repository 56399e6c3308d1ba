"""JSON documents of unknown origin: parsed, and checked against a type, with errors that say where they come from."""

import json
from typing import Any

from vl_plugins.errors import UserError, require

__all__ = ["check_type", "parse_json", "to_json"]


def parse_json(data: bytes, name: str) -> Any:
    """Parse UTF-8 text as JSON; raise :class:`UserError` that begins with ``name`` if it is anything else."""
    try:
        return json.loads(data.decode("utf-8-sig"))
    # Also for numbers of thousands of digits, and for brackets nested thousands of times.
    except (ValueError, RecursionError) as error:
        raise UserError(f"{name} is not valid JSON: {error}") from error


def to_json(value: Any, **options: Any) -> bytes:
    """Return JSON that is readable in any language and does not depend on the order of keys."""
    return json.dumps(value, ensure_ascii=False, sort_keys=True, **options).encode()


def check_type(value: Any, expected: Any) -> Any:
    """Return a JSON value as a type that msgspec knows; without keys that a dataclass or ``TypedDict`` does not have.

    Raises:
        UserError: the value is of another type, as in "Expected `int`, got `str` - at `$.images[1]`".
    """
    msgspec = require("msgspec", extra="data")
    try:
        return msgspec.convert(value, expected, str_keys=True)
    except msgspec.ValidationError as error:
        raise UserError(str(error)) from None
