"""Captions as text: when two of them say the same."""

__all__ = ["normalise_caption"]


def normalise_caption(text: str) -> str:
    r"""Return a caption in the form in which two captions that say the same are equal.

    Case and white space do not survive CLIP's tokenizer, so captions that differ in nothing else become the same
    tokens and the same embedding. As captions of different images they are false negatives of each other: a loss
    pushes apart what no model can tell apart.

    >>> normalise_caption(" A Dog\n runs. ") == normalise_caption("a dog runs.")
    True
    """
    return " ".join(text.split()).casefold()
