"""Files of features are read as numpy, safetensors and pyarrow wrote them, and damaged ones end in one line."""

import io
import json
import os
import pickle
import shutil
import tracemalloc
import zipfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.torch
import torch

from tests.helpers.features import features, unit
from vl_plugins.errors import UserError
from vl_plugins.retrieval.features import check_features_file, load_features, save_features

WRITTEN = (".npz", ".safetensors", "")
IMAGES, CAPTIONS = unit(4, 6).numpy(), unit(8, 6, seed=1).numpy()
OWNERS = np.arange(8) // 2
BOTH = {"image_features": IMAGES, "caption_features": CAPTIONS, "image_of_caption": OWNERS}


def error_of(file, **options):
    """Return the one line with which reading ends."""
    with pytest.raises(UserError) as raised:
        load_features(file, **options)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def error_or_none(file):
    try:
        load_features(file)
    except UserError as error:
        return str(error)
    return None


def write_npz(folder, name="bad.npz", **arrays):
    np.savez(folder / name, **arrays)
    return folder / name


def write_folder(folder, images=(IMAGES,), captions=(CAPTIONS,), owners=OWNERS, ids=None):
    """Write parts as the guide describes them, with numpy alone."""
    for name, parts in (("images", images), ("captions", captions)):
        (folder / name).mkdir(parents=True)
        for number, part in enumerate(parts):
            np.save(folder / name / f"part_{number}.npy", part)
    np.save(folder / "image_of_caption.npy", owners)
    if ids is not None:
        (folder / "ids.json").write_text(json.dumps(ids), encoding="utf-8")
    return folder


def write_parquet(file, **changes):
    """Write a row for each caption, with the image where it is new."""
    images = [None] * 8
    images[::2] = list(IMAGES)
    ids = [11, 11, 5, 5, 9, 9, 7, 7]
    columns = {"caption_features": list(CAPTIONS), "image_features": images, "image_id": ids} | changes
    pq.write_table(pa.table({name: column for name, column in columns.items() if column is not None}), file)
    return file


# What is written is read.


@pytest.mark.parametrize("suffix", WRITTEN)
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
    loaded, expected = vars(load_features(file)), dict(vars(saved))
    if saved.images.dtype == torch.bfloat16 and suffix != ".safetensors":  # NumPy has none
        expected |= {"images": saved.images.float(), "captions": saved.captions.float()}
    for name in ("images", "captions", "image_of_caption"):
        torch.testing.assert_close(loaded.pop(name), expected.pop(name), atol=0, rtol=0)
    assert loaded == expected
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_files_of_other_programs(tmp_path, suffix):
    """Ids as arrays, other types, and other things beside; no description."""
    arrays = BOTH | {"image_of_caption": np.uint8(OWNERS), "logit_scale": np.float32([100])}
    arrays["image_ids"] = np.array(["a", "b", "c", "d"]) if suffix == ".npz" else np.arange(4)
    file = tmp_path / f"features{suffix}"
    if suffix == ".npz":
        np.savez_compressed(file, captions_as_text=np.array(["a dog"], dtype=object), **arrays)
    else:
        safetensors.torch.save_file({name: torch.from_numpy(array) for name, array in arrays.items()}, file)
    loaded = load_features(file)
    assert (loaded.image_ids, loaded.caption_ids, loaded.description) == (arrays["image_ids"].tolist(), None, {})
    assert loaded.image_of_caption.tolist() == OWNERS.tolist()


TYPES = {
    "float16": np.float16,
    "float64": np.float64,
    "big-endian float32": ">f4",
    "big-endian float16": ">f2",
    "long double": np.longdouble,
}


