import dataclasses
import io
import json
import pickle

import numpy as np
import pytest
import safetensors.torch
import torch

from vl_plugins.distances import match_probability, smooth_chamfer_similarity
from vl_plugins.errors import UserError
from vl_plugins.retrieval.features import Features, id_difference, load_features, save_features

SUFFIXES = (".npz", ".safetensors")


def unit(*shape, seed=0, dtype=torch.float32):
    vectors = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.nn.functional.normalize(vectors, dim=-1).to(dtype)


def features(**changes):
    """Four images with 2, 1, 3 and 2 captions."""
    fields = {
        "images": unit(4, 6),
        "captions": unit(8, 6, seed=1),
        "image_of_caption": torch.tensor([0, 0, 1, 2, 2, 2, 3, 3]),
        "image_ids": (11, 5, 9, 7),
        "caption_ids": (101, 102, 103, 104, 105, 106, 107, 108),
        "description": {"model": "vl-tiny", "shards": "toy-{00..03}.tar"},
    }
    return Features(**fields | changes)


def assert_same(found, expected, dtype=None):
    for field in dataclasses.fields(Features):
        one, other = getattr(found, field.name), getattr(expected, field.name)
        if isinstance(other, torch.Tensor):
            assert one.dtype == (other.dtype if dtype is None or not other.is_floating_point() else dtype)
            assert torch.equal(one, other.to(one.dtype))
        else:
            assert one == other, field.name


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"image_ids": ("a", "b", "ü,\n", "3"), "caption_ids": None},
        {"image_ids": ("a", 1, 1 << 70, "1"), "description": {}},
        {"images": unit(4, 3, 6), "captions": unit(8, 2, 6), "description": {"similarity": "mil"}},
        {"images": unit(4, 6, dtype=torch.float16), "captions": unit(8, 6, dtype=torch.float64)},
        {"image_ids": None, "caption_ids": None},
        {"image_ids": (1 << 70, -(1 << 63), (1 << 63) - 1, 0)},
    ],
    ids=["vectors", "strings", "mixed", "sets", "types", "anonymous", "large"],
)
def test_what_is_saved_is_loaded(tmp_path, suffix, changes):
    file = tmp_path / f"features{suffix}"
    save_features(features(**changes), file)
    assert_same(load_features(file), features(**changes))
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_bfloat16_becomes_float32_where_the_format_lacks_it(tmp_path):
    saved = features(images=unit(4, 6, dtype=torch.bfloat16), captions=unit(8, 6, dtype=torch.bfloat16))
    for suffix, dtype in (".npz", torch.float32), (".safetensors", torch.bfloat16):
        save_features(saved, tmp_path / f"features{suffix}")
        assert_same(load_features(tmp_path / f"features{suffix}"), saved, dtype)


def test_files_of_other_programs(tmp_path):
    """Only what is necessary, names as strings, other types, and other things beside."""
    saved = features()
    arrays = {"image_features": saved.images.numpy(), "caption_features": saved.captions.numpy(), "logit_scale": 100.0}
    file = tmp_path / "features.npz"
    ids = np.array(["a", "b", "c", "d"])
    np.savez_compressed(file, **arrays, image_of_caption=np.uint8(saved.image_of_caption), image_ids=ids)
    loaded = load_features(file)
    assert_same(loaded, features(image_ids=("a", "b", "c", "d"), caption_ids=None, description={}))


class Exploit:
    def __reduce__(self):
        return (open, ("executed", "w"))


def npz(**arrays):
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()


