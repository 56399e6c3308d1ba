import pickle
from collections import Counter

import pytest
import torch
from torch.utils.data import DataLoader

from vl_plugins.data.collection import read_collection
from vl_plugins.data.reader import training_pipeline
from vl_plugins.data.vocabulary import (
    PADDING,
    UNKNOWN,
    Vocabulary,
    read_shard_captions,
    read_word_vectors,
    split_words,
)
from vl_plugins.utils.errors import UserError


@pytest.mark.parametrize(
    ("caption", "words"),
    [
        ("A man, a plan.", ["a", "man", "a", "plan"]),
        ("It's the dogs' 'ball'", ["it's", "the", "dogs", "ball"]),
        ("the dog’s rock'n'roll", ["the", "dog's", "rock'n'roll"]),
        ("T-shirt no_7: 3.5 km 2nd", ["t", "shirt", "no", "7", "3", "5", "km", "2nd"]),
        ("Ein Frosch, ÄÖÜ ß café", ["ein", "frosch", "äöü", "ß", "café"]),
        (" '' - . ' ", []),
        ("", []),
        ("犬 が走る\tСобака\n", ["犬", "が走る", "собака"]),
    ],
)
def test_split_words(caption, words):
    assert split_words(caption) == words


class TestVocabulary:
    def test_most_frequent_first_and_equal_ones_by_the_alphabet(self):
        captions = ["b a d", "a b", "a", "c", "c d", "e"]
        assert Vocabulary.from_captions(captions, min_count=2).words == ("a", "b", "c", "d")
        assert Vocabulary.from_captions(iter(captions), min_count=1).words == ("a", "b", "c", "d", "e")
        assert Vocabulary.from_captions(captions, min_count=2, max_words=3).words == ("a", "b", "c")
        assert Vocabulary.from_captions(reversed(captions), min_count=3).words == ("a",)

    def test_four_times_by_default(self):
        assert Vocabulary.from_captions(["x x x X", "y y y"]).words == ("x",)

    def test_indices(self):
        vocabulary = Vocabulary(("dog", "a"))
        assert (PADDING, UNKNOWN, len(vocabulary)) == (0, 1, 4)
        indices = vocabulary(["A dog, a DOG", "...", "cat", "a"])
        assert indices.dtype == torch.int64
        assert indices.tolist() == [[3, 2, 3, 2], [1, 0, 0, 0], [1, 0, 0, 0], [3, 0, 0, 0]]
        assert vocabulary(["dog"]).shape == (1, 1)
        assert vocabulary([]).shape == (0, 0)
        assert vocabulary([]).dtype == torch.int64

    def test_copies_are_equal(self):
        vocabulary = Vocabulary(("a", "b"))
        copy = pickle.loads(pickle.dumps(vocabulary))
        assert copy == vocabulary != Vocabulary(("b", "a"))
        assert copy(["b x"]).tolist() == [[3, 1]]
        with pytest.raises(AttributeError):
            copy.words = ()

    @pytest.mark.parametrize(
        ("captions", "options", "reason"),
        [
            (
                ["a b", "a c"],
                {"min_count": 3},
                "no word of the captions occurs 3 times; the most frequent occurs 2 times",
            ),
            ([], {}, "occurs 4 times; the most frequent occurs 0 times"),
            (["a"], {"min_count": 0}, "min_count must be at least 1, got 0"),
            (["a"], {"min_count": 1, "max_words": 0}, "max_words must be at least 1, got 0"),
        ],
    )
    def test_nothing_left(self, captions, options, reason):
        with pytest.raises(UserError, match=reason):
            Vocabulary.from_captions(captions, **options)

    def test_a_word_twice(self):
        with pytest.raises(UserError, match="the word 'b' occurs 2 times in a vocabulary"):
            Vocabulary(("a", "b", "b"))


