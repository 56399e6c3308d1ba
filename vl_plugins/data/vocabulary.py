"""Words of captions: a tokenizer for text encoders that are trained from scratch, and word vectors for it."""

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite

import torch
from torch import Tensor

from vl_plugins.data.decoding import read_captions
from vl_plugins.data.shard_files import TEXTS, expand_shards, read_samples
from vl_plugins.data.storage import error_text, open_regular
from vl_plugins.utils.errors import UserError

__all__ = ["PADDING", "UNKNOWN", "Vocabulary", "read_shard_captions", "read_word_vectors", "split_words"]

PADDING, UNKNOWN, FIRST_WORD = 0, 1, 2

# Letters and digits, and apostrophes between them; an underscore is neither.
WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)*")


def split_words(caption: str) -> list[str]:
    """Return the words and numbers of a caption in lower case.

    Apostrophes inside a word belong to it, also curly ones; all else that is no letter and no digit, such as a hyphen,
    separates words.

    >>> split_words("The dog's T-shirt, No. 7 (it’s 'red')!")
    ['the', "dog's", 't', 'shirt', 'no', '7', "it's", 'red']
    """
    return WORD.findall(caption.lower().replace("’", "'"))


@dataclass(frozen=True)
class Vocabulary:
    """Words with an index each, which turns captions into indices.

    Index 0 is padding, 1 any other word, and ``words[i]`` has the index i + 2; ``len`` counts all of them.

    Args:
        words: as :func:`split_words` returns them, each once.

    Raises:
        UserError: a word occurs twice.

    >>> vocabulary = Vocabulary(("a", "dog", "runs"))
    >>> vocabulary(["A dog runs.", "A cat!"])
    tensor([[2, 3, 4],
            [2, 1, 0]])
    >>> len(vocabulary)
    5
    """

    words: tuple[str, ...]

    def __post_init__(self):
        if len(self._indices) < len(self.words):
            word, count = Counter(self.words).most_common(1)[0]
            raise UserError(f"the word {word!r} occurs {count} times in a vocabulary; each must occur once")

    @classmethod
    def from_captions(cls, captions: Iterable[str], min_count: int = 4, max_words: int | None = None) -> "Vocabulary":
        """Return the words of captions, the most frequent first, and equally frequent ones in order of the alphabet.

        Args:
            captions: read once.
            min_count: a word must occur so often.
            max_words: only so many words, the most frequent ones; all by default.

        Raises:
            UserError: no word occurs so often, or a number is less than 1.
        """
        for name, value in (("min_count", min_count), ("max_words", max_words)):
            if value is not None and value < 1:
                raise UserError(f"{name} must be at least 1, got {value}")
        counts = Counter(word for caption in captions for word in split_words(caption))
        words = sorted((word for word, count in counts.items() if count >= min_count), key=lambda w: (-counts[w], w))
        if not words:
            most = max(counts.values(), default=0)
            raise UserError(f"no word of the captions occurs {min_count} times; the most frequent occurs {most} times")
        return cls(tuple(words[:max_words]))

    def __len__(self) -> int:
        return FIRST_WORD + len(self.words)

    def __call__(self, captions: Sequence[str]) -> Tensor:
        """Return the indices of the words of n captions, (n, L) int64, where the longest caption has L words.

        Shorter ones are padded at the end. A caption without any word is one unknown word.
        """
        rows = [self._encode(caption) for caption in captions]
        length = max(map(len, rows), default=0)
        padded = [row + [PADDING] * (length - len(row)) for row in rows]
        return torch.tensor(padded, dtype=torch.int64).reshape(len(rows), length)

    def _encode(self, caption: str) -> list[int]:
        return [self._indices.get(word, UNKNOWN) for word in split_words(caption)] or [UNKNOWN]

    @cached_property
    def _indices(self) -> dict[str, int]:
        return {word: index for index, word in enumerate(self.words, FIRST_WORD)}


def read_shard_captions(shards: str | Sequence[str]) -> Iterator[str]:
    """Yield every caption of shards in their order; images and features are not read.

    Args:
        shards: shards, or a pattern for :func:`vl_plugins.data.shard_files.expand_shards`.

    Raises:
        UserError: a shard does not exist or cannot be read, or a sample has no captions.
    """
    for shard in expand_shards(shards):
        try:
            for sample in read_samples(shard, extensions=TEXTS):
                yield from read_captions(sample)
        # Damaged archives raise nearly anything.
        except Exception as error:
            raise UserError(f"cannot read the captions of shard {shard}: {error!r}") from error


def read_word_vectors(path: str | os.PathLike, vocabulary: Vocabulary, *, seed: int = 0) -> tuple[Tensor, int]:
    """Read vectors for the words of a vocabulary from a text file, as GloVe, word2vec and fastText publish them.

    Each line has a word and its D numbers, between spaces; a first line with the number of words and D is optional.
    Words are compared as they are, so those with capital letters are left out. Of a word that occurs twice the first
    vector counts.

    Args:
        path: UTF-8 text, not compressed. It is read line by line, and only what is in the vocabulary is kept.
        vocabulary: V words, with padding and the unknown word.
        seed: of the vectors of words that are not in the file, the unknown word too, which are drawn from a normal
            distribution of mean 0 with the standard deviation of all numbers found.

    Returns:
        Vectors (V, D) float32 for an embedding, that of padding zero; and how many words were found.

    Raises:
        UserError: the file cannot be read, has none of the words, or a line has more or fewer than D numbers, or for a
            word of the vocabulary something else in their place; the message names file and line.
    """
    indices = {word.encode(): index for index, word in enumerate(vocabulary.words, FIRST_WORD)}
    found: dict[int, Tensor] = {}
    dim = None
    try:
        with open_regular(path) as stream:
            for place, line in enumerate(stream, 1):
                if dim is None:
                    fields = line.split()
                    if len(fields) == 2 and all(map(bytes.isdigit, fields)):
                        dim = int(fields[1])
                        continue
                    dim = len(fields) - 1
                # From the right: some words of GloVe have spaces in them, but no numbers after these.
                word, *values = line.rstrip().rsplit(b" ", dim)
                numbers = _numbers(values) if word in indices else []
                if dim < 1 or len(values) < dim or numbers is None or _numbers(word.split(b" ")[1:]):
                    raise UserError(f"{path}: line {place}: expected a word and {dim if dim > 0 else 'its'} numbers")
                if numbers:
                    found.setdefault(indices[word], torch.tensor(numbers))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error_text(error)}") from error
    if not found:
        raise UserError(f"{path} has none of the {len(vocabulary.words):,} words of the vocabulary")
    known = torch.stack(list(found.values()))
    vectors = known.std(correction=0) * torch.randn(
        len(vocabulary), known.shape[1], generator=torch.Generator().manual_seed(seed)
    )
    vectors[list(found)] = known
    vectors[PADDING] = 0
    return vectors, len(found)


def _numbers(texts: Sequence[bytes]) -> list[float] | None:
    """Return finite numbers, or None where one is something else."""
    try:
        numbers = [float(text) for text in texts]
    except ValueError:
        return None
    return numbers if all(map(isfinite, numbers)) else None