IMAGES, CAPTIONS = unit(4, 6).numpy(), unit(8, 6).numpy()
BOTH = {"image_features": IMAGES, "caption_features": CAPTIONS, "image_of_caption": np.arange(8) // 2}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read"),
        (b"PK\x03\x04 and no more", "cannot be read"),
        (npz(**BOTH)[:-50], "cannot be read"),
        (pickle.dumps(Exploit()), "cannot be read"),
        (npz(image_features=np.array([Exploit()], dtype=object), caption_features=CAPTIONS), "cannot be read"),
        (npz(image_features=IMAGES), "has no caption_features; it has image_features"),
        (npz(), "has no image_features; it has nothing"),
        (npz(**BOTH | {"image_features": np.array(["a"])}), "image_features must be numbers"),
        (
            npz(image_features=IMAGES, caption_features=CAPTIONS),
            "has no image_of_caption; it has caption_features, image",
        ),
        (npz(**BOTH | {"caption_features": CAPTIONS[:, :5]}), "got (4, 6) and (8, 5)"),
        (npz(**BOTH | {"caption_features": CAPTIONS[:, None]}), "got (4, 6) and (8, 1, 6)"),
        (
            npz(**BOTH | {"image_features": IMAGES.astype(int)}),
            "image features must be floating point, got torch.int64",
        ),
        (
            npz(**BOTH | {"image_of_caption": np.arange(8.0)}),
            "image_of_caption must be whole numbers, got torch.float64",
        ),
        (npz(**BOTH | {"image_of_caption": np.arange(7) % 4}), "image_of_caption must be int64 of shape (8,)"),
        (npz(**BOTH | {"image_of_caption": np.arange(8) % 5}), "image_of_caption must lie in [0, 4)"),
        (npz(**BOTH | {"image_of_caption": np.arange(8) % 5 - 1}), "image_of_caption must lie in [0, 4)"),
        (npz(**BOTH | {"image_of_caption": np.arange(8) % 3}), "1 images have no caption, first row 3"),
        (npz(**BOTH, image_ids=np.arange(3)), "there are 4 images, but 3 image ids"),
        (npz(**BOTH, caption_ids=np.arange(8.0)), "caption_ids must be a list of whole numbers or strings"),
        (npz(**BOTH, caption_ids=np.array(1)), "caption_ids must be a list of whole numbers or strings"),
        (npz(**BOTH, vl_plugins=np.array("[1")), "cannot be read"),
        (npz(**BOTH, vl_plugins=np.array("[1]")), "vl_plugins is not a JSON object"),
        (npz(**BOTH | {"image_features": np.float32(1)}), "must be (I, D) and (C, D), or sets"),
        (npz(**BOTH | {"image_features": IMAGES[:0]}), "must be (I, D) and (C, D), or sets"),
    ],
)
def test_files_that_are_wrong(tmp_path, monkeypatch, content, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.npz").write_bytes(content)
    with pytest.raises(UserError) as raised:
        load_features("bad.npz")
    assert str(raised.value).startswith("features bad.npz") or "bad.npz: " in str(raised.value)
    assert message in str(raised.value)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("content", [b"", b"\xff" * 100, safetensors.torch.save({"image_features": unit(4, 6)})[:-9]])
def test_damaged_safetensors(tmp_path, content):
    (tmp_path / "bad.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=r"bad\.safetensors cannot be read"):
        load_features(tmp_path / "bad.safetensors")


def test_files_that_cannot_be(tmp_path):
    with pytest.raises(UserError, match=r"must end in \.npz or \.safetensors, got .*\.pt"):
        load_features(tmp_path / "features.pt")
    with pytest.raises(UserError, match="no such file"):
        load_features(tmp_path / "features.npz")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file"):
        save_features(features(), tmp_path / "file" / "features.npz")


def changed(rows, value, column=slice(None)):
    captions = unit(8, 6, seed=1)
    captions[rows, column] = value
    return features(captions=captions)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            changed([3, 5], float("nan"), 2),
            "caption features are NaN or infinite: 2 of 8 rows, first row 3 (caption id 104)",
        ),
        (
            changed(7, float("inf"), 0),
            "caption features are NaN or infinite: 1 of 8 rows, first row 7 (caption id 108)",
        ),
        (changed([0, 1], 0.0), "caption features are zero: 2 of 8 rows, first row 0 (caption id 101)"),
        (
            features(images=3 * unit(4, 6)),
            "divides by the norms: 4 of 4 rows, first row 0 (image id 11)",
        ),
        (
            features(captions=unit(8, 6) * torch.tensor([1, 1, 1.02, 1, 1, 1, 1, 1])[:, None]),
            "norms go from 1 to 1.02;",
        ),
        (features(images=unit(4, 2, 6) * torch.tensor([[1.0], [2.0]]), captions=unit(8, 2, 6)), "4 of 4 rows"),
        (features(image_ids=None, images=2 * unit(4, 6)), "4 of 4 rows, first row 0"),
        (features(image_ids=(1, 2)), "there are 4 images, but 2 image ids"),
    ],
)
def test_features_that_cannot_be_compared(wrong, message):
    with pytest.raises(UserError) as raised:
        wrong.check("model.npz")
    assert str(raised.value).startswith("model.npz: ")
    assert message in str(raised.value)


def test_features_that_can_be_compared():
    assert_same(features().check(), features())
    for dtype in (torch.float16, torch.bfloat16):
        features(images=unit(4, 700, dtype=dtype), captions=unit(8, 700, dtype=dtype)).check()
    # An element of zeros is not in its set.
    sets = unit(4, 2, 6)
    sets[1, 0] = 0
    assert torch.equal(features(images=sets, captions=unit(8, 2, 6)).check().images, sets)


