"""Words of captions: a tokenizer for text encoders that are trained from scratch, and word vectors for it."""

import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from vl_plugins.errors import UserError

__all__ = ["PADDING", "UNKNOWN", "Vocabulary", "read_word_vectors", "split_words"]

PADDING, UNKNOWN, FIRST_WORD = 0, 1, 2
LARGEST_UNKNOWN_SHARE = 0.5  # of the words of the captions

# Letters and digits, and apostrophes between them; an underscore is neither.
WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)*")


def split_words(caption: str) -> list[str]:
    """Return the words and numbers of a caption in lower case. Apostrophes inside a word belong to it.

    >>> split_words("The dog's T-shirt, No. 7 (it’s 'red')!")
    ['the', "dog's", 't', 'shirt', 'no', '7', "it's", 'red']
    """
    return WORD.findall(caption.lower().replace("’", "'"))


@dataclass(frozen=True)
class Vocabulary:
    """Turns n captions into indices of words, (n, L) int64; the longest caption has L words.

    Index 0 is padding, at the end of shorter captions, 1 any other word or no word at all, and ``words[i]`` has the
    index i + 2; ``len`` counts all of them.

    Args:
        words: as :func:`split_words` returns them, each once.

    >>> vocabulary = Vocabulary(("a", "dog", "runs"))
    >>> vocabulary(["A dog runs.", "A cat!"])
    tensor([[2, 3, 4],
            [2, 1, 0]])
    >>> len(vocabulary)
    5
    """

    words: tuple[str, ...]

    @classmethod
    def from_captions(cls, captions: Iterable[str], min_count: int = 4) -> "Vocabulary":
        """Return the words that occur at least ``min_count`` times, the most frequent first, then by the alphabet.

        Words that occur less often become the unknown word. Words are between spaces, so this is no tokenizer for
        Chinese or Japanese, where each sentence would be a word.

        Raises:
            UserError: more than half of the words, counted as often as they occur, would be unknown.
        """
        counts = Counter(word for caption in captions for word in split_words(caption))
        words = sorted((word for word, count in counts.items() if count >= min_count), key=lambda w: (-counts[w], w))
        in_captions = counts.total()
        unknown = in_captions - sum(counts[word] for word in words)
        if not words or unknown > LARGEST_UNKNOWN_SHARE * in_captions:
            share = unknown / max(1, in_captions)
            raise UserError(
                f"{share:.0%} of the words of the captions ({unknown:,} of {in_captions:,}) occur fewer than "
                f"{min_count} times and would be unknown: use the trunk hugging_face for languages without spaces "
                "between words; for few captions, a smaller min_count of the vocabulary"
            )
        return cls(tuple(words))

    def __len__(self) -> int:
        return FIRST_WORD + len(self.words)

    def __call__(self, captions: Sequence[str]) -> Tensor:
        rows = [[self._indices.get(word, UNKNOWN) for word in split_words(caption)] for caption in captions]
        return pad_sequence([torch.tensor(row or [UNKNOWN]) for row in rows], batch_first=True, padding_value=PADDING)

    @cached_property
    def _indices(self) -> dict[str, int]:
        return {word: index for index, word in enumerate(self.words, FIRST_WORD)}


def read_word_vectors(path: str | os.PathLike, vocabulary: Vocabulary) -> Tensor:
    """Read vectors for the words of a vocabulary from a text file, as GloVe, word2vec and fastText publish them.

    Args:
        path: uncompressed UTF-8 text; each line has a word, in lower case, and D numbers, between spaces. A first line
            with the number of words and D is optional, and lines of another length are left out.
        vocabulary: V words, with padding and the unknown word.

    Returns:
        Vectors (V, D) float32 for an embedding. Words that are not in the file are drawn from a normal distribution
        with the standard deviation of those that are; padding is zero.

    Raises:
        UserError: the file has none of the words.
        ValueError: a word has something else than numbers.
    """
    indices = {word.encode(): index for index, word in enumerate(vocabulary.words, FIRST_WORD)}
    found: dict[int, list[float]] = {}
    dim = 0
    with open(path, "rb") as stream:
        for line in stream:
            word, *numbers = line.rstrip().split(b" ")
            dim = dim or (len(numbers) if len(numbers) > 1 else 0)
            if word in indices and len(numbers) == dim:  # some words of GloVe have spaces in them
                found.setdefault(indices[word], [float(number) for number in numbers])
    if not found:
        raise UserError(f"{path} has none of the {len(vocabulary.words):,} words of the vocabulary")
    known = torch.tensor(list(found.values()))
    generator = torch.Generator().manual_seed(0)
    vectors = known.std(correction=0) * torch.randn(len(vocabulary), dim, generator=generator)
    vectors[list(found)] = known
    vectors[PADDING] = 0
    return vectors