@pytest.mark.parametrize("dtype", TYPES.values(), ids=TYPES)
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_of_each_type_and_order_are_read(tmp_path, dtype, order):
    images = np.asarray(IMAGES, dtype=dtype, order=order)
    captions = np.asarray(CAPTIONS, dtype=dtype, order=order)
    owners = OWNERS.astype(">u2")
    npz = write_npz(tmp_path, image_features=images, caption_features=captions, image_of_caption=owners)
    folder = write_folder(tmp_path / "folder", [images[:1], images[1:]], [captions], owners)
    for file in (npz, folder):
        loaded = load_features(file)
        np.testing.assert_array_equal(loaded.images.numpy(), IMAGES.astype(dtype))
        np.testing.assert_array_equal(loaded.captions.numpy(), CAPTIONS.astype(dtype))
        assert loaded.images.dtype == (torch.float64 if loaded.images.itemsize == 8 else loaded.captions.dtype)
        assert loaded.image_of_caption.tolist() == OWNERS.tolist()


def test_two_bytes_without_a_type_are_bfloat16(tmp_path):
    """ml_dtypes and JAX save bfloat16 in this way."""
    images, captions = unit(4, 6, dtype=torch.bfloat16), unit(8, 6, dtype=torch.bfloat16)
    arrays = [tensor.view(torch.int16).numpy().view("V2") for tensor in (images, captions)]
    npz = write_npz(tmp_path, image_features=arrays[0], caption_features=arrays[1], image_of_caption=OWNERS)
    for file in (npz, write_folder(tmp_path / "folder", arrays[:1], arrays[1:])):
        loaded = load_features(file)
        assert torch.equal(loaded.images, images)
        assert torch.equal(loaded.captions, captions)


def test_normalize(tmp_path):
    lengths = np.float32([0.1, 1, 2, 50])[:, None]
    long = write_npz(tmp_path, "long.npz", **BOTH | {"image_features": lengths * IMAGES})
    assert "3 of 4 images" in error_of(long)
    torch.testing.assert_close(load_features(long, normalize=True).images, unit(4, 6))
    for length in (1e25, 1e-25):  # whose squares float32 does not have
        file = write_npz(tmp_path, "far.npz", **BOTH | {"image_features": (length * IMAGES).astype(np.float32)})
        torch.testing.assert_close(load_features(file, normalize=True).images, unit(4, 6))
    sets = unit(4, 2, 6)
    sets[2, 1] = 0
    arrays = {"image_features": lengths[..., None] * sets.numpy(), "caption_features": unit(8, 2, 6).numpy()}
    file = write_npz(tmp_path, "sets.npz", **BOTH | arrays)
    torch.testing.assert_close(load_features(file, normalize=True).images, sets)


# Folders.


def test_parts_are_joined_in_the_order_of_their_numbers(tmp_path):
    """Twelve parts: part_2 stands before part_10. An empty part and a hidden file do no harm."""
    images = unit(12, 6).numpy()
    parts = np.split(images, 12)
    parts.insert(5, images[:0])
    folder = write_folder(tmp_path / "f", parts, [CAPTIONS, unit(4, 6, seed=2).numpy()], np.arange(12))
    (folder / "images" / ".DS_Store").write_bytes(b"")
    (folder / "notes.txt").write_text("ViT-B/32", encoding="utf-8")
    loaded = load_features(folder)
    np.testing.assert_array_equal(loaded.images.numpy(), images)
    np.testing.assert_array_equal(loaded.captions.numpy()[8:], unit(4, 6, seed=2).numpy())


def test_ids_and_description_of_a_folder(tmp_path):
    values = {"image_ids": [3, "b", 5, 6], "description": {"model": "ViT"}}
    loaded = load_features(write_folder(tmp_path / "f", ids=values))
    assert (loaded.image_ids, loaded.caption_ids, loaded.description) == ([3, "b", 5, 6], None, {"model": "ViT"})


def test_a_folder_is_copied_once(tmp_path):
    """NumPy tells tracemalloc what it allocates; a second copy of the images would be 10 MB more."""
    images = unit(5000, 512).numpy()
    folder = write_folder(tmp_path / "f", np.array_split(images, 3), [images], np.arange(5000))
    tracemalloc.start()
    loaded = load_features(folder)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2 * images.nbytes + 2**21  # images and captions
    np.testing.assert_array_equal(loaded.images.numpy(), images)