def test_normalize():
    lengths = torch.tensor([0.1, 1, 2, 50])[:, None]
    found = features(images=lengths * unit(4, 6)).check(normalize=True)
    torch.testing.assert_close(found.images, unit(4, 6))
    assert torch.equal(found.captions, features().captions / features().captions.norm(dim=1, keepdim=True))
    sets = lengths[..., None] * unit(4, 2, 6)
    sets[2, 1] = 0
    found = features(images=sets, captions=unit(8, 2, 6)).check(normalize=True).images
    assert found[2, 1].tolist() == [0] * 6
    torch.testing.assert_close(found[[0, 1, 3]], unit(4, 2, 6)[[0, 1, 3]])


def test_with_captions():
    found = features().with_captions(torch.tensor([0, 2, 4, 7]))
    assert found.caption_ids == (101, 103, 105, 108)
    assert found.image_of_caption.tolist() == [0, 1, 2, 3]
    assert torch.equal(found.captions, features().captions[[0, 2, 4, 7]])
    assert torch.equal(found.images, features().images)
    assert features(caption_ids=None).with_captions(torch.tensor([0])).caption_ids is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"image_ids": (5, 11, 9, 7)},
            "the same 4 images are in another order: image 11 stands at place 0, where all has 5",
        ),
        (
            {"image_ids": (1, 5, 9, 7)},
            "1 of the 4 images of all are missing, such as 1",
        ),
        ({"caption_ids": (*range(101, 108), 1)}, "1 of the 8 captions of all are missing, such as 1"),
        (
            {"image_of_caption": torch.tensor([0, 0, 1, 2, 2, 3, 3, 3])},
            "1 captions have another image, the first is caption 5 with image 2, and not 3",
        ),
        (
            {"image_of_caption": torch.tensor([0, 0, 1, 2, 2, 2, 3]), "captions": unit(7, 6)},
            "4 images with 8 captions, and 4 with 7",
        ),
        (
            {"image_of_caption": torch.tensor([0, 0, 1, 2, 2, 2, 3, 4]), "images": unit(5, 6)},
            "4 images with 8 captions, and 5 with 8",
        ),
    ],
)
def test_features_of_something_else(changes, message):
    with pytest.raises(UserError) as raised:
        features().matches(features(**{"image_ids": None, "caption_ids": None} | changes), "one.npz", "all")
    assert str(raised.value).startswith("one.npz and all do not belong together: ")
    assert message in str(raised.value)


def test_features_of_the_same():
    features().matches(features())
    features(image_ids=None).matches(features(caption_ids=None))


def test_repeated_ids_are_told_from_another_order():
    assert "with repetitions" in id_difference("image", [1, 1, 2], [1, 2, 1, 2], "it")
    assert id_difference("image", [1, 2], [1, 2], "it") is None


def test_similarities_of_vectors_and_sets():
    vectors = features()
    assert vectors.similarity() is None
    torch.testing.assert_close(vectors.similarities().tile(0, 0), vectors.images @ vectors.captions.T)
    described = {
        "similarity": "SmoothChamferSimilarity",
        "similarity_kwargs": {"alpha": 3.0, "backend": None},  # which version 0.2 wrote
    }
    sets = features(images=unit(4, 3, 6), captions=unit(8, 2, 6), description=described)
    expected = smooth_chamfer_similarity(sets.images, sets.captions, 3.0)
    torch.testing.assert_close(sets.similarities().tile(0, 0), expected)
    learned = {"similarity": "MatchProbability", "similarity_kwargs": {"scale": 3.0, "shift": -0.5}}
    found = dataclasses.replace(sets, description=learned).similarity()(sets.images, sets.captions)
    torch.testing.assert_close(found, match_probability(sets.images, sets.captions, 3.0, -0.5))
    assert not found.requires_grad
    for description in ({}, {"similarity": 3}):
        with pytest.raises(UserError, match="their description names no similarity"):
            features(images=unit(4, 3, 6), captions=unit(8, 2, 6), description=description).similarity()
    with pytest.raises(UserError, match="unknown distance"):
        features(images=unit(4, 3, 6), captions=unit(8, 2, 6), description={"similarity": "os.system"}).similarity()


def test_the_json_text_beside_the_tensors(tmp_path):
    save_features(features(image_ids=("a", "b", "c", "d")), tmp_path / "features.npz")
    with np.load(tmp_path / "features.npz") as arrays:
        text = json.loads(str(arrays["vl_plugins"]))
        assert arrays["caption_ids"].tolist() == list(range(101, 109))
    assert text == {"description": {"model": "vl-tiny", "shards": "toy-{00..03}.tar"}, "image_ids": list("abcd")}
