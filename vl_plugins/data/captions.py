"""Captions as text: when two of them say the same, how many an image shows, and a sample's ``.txt``."""

from collections.abc import Sequence

from vl_plugins.utils.errors import UserError

__all__ = ["TXT", "normalize_caption", "parse_captions_per_image", "txt_content"]

# What the `.txt` of a sample has: a caption, or a line for each.
TXT = ("first", "all")


def normalize_caption(text: str) -> str:
    r"""Return a caption in the form in which two captions that say the same are equal.

    Case and white space do not survive CLIP's tokenizer, so captions that differ in nothing else become the same
    tokens and the same embedding. As captions of different images they are false negatives of each other: a loss
    pushes apart what no model can tell apart.

    >>> normalize_caption(" A Dog\n runs. ") == normalize_caption("a dog runs.")
    True
    """
    return " ".join(text.split()).casefold()


def parse_captions_per_image(value: str | int) -> str | int:
    """Return ``"random"``, ``"first"``, ``"all"`` or a positive int.

    Raises:
        UserError: the value is anything else.

    >>> parse_captions_per_image("all"), parse_captions_per_image("3")
    ('all', 3)
    """
    text = str(value)
    if text in ("random", "first", "all"):
        return text
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise UserError(f"captions per image must be 'random', 'first', 'all' or a positive number, got {text!r}")


def txt_content(captions: Sequence[str], txt: str) -> str:
    r"""Return the ``.txt`` of a sample: the first caption as it is, or all of them in a line each.

    A line break within one of several captions becomes a space: a reader of lines would take the rest for a caption.

    >>> txt_content(["A dog.", "A\nbig dog."], "all")
    'A dog.\nA big dog.'
    """
    return captions[0] if txt == "first" else "\n".join(" ".join(caption.splitlines()) for caption in captions)
