import io
import pickle

import numpy as np
import pytest
import safetensors.torch
import torch

from vl_plugins.errors import UserError
from vl_plugins.retrieval.features import Features, load_features, save_features

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
        "image_ids": [11, 5, 9, 7],
        "caption_ids": [101, 102, 103, 104, 105, 106, 107, 108],
        "description": {"model": "vl-tiny", "shards": "toy-{00..03}.tar"},
    }
    return Features(**fields | changes)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize(
    "changes",
    [
        {"image_ids": ["a", 1, 1 << 70, "ü,\n"], "caption_ids": None},
        {"images": unit(4, 3, 6), "captions": unit(8, 2, 6), "description": {"similarity": "mil"}},
        {"images": unit(4, 6, dtype=torch.float16), "captions": unit(8, 6, dtype=torch.float64)},
        {"images": unit(4, 6, dtype=torch.bfloat16), "captions": unit(8, 6, dtype=torch.bfloat16)},
    ],
    ids=["ids", "sets", "types", "bfloat16"],
)
def test_what_is_saved_is_loaded(tmp_path, suffix, changes):
    saved, file = features(**changes), tmp_path / f"features{suffix}"
    save_features(saved, file)
    found, wanted = vars(load_features(file)), dict(vars(saved))
    if saved.images.dtype == torch.bfloat16 and suffix == ".npz":  # which has none
        wanted |= {"images": saved.images.float(), "captions": saved.captions.float()}
    for name in ("images", "captions", "image_of_caption"):
        torch.testing.assert_close(found.pop(name), wanted.pop(name), atol=0, rtol=0)
    assert found == wanted
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


IMAGES, CAPTIONS = unit(4, 6).numpy(), unit(8, 6).numpy()
BOTH = {"image_features": IMAGES, "caption_features": CAPTIONS, "image_of_caption": np.arange(8) // 2}


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_files_of_other_programs(tmp_path, suffix):
    """Ids as arrays, other types, and other things beside; no description."""
    arrays = BOTH | {"image_of_caption": np.uint8(np.arange(8) // 2), "logit_scale": np.float32([100])}
    arrays["image_ids"] = np.array(["a", "b", "c", "d"]) if suffix == ".npz" else np.arange(4)
    file = tmp_path / f"features{suffix}"
    if suffix == ".npz":
        np.savez_compressed(file, **arrays)
    else:
        safetensors.torch.save_file({name: torch.from_numpy(array) for name, array in arrays.items()}, file)
    found = load_features(file)
    assert (found.image_ids, found.caption_ids, found.description) == (arrays["image_ids"].tolist(), None, {})
    assert torch.equal(found.image_of_caption, torch.arange(8) // 2)


class Exploit:
    def __reduce__(self):
        return (open, ("executed", "w"))


def npz(**arrays):
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()


def described(text, **arrays):
    return npz(**BOTH, **arrays, vl_plugins=np.array(text))


NOT_READ = "set VL_PLUGINS_TRACEBACK=1"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps(Exploit()), NOT_READ),
        (npz(**BOTH | {"image_features": np.array([Exploit()], dtype=object)}), NOT_READ),
        (npz(image_features=IMAGES), "caption_features, image_of_caption, got image_features"),
        (npz(**BOTH | {"image_features": np.array(["a"])}), "image_features must have real numbers, got an array of type <U1"),
        (npz(**BOTH | {"caption_features": CAPTIONS[:, :5]}), "one width, got (4, 6) and (8, 5)"),
        (npz(**BOTH | {"image_of_caption": np.arange(8.0)}), "integers as image_of_caption"),
        (npz(**BOTH, image_ids=np.arange(3)), "an id of each of the 4 images"),
        (described('{"image_ids": [0, 1, 3, 2]}', image_ids=np.arange(4)), "one list of image_ids, got two"),
        (described("[1"), "Expecting"),
        (described('{"description": {"lr": 1e999}}'), "without NaN and infinity"),
    ],
)
def test_files_that_are_wrong(tmp_path, monkeypatch, content, message):
    monkeypatch.chdir(tmp_path)
    for suffix in SUFFIXES if message == NOT_READ else (".npz",):
        (tmp_path / f"bad{suffix}").write_bytes(content)
        with pytest.raises(UserError) as raised:
            load_features(f"bad{suffix}")
        assert str(raised.value).startswith(f"features bad{suffix}: ")
        assert message in str(raised.value)
    assert not (tmp_path / "executed").exists()
    with pytest.raises(UserError, match=r"must end in \.safetensors or \.npz, got .*\.pt"):
        save_features(features(), tmp_path / "features.pt")


def with_rows(rows, value):
    return unit(8, 6).index_fill(0, torch.tensor(rows), value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"captions": with_rows([3, 5], torch.nan)}, r"2 of 8 captions .* row 3 \(id 104\) of norm nan"),
        ({"captions": with_rows([7], torch.inf)}, r"1 of 8 captions .* row 7 \(id 108\) of norm inf"),
        ({"captions": with_rows([0, 1], 0)}, r"2 of 8 captions .* row 0 \(id 101\) of norm 0;"),
        ({"images": 1.02 * unit(4, 6), "image_ids": None}, "4 of 4 images .* the first is row 0 of norm 1.02"),
        ({"images": unit(4, 2, 6) * torch.tensor([[1.0], [2.0]]), "captions": unit(8, 2, 6)}, "4 of 4 images"),
        ({"images": 0 * unit(4, 2, 6), "captions": unit(8, 2, 6)}, "4 of 4 images"),
        ({"captions": unit(8, 1, 6)}, r"vectors or sets, got \(4, 6\) and \(8, 1, 6\)"),
        ({"images": torch.ones(4, 6, dtype=torch.int64)}, "floating-point images, got torch.int64"),
        ({"image_of_caption": torch.arange(8, dtype=torch.int32) // 2}, "an int64 image of each caption"),
        ({"image_of_caption": torch.arange(7) % 4}, "an int64 image of each caption"),
        *(({"image_of_caption": torch.arange(8) % 5 - k}, r"image_of_caption in \[0, 4\)") for k in (0, 1)),
        ({"image_of_caption": torch.arange(8) % 3}, "a caption of every image"),
        ({"images": unit(0, 6), "captions": unit(0, 6), "image_of_caption": torch.arange(0)}, r"in \[0, 0\)"),
        ({"caption_ids": [1.0] * 8}, "caption ids that are integers or strings"),
        ({"description": ["vit"]}, "a description that is a dictionary"),
        ({"description": {"alpha": [torch.nan]}}, "without NaN and infinity"),
        ({"description": {"model": unit}}, "JSON values .* function"),
    ],
)
def test_features_that_cannot_be_compared(changes, message):
    with pytest.raises(UserError, match=message):
        features(**changes)


