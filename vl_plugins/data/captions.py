"""Captions as text: when two of them say the same, and what a sample's ``.txt`` has of them."""

from collections.abc import Sequence

__all__ = ["TXT", "normalise_caption", "txt_of"]

# What the `.txt` of a sample has: a caption, or a line for each.
TXT = ("first", "all")


def normalise_caption(text: str) -> str:
    r"""Return a caption in the form in which two captions that say the same are equal.

    Case and white space do not survive CLIP's tokenizer, so captions that differ in nothing else become the same
    tokens and the same embedding. As captions of different images they are false negatives of each other: a loss
    pushes apart what no model can tell apart.

    >>> normalise_caption(" A Dog\n runs. ") == normalise_caption("a dog runs.")
    True
    """
    return " ".join(text.split()).casefold()


def txt_of(captions: Sequence[str], txt: str) -> str:
    r"""Return the ``.txt`` of a sample: the first caption as it is, or all of them in a line each.

    A line break within one of several captions becomes a space: a reader of lines would take the rest for a caption.

    >>> txt_of(["A dog.", "A\nbig dog."], "all")
    'A dog.\nA big dog.'
    """
    return captions[0] if txt == "first" else "\n".join(" ".join(caption.splitlines()) for caption in captions)
