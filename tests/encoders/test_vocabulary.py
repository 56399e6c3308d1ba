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


def test_a_language_without_spaces_between_words_is_an_error():
    """26 different captions, of which one occurs four times."""
    places = ("垫子", "桌子", "床", "地", "草")
    captions = [f"一只{color}猫坐在{place}上" for color in "红黑白黄蓝" for place in places] + ["一只猫"] * 4
    message = r"^86% of the words of the captions \(25 of 29\) occur fewer than 4 times .*: use the trunk hugging_face "
    with pytest.raises(UserError, match=message):
        Vocabulary.from_captions(captions)


@pytest.mark.parametrize(
    ("captions", "message"),
    [
        (["x x x x", "a b c d e"], "^56% of the words of the captions"),
        (["a b", "..."], "^100% of the words"),
        ([], "^0% of the words"),
    ],
)
def test_too_few_captions_for_a_vocabulary(captions, message):
    with pytest.raises(UserError, match=rf"{message}.* for few captions, a smaller min_count of the vocabulary"):
        Vocabulary.from_captions(captions)


def test_half_of_the_words_may_be_unknown():
    assert Vocabulary.from_captions(["x x x x", "a b c d"]).words == ("x",)


def test_indices():
    vocabulary = pickle.loads(pickle.dumps(Vocabulary(("dog", "a"))))
    assert (PADDING, UNKNOWN, len(vocabulary)) == (0, 1, 4)
    indices = vocabulary(["A dog, a DOG", "...", "cat", "a"])
    assert indices.dtype == torch.int64
    assert indices.tolist() == [[3, 2, 3, 2], [1, 0, 0, 0], [1, 0, 0, 0], [3, 0, 0, 0]]


@pytest.fixture
def read(tmp_path):
    def read(text, words=("a", "dog", "cat", "it's")):
        file = tmp_path / "vectors.txt"
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        return read_word_vectors(file, Vocabulary(words))

    return read


@pytest.mark.parametrize("header", ["", "4 3\n"])
def test_vectors_of_known_words(read, header):
    vectors = read(f"{header}dog 1 2.5 -3e-1\nof 9 9 9\nit's 4 5 6 \nDog 8 8 8\ndog 7 7 7\n")
    assert (vectors.shape, vectors.dtype) == ((6, 3), torch.float32)
    torch.testing.assert_close(vectors[[3, 5]], torch.tensor([[1, 2.5, -0.3], [4, 5, 6]]))
    assert not vectors[PADDING].any()
    assert vectors[[UNKNOWN, 2, 4]].abs().min() > 0


def test_vectors_of_other_words_have_the_same_spread(read):
    known = 5 * torch.randn(40, 50, generator=torch.Generator().manual_seed(3)) + 0.1
    lines = "".join(f"w{row} {' '.join(map(str, numbers))}\n" for row, numbers in enumerate(known.tolist()))
    words = (*(f"w{row}" for row in range(40)), *(f"new{row}" for row in range(100)))
    vectors = read(lines, words)
    torch.testing.assert_close(vectors[2:42], known)
    assert vectors[42:].std().item() == pytest.approx(known.std().item(), rel=0.05)


def test_words_with_spaces_and_other_bytes(read):
    text = b"dog 1 2\n. . . 3 4\na b@c.d 5 6\n\xff\xfe 7 8\n\xe7\x8a\xac 1 1\n"
    vectors = read(text, words=("a", "dog", "犬"))
    assert vectors[[3, 4]].tolist() == [[1, 2], [1, 1]]
    with pytest.raises(UserError, match="has none of the 1 words"):
        read(text, words=("cat",))
    with pytest.raises(ValueError, match="could not convert"):
        read("dog 1 x\n")