def test_normalize(tmp_path):
    lengths = np.float32([0.1, 1, 2, 50])[:, None]
    np.savez(tmp_path / "long.npz", **BOTH | {"image_features": lengths * IMAGES})
    with pytest.raises(UserError, match="3 of 4 images"):
        load_features(tmp_path / "long.npz")
    torch.testing.assert_close(load_features(tmp_path / "long.npz", normalize=True).images, unit(4, 6))
    sets = unit(4, 2, 6)
    sets[2, 1] = 0
    long = {"image_features": lengths[..., None] * sets.numpy(), "caption_features": unit(8, 2, 6).numpy()}
    np.savez(tmp_path / "sets.npz", **BOTH | long)
    torch.testing.assert_close(load_features(tmp_path / "sets.npz", normalize=True).images, sets)


def test_select():
    found = features().select(torch.tensor([0, 2, 3]), torch.tensor([1, 3, 5, 7]))
    assert (found.image_ids, found.caption_ids) == ([11, 9, 7], [102, 104, 106, 108])
    assert found.image_of_caption.tolist() == [0, 1, 1, 2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_ids": [5, 11, 9, 7]}, "image_ids: number 0 of 4 is 11, expected 5"),
        ({"caption_ids": [*range(101, 108), 1]}, "caption_ids: number 7 of 8 is 108, expected 1"),
        ({"image_of_caption": torch.arange(7) % 4, "captions": unit(7, 6)}, "there are 8, expected 7"),
    ],
)
def test_features_of_something_else(changes, message):
    features().check_same_items(features(image_ids=(11, 5, 9, 7), caption_ids=None), "one.npz", "all")
    other = features(**{"image_ids": None, "caption_ids": None} | changes)
    with pytest.raises(UserError, match=f"one.npz and all do not belong together: .*{message}"):
        features().check_same_items(other, "one.npz", "all")


@pytest.mark.parametrize(("name", "message"), [(None, "distance must be a name"), ("os.system", "unknown distance")])
def test_sets_of_an_unknown_similarity(name, message):
    sets = features(images=unit(4, 3, 6), captions=unit(8, 2, 6), description={"similarity": name})
    with pytest.raises(UserError, match=message):
        sets.similarities()