class TestShards:
    def test_captions(self, toy_shards):
        shards = f"{toy_shards}/toy-train-{{000000..000002}}.tar"
        captions = list(read_shard_captions(shards))
        assert tuple(captions) == read_collection(shards).captions
        assert len(captions) == 3 * 8 * 5

    def test_unreadable(self, tmp_path):
        (tmp_path / "x.tar").write_bytes(b"no archive")
        with pytest.raises(UserError, match=r"cannot read the captions of shard .*x\.tar: "):
            list(read_shard_captions(f"{tmp_path}/x.tar"))

    @pytest.mark.parametrize("workers", [0, 2])
    def test_tokenizer_of_a_pipeline(self, toy_shards, workers):
        shards = f"{toy_shards}/toy-train-{{000000..000001}}.tar"
        vocabulary = Vocabulary.from_captions(read_shard_captions(shards), min_count=1)
        reader = training_pipeline(shards, corner, vocabulary, 2, captions_per_image=3, allow_duplicate_captions=True)
        rows = Counter(tuple(split_words(caption)) for caption in read_shard_captions(shards))
        lengths = set()
        for _, texts in DataLoader(reader, batch_size=None, num_workers=workers):
            assert texts.shape[0] == 6
            assert texts[:, -1].any(), "no wider than the longest caption of the batch"
            lengths.add(texts.shape[1])
            for row in texts.tolist():
                assert tuple(vocabulary.words[index - 2] for index in row if index) in rows
        assert len(lengths) > 1


def corner(picture):
    return torch.tensor(picture.getpixel((0, 0)))


class TestWordVectors:
    @pytest.fixture
    def read(self, tmp_path):
        def read(text, words=("a", "dog", "cat", "it's"), **options):
            file = tmp_path / "vectors.txt"
            file.write_bytes(text if isinstance(text, bytes) else text.encode())
            return read_word_vectors(file, Vocabulary(words), **options)

        return read

    @pytest.mark.parametrize("header", ["", "4 3\n"])
    def test_words_that_are_there(self, read, header):
        vectors, found = read(f"{header}dog 1 2.5 -3e-1\nof 9 9 9\nit's 4 5 6 \nDog 8 8 8\ndog 7 7 7\n")
        assert (vectors.shape, vectors.dtype, found) == ((6, 3), torch.float32, 2)
        torch.testing.assert_close(vectors[[3, 5]], torch.tensor([[1, 2.5, -0.3], [4, 5, 6]]))
        assert not vectors[PADDING].any()
        assert vectors[[UNKNOWN, 2, 4]].abs().min() > 0

    def test_words_that_are_not_there_have_the_same_spread(self, read):
        known = 5 * torch.randn(40, 50, generator=torch.Generator().manual_seed(3)) + 0.1
        lines = "".join(f"w{row} {' '.join(map(str, numbers))}\n" for row, numbers in enumerate(known.tolist()))
        words = (*(f"w{row}" for row in range(40)), *(f"new{row}" for row in range(100)))
        vectors, found = read(lines, words)
        assert found == 40
        torch.testing.assert_close(vectors[2:42], known)
        drawn = vectors[42:]
        assert drawn.std().item() == pytest.approx(known.std().item(), rel=0.05)
        assert abs(drawn.mean().item()) < 0.3
        assert torch.equal(read(lines, words, seed=0)[0], vectors)
        other, _ = read(lines, words, seed=1)
        assert torch.equal(other[2:42], known)
        assert not torch.isclose(other[42:], drawn).all(dim=1).any()

    def test_words_with_spaces_and_other_bytes(self, read):
        vectors, found = read(
            b"dog 1 2\n. . . 3 4\na b@c.d 5 6\n\xff\xfe 7 8\n\xe7\x8a\xac 1 1\n", words=("a", "dog", "犬")
        )
        assert found == 2
        assert vectors[[3, 4]].tolist() == [[1, 2], [1, 1]]

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("dog 1 2\nof 1\n", "line 2: expected a word and 2 numbers"),
            ("dog 1 2\nof 1 2\ncat 1 2 3\n", "line 3: expected a word and 2 numbers"),
            ("dog 1 2\nof 1 2 3\n", "line 2: expected a word and 2 numbers"),
            ("2 3\ndog 1 2\n", "line 2: expected a word and 3 numbers"),
            ("2 0\ndog\n", "line 2: expected a word and its numbers"),
            ("of 1 2\ndog 1 x\n", "line 2: expected a word and 2 numbers"),
            ("of 1 2\ndog 1 nan\n", "line 2: expected a word and 2 numbers"),
            ("dog\n", "line 1: expected a word and its numbers"),
            ("\ndog 1\n", "line 1: expected a word and its numbers"),
            ("of 1 2\n", "has none of the 4 words of the vocabulary"),
            ("", "has none of the 4 words of the vocabulary"),
        ],
    )
    def test_malformed(self, read, text, reason):
        with pytest.raises(UserError, match=rf"vectors\.txt:? {reason}"):
            read(text)

    def test_no_file(self, tmp_path):
        with pytest.raises(UserError, match=r"cannot read .*none\.txt: No such file"):
            read_word_vectors(tmp_path / "none.txt", Vocabulary(("a",)))