def test_large_arrays_are_written_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr("vl_plugins.retrieval.feature_folders.PART_BYTES", 3 * 6 * 4)
    save_features(features(), tmp_path / "out")
    names = sorted(path.name for path in (tmp_path / "out" / "captions").iterdir())
    assert names == ["part_000000.npy", "part_000001.npy", "part_000002.npy"]
    assert torch.equal(load_features(tmp_path / "out").captions, features().captions)


def test_a_folder_of_features_is_replaced_and_no_other(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    save_features(features(), out)  # an empty one
    save_features(features(images=unit(4, 6, seed=3)), out)
    assert torch.equal(load_features(out).images, unit(4, 6, seed=3))
    assert os.listdir(tmp_path) == ["out"]
    (out / "images" / "mine.txt").write_text("", encoding="utf-8")
    message = f"{out} is a folder with something else (images): choose another name"
    for write in (check_features_file, lambda file: save_features(features(), file)):
        with pytest.raises(UserError) as raised:
            write(out)
        assert str(raised.value) == message
    assert torch.equal(torch.from_numpy(np.load(out / "images" / "part_000000.npy")), unit(4, 6, seed=3))


def test_a_folder_that_cannot_be_completed_is_not_left(tmp_path, monkeypatch):
    save_features(features(), tmp_path / "out")

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", fail)
    with pytest.raises(UserError, match=r"^cannot write .*part_000000\.npy: No space left on device$"):
        save_features(features(images=unit(4, 6, seed=3)), tmp_path / "out")
    assert os.listdir(tmp_path) == ["out"]
    assert torch.equal(load_features(tmp_path / "out").images, features().images)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "out.pt",
            "a file of features must end in .safetensors or .npz, got out.pt; a name without an ending is a folder",
        ),
        (
            "table.parquet",
            "a file of features must end in .safetensors or .npz, got table.parquet; a name without an "
            "ending is a folder",
        ),
        ("file", "file is a file, and a folder of features would replace it: choose another name"),
        (
            "s3://bucket/out",
            "a folder of features must be on a disk, got s3://bucket/out; .safetensors and .npz may be elsewhere",
        ),
    ],
)
def test_names_to_which_nothing_can_be_written(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(UserError) as raised:
        check_features_file(name)
    assert str(raised.value) == message


def links(folder, name, target):
    (folder / name).unlink() if (folder / name).is_file() else shutil.rmtree(folder / name)
    (folder / name).symlink_to(target)


@pytest.mark.parametrize("name", ["images/part_0.npy", "captions", "image_of_caption.npy", "ids.json"])
def test_links_that_lead_out_of_a_folder_are_not_followed(tmp_path, name):
    folder = write_folder(tmp_path / "f", ids={})
    shutil.copytree(folder, tmp_path / "secret")
    links(folder, name, tmp_path / "secret" / name)
    assert error_of(folder) == f"features {folder}: {name} leads out of the folder: copy it there"


def test_links_inside_a_folder_are_followed(tmp_path):
    folder = write_folder(tmp_path / "f", [IMAGES[:2], IMAGES[2:]])
    links(folder, "images/part_1.npy", "part_0.npy")
    (tmp_path / "link").symlink_to(folder)
    np.testing.assert_array_equal(load_features(tmp_path / "link").images.numpy(), np.tile(IMAGES[:2], (2, 1)))


def npy(array, **options):
    stream = io.BytesIO()
    np.save(stream, array, **options)
    return stream.getvalue()


class Exploit:
    def __reduce__(self):
        return (open, ("executed", "w"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("images/a.txt", b"", "images/ must have .npy files only, got a.txt"),
        (
            "images/part_1.npy",
            npy(IMAGES[:, :5]),
            "images/part_1.npy has shape (4, 5) of float32, unlike part_0.npy: (4, 6) of float32",
        ),
        (
            "images/part_1.npy",
            npy(IMAGES.astype("f2")),
            "images/part_1.npy has shape (4, 6) of float16, unlike part_0.npy: (4, 6) of float32",
        ),
        (
            "captions/part_0.npy",
            npy(CAPTIONS[0]),
            "captions/part_0.npy must have rows (N, D) or sets (N, K, D), got (6,)",
        ),
        (
            "captions/part_0.npy",
            npy(CAPTIONS)[:-8],
            "captions/part_0.npy has 312 bytes where its header declares 320: is it truncated?",
        ),
        ("captions/part_0.npy", b"", "captions/part_0.npy is not an array of NumPy, or its header is damaged"),
        (
            "captions/part_0.npy",
            pickle.dumps(Exploit()),
            "captions/part_0.npy is not an array of NumPy, or its header is damaged",
        ),
        (
            "captions/part_0.npy",
            npy(np.array([[Exploit()]]), allow_pickle=True),
            "captions/part_0.npy has Python objects, which are not read because they can run code: save "
            "numbers, or strings as array.astype(str)",
        ),
        (
            "image_of_caption.npy",
            npy(OWNERS.astype("f4")),
            "must have integers as image_of_caption, got torch.float32: save array.astype(int)",
        ),
        (
            "image_of_caption.npy",
            npy(OWNERS.astype("U1")),
            "image_of_caption.npy must have real numbers, got an array of type <U1",
        ),
        ("ids.json", b"[1, 2]", "ids.json must be a JSON object"),
        ("ids.json", b'{"image_ids": "abcd"}', "must have a list as image_ids"),
        ("ids.json", b'{"image_ids": [1, 2]}', "must have an id of each of the 4 images"),
    ],
)
def test_folders_that_are_wrong(tmp_path, monkeypatch, name, content, message):
    monkeypatch.chdir(tmp_path)
    write_folder(tmp_path / "f")
    (tmp_path / "f" / name).write_bytes(content)
    assert error_of("f") == f"features f: {message}"
    assert not (tmp_path / "executed").exists()


def test_a_side_without_parts(tmp_path):
    folder = write_folder(tmp_path / "f", images=())
    assert error_of(folder) == f"features {folder}: images/ has no .npy files"


def test_a_pipe_in_a_folder_is_not_waited_for(tmp_path):
    folder = write_folder(tmp_path / "f")
    os.mkfifo(folder / "images" / "part_1.npy")
    assert error_of(folder) == f"features {folder}: images/part_1.npy is no file"


# .npz and .safetensors.


def npz(**arrays):
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return stream.getvalue()


def npz_with(name, content):
    """Return an archive in which one member has other bytes."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for member, array in BOTH.items():
            archive.writestr(f"{member}.npy", content if member == name else npy(array))
    return stream.getvalue()


def npz_with_text(text, **arrays):
    return npz(**BOTH, **arrays, vl_plugins=np.array(text))


OBJECTS = "which are not read because they can run code: save numbers, or strings as array.astype(str)"
HUGE = npy(IMAGES).replace(b"(4, 6), }        ", b"(4000000000, 6), }"[:17])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pickle.dumps(Exploit()), "it is cut off or empty, or no .npz: "),
        (npy(IMAGES), "it is cut off or empty, or no .npz: "),
        (
            npz(**BOTH | {"image_features": np.array([Exploit()], dtype=object)}),
            f"image_features has Python objects, {OBJECTS}",
        ),
        (npz(**BOTH, image_ids=np.array(["a", "b"], dtype=object)), f"image_ids has Python objects, {OBJECTS}"),
        (
            npz(**BOTH | {"image_features": np.array(["a"])}),
            "image_features must have real numbers, got an array of type <U1",
        ),
        (
            npz(**BOTH | {"image_features": IMAGES.astype(complex)}),
            "image_features must have real numbers, got an array of type complex128",
        ),
        (npz(**BOTH | {"image_features": np.ones((4, 6), int)}), "must have floating-point images, got torch.int64"),
        (
            npz(**BOTH | {"caption_features": CAPTIONS[:, :5]}),
            "must have images and captions of one width, got (4, 6) and (8, 5)",
        ),
        (npz(**BOTH | {"caption_features": CAPTIONS[0]}), "must have vectors or sets, got (4, 6) and (6,)"),
        (npz(**BOTH | {"caption_features": np.float32(1)}), "must have vectors or sets, got (4, 6) and (1,)"),
        (
            npz(**BOTH | {"image_of_caption": np.arange(8.0)}),
            "must have integers as image_of_caption, got torch.float64",
        ),
        (npz(**BOTH, image_ids=np.arange(3)), "must have an id of each of the 4 images"),
        (
            npz_with_text('{"image_ids": [0, 1, 3, 2]}', image_ids=np.arange(4)),
            "must have one list of image_ids, got two that differ",
        ),
        (npz_with_text("[1]"), "must have a JSON object as vl_plugins, got [1]"),
        (
            npz_with_text("[1"),
            "Expecting ',' delimiter: line 1 column 3 (char 2); set VL_PLUGINS_TRACEBACK=1 for the traceback",
        ),
        (
            npz_with_text('{"description": {"lr": 1e999}}'),
            "must have a description of JSON values without NaN and infinity: ",
        ),
        (
            npz_with("image_features", npy(IMAGES)[:-1]),
            "image_features has 223 bytes where its header declares 224: is it truncated?",
        ),
        (npz_with("image_features", b"junk"), "image_features is not an array of NumPy, or its header is damaged"),
    ],
)
def test_archives_that_are_wrong(tmp_path, monkeypatch, content, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.npz").write_bytes(content)
    line = error_of("bad.npz")
    assert line.startswith(f"features bad.npz: {message}")
    assert not (tmp_path / "executed").exists()


def test_a_header_that_declares_more_than_the_file_has(tmp_path):
    """96 GB in a header, in an archive and in a folder; nothing of this size is allocated."""
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "<f4", "fortran_order": False, "shape": (4_000_000_000, 6)})
    huge = stream.getvalue() + bytes(96)
    (tmp_path / "bad.npz").write_bytes(npz_with("image_features", huge))
    folder = write_folder(tmp_path / "f")
    (folder / "images" / "part_0.npy").write_bytes(huge)
    for file, name in ((tmp_path / "bad.npz", "image_features"), (folder, "images/part_0.npy")):
        message = f"{name} has 224 bytes where its header declares 96,000,000,128: is it truncated?"
        assert error_of(file) == f"features {file}: {message}"


def test_an_archive_that_is_compressed_a_thousand_times(tmp_path):
    arrays = BOTH | {"image_features": np.zeros((100_000, 6), np.float32)}
    np.savez_compressed(tmp_path / "bomb.npz", **arrays)
    assert error_of(tmp_path / "bomb.npz").endswith("bytes, compressed more than 100 times")


def test_a_pickle_that_is_named_safetensors(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.safetensors").write_bytes(pickle.dumps(Exploit()))
    assert error_of("bad.safetensors").startswith("features bad.safetensors: ")
    assert not (tmp_path / "executed").exists()


SAVE = "image_features=..., caption_features=..., image_of_caption=...)"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a.npy", f"is one array, and images and captions are needed: numpy.savez('a.npz', {SAVE}"),
        (
            "a.pt",
            f"is not read, because .pt files can run code: load it where you trust it, then "
            f"numpy.savez('a.npz', {SAVE}",
        ),
        (
            "a.PKL",
            f"is not read, because .pkl files can run code: load it where you trust it, then "
            f"numpy.savez('a.npz', {SAVE}",
        ),
        ("a.csv", "must be a folder or end in .safetensors, .npz or .parquet"),
        ("a", "must be a folder or end in .safetensors, .npz or .parquet"),
        ("missing", "there is no such folder"),
    ],
)
def test_files_of_other_kinds(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    if name != "missing":
        (tmp_path / name).write_bytes(b"")
    assert error_of(name) == f"features {name}: {message}"


@pytest.mark.parametrize("name", ["no.npz", "no.safetensors", "no.parquet"])
def test_files_that_do_not_exist(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=name):
        load_features(name)


# Parquet.

VECTORS = {
    "list": pa.list_(pa.float32()),
    "large list": pa.large_list(pa.float32()),
    "fixed-size list": pa.list_(pa.float32(), 6),
}


@pytest.mark.parametrize("kind", VECTORS)
def test_parquet(tmp_path, kind):
    captions = pa.array(list(CAPTIONS), VECTORS[kind])
    images = pa.array([row for row in IMAGES for _ in range(2)], VECTORS[kind])
    every = load_features(write_parquet(tmp_path / "a.parquet", caption_features=captions, image_features=images))
    nulls = pa.array([None if number % 2 else row for number, row in enumerate(images.to_pylist())], VECTORS[kind])
    try:
        file = write_parquet(tmp_path / "b.parquet", caption_features=captions, image_features=nulls)
    except pa.ArrowNotImplementedError:
        pytest.skip("this version of pyarrow does not write null among lists of a fixed size")
    first = load_features(file)
    for loaded in (every, first):
        np.testing.assert_array_equal(loaded.images.numpy(), IMAGES)
        np.testing.assert_array_equal(loaded.captions.numpy(), CAPTIONS)
        assert (loaded.image_ids, loaded.caption_ids) == ([11, 5, 9, 7], None)
        assert loaded.image_of_caption.tolist() == OWNERS.tolist()


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_types_of_parquet(tmp_path, dtype):
    kind = pa.list_(pa.float16() if dtype == "float16" else pa.float64())
    captions, images = CAPTIONS.astype(dtype), np.repeat(IMAGES, 2, axis=0).astype(dtype)
    file = write_parquet(
        tmp_path / "a.parquet",
        caption_features=pa.array(list(captions), kind),
        image_features=pa.array(list(images), kind),
    )
    loaded = load_features(file)
    np.testing.assert_array_equal(loaded.images.numpy(), IMAGES.astype(dtype))
    np.testing.assert_array_equal(loaded.captions.numpy(), captions)


def test_rows_of_parquet_in_any_order_and_several_batches(tmp_path):
    """3,000 captions of 700 images, shuffled; the image stands in the last of its rows only."""
    random = np.random.default_rng(0)
    images, captions = unit(700, 8).numpy(), unit(3000, 8, seed=1).numpy()
    owners = np.concatenate([np.arange(700), random.integers(0, 700, 2300)])
    random.shuffle(owners)
    last = {owner: row for row, owner in enumerate(owners.tolist())}
    columns = {
        "caption_id": pa.array([f"c{row}" for row in range(3000)]).dictionary_encode(),
        "image_id": [f"image {owner}" for owner in owners],
        "image_features": [images[owner] if last[owner] == row else None for row, owner in enumerate(owners.tolist())],
        "caption_features": list(captions),
        "text": ["a dog"] * 3000,
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet", row_group_size=900)
    loaded = load_features(tmp_path / "a.parquet")
    np.testing.assert_array_equal(loaded.captions.numpy(), captions)
    np.testing.assert_array_equal(loaded.images.numpy()[loaded.image_of_caption.numpy()], images[owners])
    assert [loaded.image_ids[image] for image in loaded.image_of_caption] == columns["image_id"]
    assert loaded.image_ids == list(dict.fromkeys(columns["image_id"]))
    assert loaded.caption_ids == [f"c{row}" for row in range(3000)]


def images_with(row, value):
    rows = list(np.repeat(IMAGES, 2, axis=0))
    rows[row] = value
    return rows


WIDTH = "must have one length, that of all vectors, got"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_id": None}, "must have image_id, the image of each caption, got caption_features, image_features"),
        (
            {"image_features": None, "image_embeddings": list(CAPTIONS)},
            "must have image_features, got caption_features list<element: float>, image_embeddings "
            "list<element: float>, image_id int64: rename image_embeddings to image_features",
        ),
        ({"image_features": images_with(1, IMAGES[1])}, "image rows with id 11 differ: ids must tell images apart"),
        ({"image_features": pa.nulls(8, pa.list_(pa.float32()))}, "image_id 11 has image_features in none of its rows"),
        ({"caption_features": [None, *CAPTIONS[1:]]}, "row 0 has no caption_features"),
        ({"caption_features": [*CAPTIONS[1:], [None] * 6]}, "caption_features has lists with null among their numbers"),
        ({"caption_features": [*CAPTIONS[1:], [1.0]]}, f"caption_features {WIDTH} 6 and 1"),
        ({"image_features": [[1.0]] * 8}, f"image_features {WIDTH} 6 and 1"),
        ({"caption_features": [[1]] * 8}, "caption_features must be lists of floats, got list<element: int64>"),
        ({"caption_features": [1.0] * 8}, "caption_features must be lists of floats, got double"),
        ({"image_id": [1.0] * 8}, "image_id must be integers or strings, got 1.0 in row 0"),
        (
            {"image_id": [1, None] * 4, "image_features": [IMAGES[0]] * 8},
            "image_id must be integers or strings, got None in row 1",
        ),
        ({"caption_id": [b"a"] * 8}, "must have caption ids that are integers or strings, got {<class 'bytes'>}"),
    ],
)
def test_tables_that_are_wrong(tmp_path, monkeypatch, changes, message):
    monkeypatch.chdir(tmp_path)
    write_parquet("bad.parquet", **changes)
    assert error_of("bad.parquet") == f"features bad.parquet: {message}"


def test_an_empty_table(tmp_path):
    vectors = pa.array([], pa.list_(pa.float32()))
    columns = {"caption_features": vectors, "image_features": vectors, "image_id": pa.array([], pa.int64())}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    assert error_of(tmp_path / "a.parquet") == f"features {tmp_path}/a.parquet: has no rows"


def test_a_table_that_repeats_one_value_a_million_times(tmp_path):
    vector = pa.array([np.zeros(1000, np.float32)] * 2000)
    pq.write_table(
        pa.table({"caption_features": vector, "image_features": vector, "image_id": [1] * 2000}), tmp_path / "a.parquet"
    )
    assert error_of(tmp_path / "a.parquet").endswith("bytes, compressed more than 100 times")


# Damaged bytes.


@pytest.mark.parametrize("kind", ["npz", "safetensors", "parquet", "part", "owners", "ids"])
def test_truncated_files_end_in_one_line(tmp_path, kind):
    """At each of 40 lengths, and with each of 40 bytes changed, which may be a number."""
    folder = tmp_path / "f"
    save_features(features(), folder)
    file = {"part": folder / "images" / "part_000000.npy", "owners": folder / "image_of_caption.npy"}.get(kind)
    if kind == "ids":
        file = folder / "ids.json"
    elif kind == "parquet":
        file = write_parquet(tmp_path / "a.parquet")
    elif file is None:
        file = tmp_path / f"a.{kind}"
        save_features(features(), file)
    subject = folder if folder in file.parents else file
    content = file.read_bytes()
    for length in np.linspace(0, len(content) - 1, 40).astype(int).tolist():
        file.write_bytes(content[:length])
        assert error_of(subject).startswith(f"features {subject}: ")
    for place in np.linspace(0, len(content) - 1, 40).astype(int).tolist():
        changed = bytearray(content)
        changed[place] ^= 0xFF
        file.write_bytes(changed)
        line = error_or_none(subject)
        assert line is None or line.startswith(f"features {subject}: ")
