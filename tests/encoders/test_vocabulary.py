import pickle

import pytest
import torch

from vl_plugins.encoders.vocabulary import PADDING, UNKNOWN, Vocabulary, read_word_vectors, split_words
from vl_plugins.errors import UserError


@pytest.mark.parametrize(
    ("caption", "words"),
    [
        ("It's the dogs' 'ball', a plan.", ["it's", "the", "dogs", "ball", "a", "plan"]),
        ("the dog’s rock'n'roll", ["the", "dog's", "rock'n'roll"]),
        ("T-shirt no_7: 3.5 km 2nd", ["t", "shirt", "no", "7", "3", "5", "km", "2nd"]),
        ("ÄÖÜ ß café 犬 が走る\tСобака\n", ["äöü", "ß", "café", "犬", "が走る", "собака"]),
        (" '' - . ' ", []),
    ],
)
def test_split_words(caption, words):
    assert split_words(caption) == words


def test_most_frequent_first_and_equal_ones_by_the_alphabet():
    captions = ["b a d", "a b", "a", "c", "c d", "e"]
    assert Vocabulary.from_captions(captions, min_count=2).words == ("a", "b", "c", "d")
    assert Vocabulary.from_captions(iter(captions), min_count=1).words == ("a", "b", "c", "d", "e")
    assert Vocabulary.from_captions(["x x x X", "y y y"]).words == ("x",), "four times by default"
    with pytest.raises(UserError, match="occurs 4 times; the most frequent occurs 3 times"):
        Vocabulary.from_captions(captions)


def test_indices():
    vocabulary = pickle.loads(pickle.dumps(Vocabulary(("dog", "a"))))
    assert (PADDING, UNKNOWN, len(vocabulary)) == (0, 1, 4)
    indices = vocabulary(["A dog, a DOG", "...", "cat", "a"])
    assert indices.dtype == torch.int64
    assert indices.tolist() == [[3, 2, 3, 2], [1, 0, 0, 0], [1, 0, 0, 0], [3, 0, 0, 0]]


@pytest.fixture
def read(tmp_path):
    def read(text, words=("a", "dog", "cat", "it's"), **options):
        file = tmp_path / "vectors.txt"
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        return read_word_vectors(file, Vocabulary(words), **options)

    return read


@pytest.mark.parametrize("header", ["", "4 3\n"])
def test_vectors_of_known_words(read, header):
    vectors, found = read(f"{header}dog 1 2.5 -3e-1\nof 9 9 9\nit's 4 5 6 \nDog 8 8 8\ndog 7 7 7\n")
    assert (vectors.shape, vectors.dtype, found) == ((6, 3), torch.float32, 2)
    torch.testing.assert_close(vectors[[3, 5]], torch.tensor([[1, 2.5, -0.3], [4, 5, 6]]))
    assert not vectors[PADDING].any()
    assert vectors[[UNKNOWN, 2, 4]].abs().min() > 0


def test_vectors_of_other_words_have_the_same_spread(read):
    known = 5 * torch.randn(40, 50, generator=torch.Generator().manual_seed(3)) + 0.1
    lines = "".join(f"w{row} {' '.join(map(str, numbers))}\n" for row, numbers in enumerate(known.tolist()))
    words = (*(f"w{row}" for row in range(40)), *(f"new{row}" for row in range(100)))
    vectors, _ = read(lines, words)
    torch.testing.assert_close(vectors[2:42], known)
    assert vectors[42:].std().item() == pytest.approx(known.std().item(), rel=0.05)
    assert torch.equal(read(lines, words, seed=0)[0], vectors)
    assert not torch.isclose(read(lines, words, seed=1)[0][42:], vectors[42:]).all(dim=1).any()


def test_words_with_spaces_and_other_bytes(read):
    text = b"dog 1 2\n. . . 3 4\na b@c.d 5 6\n\xff\xfe 7 8\n\xe7\x8a\xac 1 1\n"
    vectors, found = read(text, words=("a", "dog", "犬"))
    assert found == 2
    assert vectors[[3, 4]].tolist() == [[1, 2], [1, 1]]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("of 1 2\ndog 1\n", "line 2: expected a word and 2 numbers"),
        ("dog 1 2\nof 1 2\ncat 1 2 3\n", "line 3: expected a word and 2 numbers"),
        ("2 0\ndog\n", "line 2: expected a word and its numbers"),
        ("of 1 2\ndog 1 1e39\n", "line 2: expected a word and 2 numbers"),
        ("", "has none of the 4 words of the vocabulary"),
    ],
)
def test_malformed_vectors(read, text, reason):
    with pytest.raises(UserError, match=rf"vectors\.txt:? {reason}"):
        read(text)
