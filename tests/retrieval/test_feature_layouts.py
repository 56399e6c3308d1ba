"""Layouts of other programs are named in one line, and images that are repeated for their captions are joined."""

import warnings

import numpy as np
import pytest
import safetensors.torch
import torch

from tests.helpers.features import unit
from vl_plugins.cli import main
from vl_plugins.errors import InputWarning, UserError
from vl_plugins.retrieval import retrieval_metrics, similarity_ranks
from vl_plugins.retrieval.features import load_features

IMAGES = unit(100, 16).numpy()
OWNERS = np.arange(100).repeat(5)
CAPTIONS = torch.nn.functional.normalize(unit(100, 16)[OWNERS] + 2 * unit(500, 16, seed=1), dim=-1).numpy()
REPEATED = IMAGES[OWNERS]
SAVE = "save all in one file, numpy.savez('NAME.npz', image_features=..., caption_features=..., image_of_caption=...)"


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Function that writes arrays to ``a.npz`` and returns its name."""
    monkeypatch.chdir(tmp_path)

    def write(image_rows=None, caption_rows=None, owners=None, **others):
        arrays = {"image_features": image_rows, "caption_features": caption_rows, "image_of_caption": owners} | others
        np.savez("a.npz", **{name: array for name, array in arrays.items() if array is not None})
        return "a.npz"

    return write


def error_of(file, **options):
    with pytest.raises(UserError) as raised:
        load_features(file, **options)
    return str(raised.value)


def warnings_of(file, **options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_features(file, **options)
    assert all(warning.category is InputWarning and warning.filename == __file__ for warning in caught)
    return [str(warning.message) for warning in caught]


def rsum(features):
    return retrieval_metrics(similarity_ranks(features.similarities(), features.image_of_caption))["rsum"]


# Names.


@pytest.mark.parametrize(
    ("images", "captions"),
    [
        ("images", "texts"),
        ("image_embeds", "text_embeds"),
        ("image_embeddings", "text_embeddings"),
        ("img_embs", "cap_embs"),
        ("image_features", "text_features"),
        ("img_emb", "text_emb"),
        ("images", "captions"),
    ],
)
@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_names_of_other_programs(tmp_path, monkeypatch, suffix, images, captions):
    """transformers, VSE++, open_clip and clip-retrieval; the arrays are listed, and not taken without being named."""
    monkeypatch.chdir(tmp_path)
    arrays = {images: IMAGES, captions: CAPTIONS, "image_of_caption": OWNERS, "logit_scale": np.float32([100])}
    if suffix == ".npz":
        np.savez("a.npz", **arrays)
    else:
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
        safetensors.torch.save_file(tensors, "a.safetensors")
    shapes = {images: "(100, 16)", captions: "(500, 16)", "image_of_caption": "(500,)", "logit_scale": "(1,)"}
    listing = ", ".join(f"{name} {shapes[name]}" for name in sorted(shapes))
    missing, changes = "caption_features", f"rename {captions} to caption_features"
    if images != "image_features":
        missing, changes = "image_features, caption_features", f"rename {images} to image_features and {changes}"
    assert error_of(f"a{suffix}") == f"features a{suffix}: must have {missing}, got {listing}: {changes}"


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({}, f"must have image_features, caption_features, image_of_caption, got nothing: {SAVE}"),
        (
            {"image_features": IMAGES},
            f"must have caption_features, image_of_caption, got image_features (100, 16): {SAVE}",
        ),
        (
            {"x": IMAGES, "y": CAPTIONS, "image_of_caption": OWNERS},
            "must have image_features, caption_features, got image_of_caption (500,), x (100, 16), "
            f"y (500, 16): {SAVE}",
        ),
        (
            {"images": IMAGES, "image_embeds": IMAGES, "caption_features": CAPTIONS, "image_of_caption": OWNERS},
            "must have image_features, got caption_features (500, 16), image_embeds (100, 16), "
            "image_of_caption (500,), images (100, 16): rename one of image_embeds, images to image_features",
        ),
    ],
)
def test_arrays_that_are_missing(write, arrays, message):
    assert error_of(write(**arrays)) == f"features a.npz: {message}"


def test_folders_of_clip_retrieval(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("out/img_emb", "out/text_emb"):
        (tmp_path / name).mkdir(parents=True)
        np.save(f"{name}/{name[4:]}_0.npy", IMAGES)
    start = "features out: must have images/, captions/, image_of_caption.npy, got img_emb/, text_emb/: "
    assert error_of("out") == f"{start}rename img_emb/ to images/ and rename text_emb/ to captions/"
    (tmp_path / "out" / "img_emb").rename("out/images")
    (tmp_path / "out" / "text_emb").rename("out/captions")
    assert error_of("out") == (
        "features out: no image_of_caption.npy; 100 images and as many captions: "
        "if each image has one caption, in the order of images, save numpy.arange(100)"
    )


def test_arrays_that_are_not_in_parts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    for name, array in (("image_features", IMAGES), ("captions", CAPTIONS), ("image_of_caption", OWNERS)):
        np.save(f"out/{name}.npy", array)
    listing = "captions.npy (500, 16), image_features.npy (100, 16), image_of_caption.npy (500,)"
    changes = "move image_features.npy into images/ and move captions.npy into captions/"
    assert error_of("out") == f"features out: must have images/, captions/, got {listing}: {changes}"


# Without the image of each caption.


@pytest.mark.parametrize(
    ("images", "captions", "message"),
    [
        (REPEATED, CAPTIONS, "500 image rows, 100 different: is it one row per caption? use --image-per-caption"),
        (
            IMAGES,
            CAPTIONS,
            "500 captions are 5 times 100 images: if captions are in the order of images, "
            "save numpy.arange(100).repeat(5)",
        ),
        (
            IMAGES,
            CAPTIONS[:100],
            "100 images and as many captions: if each image has one caption, in the order of images, "
            "save numpy.arange(100)",
        ),
        (IMAGES, CAPTIONS[:499], "save the index of each caption's image, 499 integers from 0 to 99"),
    ],
)
def test_image_of_caption_is_missing(write, images, captions, message):
    assert error_of(write(images, captions)) == f"features a.npz: no image_of_caption; {message}"


# Images repeated for their captions.


def test_images_repeated_for_captions_become_one(write):
    """The numbers are those of the file with an image in one row, with and without image_of_caption = 0, 1, 2, ..."""
    expected = rsum(load_features(write(IMAGES, CAPTIONS, OWNERS)))
    assert 200 < expected < 500
    for owners in (None, np.arange(500)):
        loaded = load_features(write(REPEATED, CAPTIONS, owners), image_per_caption=True)
        np.testing.assert_array_equal(loaded.images.numpy(), IMAGES)
        assert loaded.image_of_caption.tolist() == OWNERS.tolist()
        assert rsum(loaded) == expected
        assert warnings_of("a.npz", image_per_caption=True) == []


@pytest.mark.parametrize("with_ids", [False, True])
def test_the_order_of_the_pairs_changes_nothing(write, with_ids):
    """Shuffled pairs, with images that have one to nine captions."""
    random = np.random.default_rng(1)
    owners = np.concatenate([np.arange(100), random.integers(0, 100, 400)])
    random.shuffle(owners)
    captions = CAPTIONS[np.argsort(owners, kind="stable").argsort()]
    expected = rsum(load_features(write(IMAGES, captions, owners)))
    ids = {"image_ids": np.array([f"i{owner}" for owner in owners])} if with_ids else {}
    file = write(IMAGES[owners], captions, **ids)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = load_features(file, image_per_caption=True)
    first = list(dict.fromkeys(owners.tolist()))
    np.testing.assert_array_equal(loaded.images.numpy(), IMAGES[first])
    assert [first[image] for image in loaded.image_of_caption] == owners.tolist()
    assert loaded.image_ids == ([f"i{owner}" for owner in first] if with_ids else None)
    assert rsum(loaded) == expected
    sizes = np.bincount(owners)
    note = (
        f"features a.npz: equal image rows became 100 images with {sizes.min()} to {sizes.max()} captions: if rows of "
        "one image differ in their last bits, or different images have equal rows, add image_ids"
    )
    assert warnings_of(file, image_per_caption=True) == ([] if with_ids else [note])


def test_ids_join_rows_that_differ_in_their_last_bits_and_part_equal_pictures(write):
    rows = REPEATED.copy()
    rows[1] = np.nextafter(rows[1], np.float32(2))
    rows[5:10] = rows[10:15]  # images 1 and 2 show the same
    loaded = load_features(write(rows, CAPTIONS, image_ids=OWNERS), image_per_caption=True)
    assert loaded.image_of_caption.tolist() == OWNERS.tolist()
    assert loaded.image_ids == list(range(100))
    write(rows, CAPTIONS)
    with pytest.warns(InputWarning, match="became 100 images with 1 to 10 captions"):  # one more, one less
        load_features("a.npz", image_per_caption=True)


def test_sets_and_half_precision_are_joined(write):
    sets = unit(20, 3, 8, dtype=torch.float16).numpy()
    captions = unit(40, 2, 8, dtype=torch.float16).numpy()
    loaded = load_features(write(np.repeat(sets, 2, axis=0), captions), image_per_caption=True)
    np.testing.assert_array_equal(loaded.images.numpy(), sets)


ALL_DIFFER = (
    "all 100 image rows differ, so that FLAG joins nothing: leave it out, or add image_ids if rows of one image differ "
    "in their last bits"
)


@pytest.mark.parametrize(
    ("images", "captions", "more", "message"),
    [
        (IMAGES, CAPTIONS, {}, "FLAG needs an image row for each caption, got 100 and 500"),
        (IMAGES, CAPTIONS[:100], {}, ALL_DIFFER),
        (
            REPEATED,
            CAPTIONS,
            {"image_ids": np.arange(500)},
            "all 500 image_ids differ, so that FLAG joins nothing: leave it out",
        ),
        (
            REPEATED,
            CAPTIONS,
            {"image_ids": np.arange(100)},
            "FLAG needs an id of each of the 500 image rows, got 100",
        ),
        (
            REPEATED,
            CAPTIONS,
            {"image_ids": np.arange(500) % 100},
            "image rows with id 0 differ: ids must tell images apart",
        ),
        (np.repeat(IMAGES[:1], 500, axis=0), CAPTIONS, {}, "all 500 image rows are equal: FLAG needs image_ids"),
    ],
)
def test_rows_that_cannot_be_joined(write, images, captions, more, message):
    file = write(images, captions, **more)
    message = message.replace("FLAG", "--image-per-caption")
    assert error_of(file, image_per_caption=True) == f"features a.npz: {message}"


def test_captions_in_a_row_for_each_image(write):
    file = write(IMAGES, CAPTIONS.reshape(100, 5, 16))
    assert error_of(file) == (
        "features a.npz: must have vectors or sets, got (100, 16) and (100, 5, 16): save the captions as "
        "array.reshape(-1, 16), and numpy.arange(100).repeat(5) as image_of_caption"
    )


def test_image_of_caption_may_be_that_of_repeated_rows(write):
    """As if they stood there once: an error without the flag, and with it the rows of one number are one image."""
    rows = REPEATED.copy()
    rows[1] = np.nextafter(rows[1], np.float32(2))
    cure = "is it one row per caption? use --image-per-caption"
    file = write(rows, CAPTIONS, OWNERS)
    assert error_of(file) == f"features a.npz: 500 image rows, of which image_of_caption names 100: {cure}"
    loaded = load_features(file, image_per_caption=True)
    np.testing.assert_array_equal(loaded.images.numpy(), IMAGES)
    assert loaded.image_of_caption.tolist() == OWNERS.tolist()
    write(rows, CAPTIONS, np.arange(500), image_ids=OWNERS)
    assert error_of(file) == f"features a.npz: 500 image rows, 100 different image_ids: {cure}"


def test_the_flag_leaves_files_alone_that_repeat_nothing(write):
    """One of two files that are compared may repeat its images."""
    loaded = load_features(write(IMAGES, CAPTIONS, OWNERS, image_ids=np.arange(100)), image_per_caption=True)
    np.testing.assert_array_equal(loaded.images.numpy(), IMAGES)
    assert loaded.image_ids == list(range(100))


def test_rows_that_hardly_differ_bring_a_warning(write):
    """The same picture in batches of other sizes differs in its last bits."""
    noise = np.random.default_rng(0).normal(size=REPEATED.shape)
    rows = (REPEATED + 1e-7 * noise).astype(np.float32)
    line = (
        "features a.npz: 400 of 500 image rows hardly differ from the row before: if images are repeated for their "
        "captions, add image_ids and use --image-per-caption"
    )
    assert warnings_of(write(rows, CAPTIONS, np.arange(500))) == [line]


# Pairs.


def test_repeated_images_given_as_pairs_are_evaluated_with_a_warning(write, capsys):
    file = write(REPEATED, CAPTIONS, np.arange(500))
    cure = "if images are repeated for their captions, use --image-per-caption"
    line = f"features a.npz: 500 image rows, 100 different, each with one caption: {cure}"
    assert warnings_of(file) == [line]
    assert main(["evaluate", "--features", file]) == 0
    printed = capsys.readouterr()
    assert printed.err == f"vl-plugins evaluate: warning: {line}\n"
    assert "500 images, 500 captions" in printed.out
    write(REPEATED, CAPTIONS, np.arange(500), image_ids=np.arange(500))
    cure = "give the rows of one image one id, and use --image-per-caption"
    assert warnings_of(file) == [line.partition(": if")[0] + f": if images are repeated for their captions, {cure}"]


def test_a_collapsed_model_with_several_captions_and_few_pictures_that_occur_twice_bring_no_warning(write):
    assert warnings_of(write(np.repeat(IMAGES[:1], 100, axis=0), CAPTIONS, OWNERS)) == []
    twice = IMAGES.copy()
    twice[:9] = twice[9:18]
    assert warnings_of(write(twice, CAPTIONS[:100], np.arange(100))) == []
