"""JSON documents of unknown origin, with errors that say where they come from."""

import json
from typing import Any

from vl_plugins.utils.errors import UserError

__all__ = ["parse_json"]


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
