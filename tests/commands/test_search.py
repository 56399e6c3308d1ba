import io
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import open_clip
import pytest
import torch
from PIL import Image

from tests.reference import sets as reference_sets
from vl_plugins.cli import main
from vl_plugins.data import contact_sheet
from vl_plugins.data.annotations import read_karpathy
from vl_plugins.data.shards import write_shards
from vl_plugins.distances import SmoothChamferSimilarity
from vl_plugins.integrations import checkpoints as checkpoints_module
from vl_plugins.integrations import encoding
from vl_plugins.integrations.checkpoints import load_model
from vl_plugins.integrations.open_clip.heads import CLIPWithHeads
from vl_plugins.integrations.open_clip.models import register_models
from vl_plugins.retrieval.features import load_features, save_features
from vl_plugins.retrieval.search import FaissIndex

TEXT = "a red circle above a blue square"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Three files of a training run: two of vl-tiny, and one of vl-tiny with a head of sets."""
    register_models()
    folder = tmp_path_factory.mktemp("run")
    for name, seed in (("one", 0), ("two", 1)):
        torch.manual_seed(seed)
        torch.save({"state_dict": open_clip.create_model("vl-tiny").state_dict()}, folder / f"{name}.pt")
    clip, _, _ = open_clip.create_model_and_transforms("vl-tiny", output_dict=True)
    options = {"num_slots": 2, "num_iters": 2, "hidden_dim": 16}
    model = CLIPWithHeads(clip, "vl-tiny", {}, "set", options, SmoothChamferSimilarity(alpha=9.0))
    torch.save({"state_dict": model.state_dict()}, folder / "sets.pt")
    return folder


@pytest.fixture(scope="module")
def scenes(toy_shards):
    """What the shards hold, read with nothing but tarfile: key -> (file of the picture, captions, ids)."""
    scenes = {}
    for number in range(3):
        with tarfile.open(toy_shards / f"toy-val-{number:06d}.tar") as tar:
            files = {member.name: tar.extractfile(member).read() for member in tar}
        for name in files:
            if name.endswith(".json"):
                record = json.loads(files[name])
                key = name.removesuffix(".json")
                scenes[key] = files[f"{key}.png"], record["captions"], record["image_id"], record["caption_ids"]
    assert len(scenes) == 24
    return scenes


@pytest.fixture(scope="module")
def encoded(checkpoints, scenes):
    """The model "one", and its embeddings of each picture and caption, encoded one by one."""
    model, _, transform = open_clip.create_model_and_transforms("vl-tiny", pretrained=str(checkpoints / "one.pt"))
    tokenizer = open_clip.get_tokenizer("vl-tiny")
    model.eval()

    def encode_text(text):
        with torch.no_grad():
            return model.encode_text(tokenizer([text]), normalize=True)[0]

    def encode_image(data):
        with torch.no_grad():
            return model.encode_image(transform(Image.open(io.BytesIO(data)))[None], normalize=True)[0]

    images = {key: encode_image(picture) for key, (picture, *_) in scenes.items()}
    captions = {
        identity: (key, caption, encode_text(caption))
        for key, (_, texts, _, identities) in scenes.items()
        for identity, caption in zip(identities, texts, strict=True)
    }
    assert len(captions) == 120
    return encode_text, images, captions


@pytest.fixture(scope="module")
def load_model_once():
    """Loading takes longer than all the rest."""
    models = {}

    def load_model(checkpoint, model=None, **options):
        file = Path(checkpoint)
        key = checkpoint, file.stat() if file.is_file() else None, model, *sorted(options.items())
        if key not in models:
            models[key] = load(checkpoint, model, **options)
        return models[key]

    load = checkpoints_module.load_model
    return load_model


@pytest.fixture
def search(checkpoints, toy_shards, load_model_once, tmp_path, monkeypatch, capsys):
    """Run ``vl-plugins search`` in an empty folder; return its status, output and errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checkpoints_module, "load_model", load_model_once)

    def search(*flags, checkpoint="one", shards=f"{toy_shards}/toy-val-{{000000..000002}}.tar", text=TEXT):
        arguments = ["search", "--checkpoint", f"{checkpoints}/{checkpoint}.pt", "--shards", str(shards)]
        arguments += ["--device", "cpu", "--workers", "0"]
        arguments += [] if checkpoint == "sets" else ["--model", "vl-tiny"]
        arguments += [] if "--image" in flags else ["--text", text]
        capsys.readouterr()
        status = main([*arguments, *map(str, flags)])
        output, errors = capsys.readouterr()
        return status, output, errors

    return search


@pytest.fixture(scope="module")
def made_index(checkpoints, toy_shards, tmp_path_factory):
    """An index of the model "one", in a folder of its own."""
    file = tmp_path_factory.mktemp("index") / "toy.safetensors"
    flags = ["--checkpoint", f"{checkpoints}/one.pt", "--model", "vl-tiny", "--device", "cpu", "--workers", "0"]
    shards = ["--shards", f"{toy_shards}/toy-val-{{000000..000002}}.tar"]
    assert main(["search", *flags, *shards, "--text", TEXT, "--index", str(file), "--no-sheet"]) == 0
    return file


@pytest.fixture
def index(made_index, tmp_path):
    """A copy of it, in the folder in which the command runs."""
    return Path(shutil.copy(made_index, tmp_path / "toy.safetensors"))


@pytest.fixture
def no_encoding(monkeypatch):
    monkeypatch.setattr(encoding, "encode_shards", None)


def results(output):
    return json.loads(output)["results"]


def test_text_finds_pictures(search, scenes, encoded):
    """Against pictures and text encoded one at a time, and sorted in a plain loop."""
    status, output, errors = search("--json", "--top", 24, "--batch-size", 7, "--no-sheet")
    assert status == 0
    assert "encoding 24 images and 120 captions for this query only; --index FILE would keep the embeddings" in errors
    encode_text, images, _ = encoded
    expected = {key: float(image @ encode_text(TEXT)) for key, image in images.items()}
    document = json.loads(output)
    assert document["query"] == {"text": TEXT}
    assert (document["num_images"], document["num_captions"]) == (24, 120)
    assert document["contact_sheet"] is None
    found = document["results"]
    assert [result["rank"] for result in found] == list(range(1, 25))
    assert [result["key"] for result in found] == sorted(expected, key=expected.get, reverse=True)
    for result in found:
        assert result["similarity"] == pytest.approx(expected[result["key"]], abs=1e-5)
        _, captions, image_id, _ = scenes[result["key"]]
        assert (result["image_id"], result["caption"]) == (image_id, captions[0])


def test_text_finds_captions(search, scenes, encoded, index, no_encoding):
    encode_text, _, captions = encoded
    status, output, _ = search("--json", "--target", "captions", "--top", 120, "--no-sheet", "--index", index)
    assert status == 0
    query = encode_text(TEXT)
    found = results(output)
    assert {result["caption_id"] for result in found} == captions.keys()
    similarities = [result["similarity"] for result in found]
    assert similarities == sorted(similarities, reverse=True)
    order = list(captions)
    for result, after in zip(found, [*found[1:], None], strict=True):
        key, caption, embedding = captions[result["caption_id"]]
        assert (result["key"], result["caption"], result["image_id"]) == (key, caption, scenes[key][2])
        assert result["similarity"] == pytest.approx(float(embedding @ query), abs=1e-5)
        # Vague captions are those of several pictures.
        if after is not None and after["caption"] == caption:
            assert order.index(result["caption_id"]) < order.index(after["caption_id"])
    assert len({result["caption"] for result in found}) < 120


@pytest.mark.parametrize("flags", [[], ["--faiss", "Flat"]])
def test_picture_finds_itself(search, scenes, index, tmp_path, monkeypatch, no_encoding, flags):
    drawn = []
    original = contact_sheet.draw_contact_sheet
    monkeypatch.setattr(
        contact_sheet,
        "draw_contact_sheet",
        lambda *args, **kwargs: (drawn.append((args, kwargs)), original(*args, **kwargs)),
    )
    key = "toy-val-00000013"
    picture = scenes[key][0]
    (tmp_path / "query.png").write_bytes(picture)
    status, output, _ = search("--image", "query.png", "--index", index, "--json", "--top", 3, *flags)
    assert status == 0
    document = json.loads(output)
    assert document["query"] == {"image": "query.png"}
    found = document["results"]
    assert found[0]["key"] == key
    assert found[0]["similarity"] == pytest.approx(1, abs=1e-5)
    assert found[1]["similarity"] < 1 - 1e-5
    (samples, file), options = drawn[0]
    assert options["title"] == "query.png"
    assert [sample.key for sample in samples] == ["query.png", *(result["key"] for result in found)]
    assert [sample.picture for sample in samples] == [picture, *(scenes[result["key"]][0] for result in found)]
    assert samples[1].captions == [scenes[key][1][0]]
    assert options["labels"] == ["query", *(f"{result['rank']}: {result['similarity']:.4f}" for result in found)]
    assert options["labels"][1] == "1: 1.0000"
    assert str(file) == document["contact_sheet"] == "search.png"
    with Image.open(tmp_path / "search.png") as image:
        assert image.format == "PNG"


def test_caption_that_was_found_is_on_the_sheet(search, scenes, index, monkeypatch, no_encoding):
    """Two captions of one picture are two cells."""
    drawn = []
    monkeypatch.setattr(contact_sheet, "draw_contact_sheet", lambda *args, **kwargs: drawn.append((args, kwargs)))
    caption = scenes["toy-val-00000007"][1][4]
    status, output, _ = search("--target", "captions", "--index", index, "--out", "new/c.png", "--json", text=caption)
    assert status == 0
    found = results(output)
    assert found[0]["caption"] == caption
    assert found[0]["similarity"] == pytest.approx(1, abs=1e-5)
    (samples, file), options = drawn[0]
    assert options["title"] == caption
    assert str(file) == "new/c.png"
    assert [sample.captions for sample in samples] == [[result["caption"]] for result in found]
    assert [sample.picture for sample in samples] == [scenes[result["key"]][0] for result in found]


def test_sets_are_compared_by_the_similarity_of_the_model(search, checkpoints, scenes):
    model, transform, tokenizer = load_model(checkpoints / "sets.pt")
    for target in ("images", "captions"):
        flags = ["--target", target, "--index", "sets.npz", "--json", "--top", 5, "--no-sheet"]
        status, output, _ = search(*flags, checkpoint="sets")
        assert status == 0
        found = results(output)
        assert len(found) == 5
        with torch.no_grad():
            query = model.encode_text(tokenizer([TEXT]), normalize=True)[0]
            assert query.shape[0] == 2
            if target == "images":
                pictures = (Image.open(io.BytesIO(picture)) for picture, *_ in scenes.values())
                sets = [model.encode_image(transform(picture)[None], normalize=True)[0] for picture in pictures]
            else:
                texts = [caption for _, captions, *_ in scenes.values() for caption in captions]
                sets = model.encode_text(tokenizer(texts), normalize=True)
            expected = [float(reference_sets.smooth_chamfer(query, items, 9.0)) for items in sets]
        assert [result["similarity"] for result in found] == pytest.approx(sorted(expected)[:-6:-1], abs=1e-4)
        if target == "images":
            assert found[0]["key"] == list(scenes)[expected.index(max(expected))]
    status, _, errors = search("--faiss", "Flat", checkpoint="sets")
    assert status == 2
    assert "sets.pt makes embedding sets, which FAISS cannot compare; leave out --faiss" in errors.splitlines()[-1]


def test_table_and_sheet(search, scenes, encoded, index, tmp_path):
    status, output, errors = search("--index", index, "--top", 3)
    assert (status, errors) == (0, "")
    _, images, _ = encoded
    lines = output.splitlines()
    assert lines[0].split() == ["rank", "similarity", "key", "image", "id", "caption"]
    rows = [
        re.fullmatch(r" +(\d)  +(-?0\.\d{4})  (toy-val-\d{8})  (\d+) +(\S.*)", line).groups() for line in lines[1:4]
    ]
    assert [row[0] for row in rows] == ["1", "2", "3"]
    for _, similarity, key, image_id, caption in rows:
        assert float(similarity) == pytest.approx(float(images[key] @ encoded[0](TEXT)), abs=1e-4)
        assert (int(image_id), caption) == (scenes[key][2], scenes[key][1][0])
    assert lines[4:] == ["", "contact sheet: search.png"]
    with Image.open(tmp_path / "search.png") as image:
        assert image.width == 2 * contact_sheet.MARGIN + 3 * contact_sheet.FRAME[0] + 2 * contact_sheet.COLUMN_GAP


def test_an_index_is_made_once(search, index, monkeypatch, tmp_path):
    """The second query encodes no shard and answers the same."""
    calls = []
    original = encoding.encode_shards
    monkeypatch.setattr(
        encoding, "encode_shards", lambda *args, **kwargs: (calls.append(1), original(*args, **kwargs))[1]
    )
    first = search("--index", "new/own.npz", "--no-sheet", "--json")
    assert "kept the embeddings of 24 images and 120 captions in new/own.npz" in first[2]
    content = (tmp_path / "new" / "own.npz").read_bytes()
    second = search("--index", "new/own.npz", "--no-sheet", "--json")
    assert calls == [1]
    assert first[:2] == second[:2]
    assert second[2] == ""
    assert (tmp_path / "new" / "own.npz").read_bytes() == content
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["own.npz"]
    # Neither the format nor the place of the shards matters.
    assert results(search("--index", index, "--no-sheet", "--json")[1]) == results(second[1])
    assert calls == [1]


def test_shards_may_move(search, index, toy_shards, tmp_path, no_encoding):
    shutil.copytree(toy_shards, tmp_path / "moved")
    assert search("--index", index, "--no-sheet", shards="moved/toy-val-{000000..000002}.tar")[0] == 0


@pytest.fixture
def changed_shards(toy_scenes, tmp_path):
    """Function that writes the shards again after a change of the annotations or the pictures."""

    def write(change):
        folder = tmp_path / "scenes"
        shutil.copytree(toy_scenes, folder)
        annotations = json.loads((folder / "dataset_toy.json").read_text())
        annotations["images"] = [image for image in annotations["images"] if image["split"] == "val"]
        change(folder, annotations["images"])
        (folder / "dataset_toy.json").write_text(json.dumps(annotations))
        out = tmp_path / "changed"
        write_shards(read_karpathy(folder / "dataset_toy.json", "coco"), folder, out, samples_per_shard=8)
        return f"{out}/toy-val-{{000000..000002}}.tar"

    return write


def other_caption(folder, images):
    images[3]["sentences"][0]["raw"] = "something else"


def other_picture(folder, images):
    first, second = (folder / image["filepath"] / image["filename"] for image in images[:2])
    first.write_bytes(second.read_bytes())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (other_caption, "the shards have the same ids, but other keys or captions than it was made of"),
        (other_picture, "the shards have the same ids and captions, but are other files (sha256 in manifest.json)"),
        (lambda folder, images: images.reverse(), "images are in another order: image"),
        (
            lambda folder, images: images[0].update(cocoid=77_777),
            "1 of the 24 images of the shards are missing, such as 77777",
        ),
    ],
)
def test_index_of_other_content_is_refused(search, index, changed_shards, no_encoding, change, message):
    before = index.read_bytes()
    shards = changed_shards(change)
    status, output, errors = search("--index", index, shards=shards)
    assert (status, output) == (2, "")
    (line,) = errors.splitlines()
    assert line.startswith(f"vl-plugins search: error: --index {index} does not fit: ")
    assert message in line
    assert line.endswith("; name another file, or delete this one to have it made again")
    assert index.read_bytes() == before


def test_index_of_other_shards_is_refused(search, index, toy_shards, no_encoding):
    status, _, errors = search("--index", index, shards=f"{toy_shards}/toy-val-{{000000..000001}}.tar")
    assert status == 2
    assert re.search(r"24 images .*120 captions.* 16 .* 80", errors)
    listed = "::".join(f"{toy_shards}/toy-val-00000{number}.tar" for number in (1, 0, 2))
    status, _, errors = search("--index", index, shards=listed)
    assert status == 2
    assert "the same 24 images are in another order" in errors


def test_index_of_another_checkpoint_or_precision_is_refused(search, index, checkpoints, no_encoding):
    status, _, errors = search("--index", index, "--precision", "amp_bf16", checkpoint="two")
    assert status == 2
    assert re.search(
        r"it was made with checkpoint \S+one\.pt \(SHA-256 [0-9a-f]{12}\.\.\.\), not with checkpoint \S+two\.pt "
        r"\(SHA-256 [0-9a-f]{12}\.\.\.\); it was made with precision fp32, not amp_bf16; name another file",
        errors,
    )
    # Of the same content under another name it is the same.
    shutil.copy(checkpoints / "one.pt", "renamed.pt")
    assert search("--index", index, "--no-sheet", "--checkpoint", "renamed.pt")[0] == 0
    shutil.copy(checkpoints / "two.pt", "renamed.pt")
    assert search("--index", index, "--no-sheet", "--checkpoint", "renamed.pt")[0] == 2


def test_index_of_another_model_is_refused(search, index):
    features = load_features(index)
    save_features(replace(features, description={**features.description, "model": "ViT-B-32"}), index)
    status, _, errors = search("--index", index)
    assert status == 2
    assert "it was made with model ViT-B-32, not vl-tiny" in errors


def test_other_features_are_no_index(search, index, tmp_path):
    features = load_features(index)
    save_features(replace(features, description={"model": "vl-tiny"}), index)
    status, _, errors = search("--index", index)
    assert status == 2
    assert "it does not say of which checkpoint and shards it is" in errors
    save_features(replace(features, images=features.images * float("nan")), index)
    status, _, errors = search("--index", index)
    assert status == 2
    assert f"--index {index}: image features are NaN" in errors
    index.write_bytes(b"nonsense")
    status, _, errors = search("--index", index)
    assert status == 2
    assert f"{index} cannot be read" in errors
    assert index.read_bytes() == b"nonsense"


def kill_when_written(arguments, pattern):
    host_replace = os.replace

    def killed(unfinished, file):
        if re.search(pattern, file):
            os.truncate(unfinished, os.path.getsize(unfinished) // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        host_replace(unfinished, file)

    os.replace = killed
    main(arguments)


@pytest.mark.parametrize("pattern", [r"own\.npz$", r"own\.images\.HNSW8\.faiss$"])
def test_killed_half_way(search, checkpoints, toy_shards, tmp_path, pattern):
    shards = f"{toy_shards}/toy-val-{{000000..000002}}.tar"
    arguments = ["search", "--checkpoint", f"{checkpoints}/one.pt", "--model", "vl-tiny", "--shards", shards]
    arguments += ["--text", TEXT, "--device", "cpu", "--workers", "0", "--index", "own.npz", "--faiss", "HNSW8"]
    context = multiprocessing.get_context("fork")
    process = context.Process(target=kill_when_written, args=(arguments, pattern))
    process.start()
    process.join(timeout=100)
    assert process.exitcode == -signal.SIGKILL
    assert not (tmp_path / "own.images.HNSW8.faiss").exists()
    if pattern == r"own\.npz$":
        assert not (tmp_path / "own.npz").exists()
    status, output, errors = search("--index", "own.npz", "--faiss", "HNSW8", "--json", "--no-sheet")
    assert status == 0
    assert ("kept the embeddings" in errors) == (pattern == r"own\.npz$")
    assert "kept the index HNSW8 of 24 images in own.images.HNSW8.faiss" in errors
    expected = results(search("--json", "--no-sheet", "--index", "own.npz")[1])
    assert [hit["key"] for hit in results(output)] == [hit["key"] for hit in expected]


@pytest.mark.parametrize(
    ("factory", "file", "flags"),
    [
        ("Flat", "toy.captions.Flat.faiss", []),
        ("HNSW16", "toy.captions.HNSW16.faiss", ["--faiss-parameters", "efSearch=120"]),
        ("IVF4,Flat", "toy.captions.IVF4-Flat.faiss", ["--faiss-parameters", "nprobe=4"]),
        ("IVF4(Flat),SQ8", "toy.captions.IVF4-Flat-SQ8.faiss", ["--faiss-parameters", "nprobe=4"]),
    ],
)
def test_faiss(search, index, tmp_path, monkeypatch, no_encoding, factory, file, flags):
    arguments = ["--index", index, "--target", "captions", "--json", "--no-sheet"]
    exact = results(search(*arguments)[1])
    status, output, errors = search(*arguments, "--faiss", factory, *flags)
    assert status == 0
    assert f"kept the index {factory} of 120 captions in {index.with_name(file)}" in errors
    found = results(output)
    assert [hit["similarity"] for hit in found[:4]] == pytest.approx([hit["similarity"] for hit in exact[:4]], abs=1e-6)
    assert sorted(path.name for path in tmp_path.iterdir()) == [file, f"{file}.json", index.name]
    # The second time it is read and not built.
    monkeypatch.setattr(FaissIndex, "__init__", None)
    assert search(*arguments, "--faiss", factory, *flags) == (0, output, "")


def test_faiss_of_one_query(search, tmp_path):
    status, output, _ = search("--faiss", "Flat", "--json", "--no-sheet")
    assert status == 0
    assert [hit["key"] for hit in results(output)] == [hit["key"] for hit in results(search("--json", "--no-sheet")[1])]
    assert not list(tmp_path.iterdir())


def test_faiss_index_of_other_features_is_made_again(search, index, tmp_path):
    flags = ["--index", index, "--faiss", "HNSW8", "--json", "--no-sheet"]
    search(*flags)
    index.unlink()
    status, output, errors = search(*flags, checkpoint="two")
    assert status == 0
    assert f"index {tmp_path}/toy.images.HNSW8.faiss is of other embeddings; making it again" in errors
    expected = results(search("--json", "--no-sheet", "--index", index, checkpoint="two")[1])
    assert [hit["key"] for hit in results(output)] == [hit["key"] for hit in expected]


def test_faiss_file_of_somebody_else_stays(search, index, tmp_path):
    theirs = tmp_path / "toy.images.Flat.faiss"
    theirs.write_bytes(b"theirs")
    status, _, errors = search("--index", index, "--faiss", "Flat")
    assert status == 2
    assert "toy.images.Flat.faiss is not one that vl-plugins wrote" in errors
    assert theirs.read_bytes() == b"theirs"


def test_faiss_that_finds_fewer(search, index):
    status, output, errors = search("--index", index, "--faiss", "IVF6,Flat", "--top", 24, "--json", "--no-sheet")
    assert status == 0
    number = len(results(output))
    assert 0 < number < 24
    assert f"FAISS found {number} of the 24 nearest" in errors
    assert "--faiss-parameters makes it look at more, such as nprobe=16" in errors
    flags = ["--index", index, "--faiss", "IVF6,Flat", "--top", 24, "--json", "--no-sheet", "--faiss-parameters"]
    status, output, errors = search(*flags, "nprobe=6")
    assert (status, errors) == (0, "")
    assert len(results(output)) == 24
    status, _, errors = search(*flags, "efSearch=6")
    assert status == 2
    assert "cannot set 'efSearch=6' for the index 'IVF6,Flat'" in errors


def test_more_than_a_sheet_holds(search, index, monkeypatch, scenes, tmp_path):
    monkeypatch.setattr(contact_sheet, "MOST_SAMPLES", 6)
    (tmp_path / "query.png").write_bytes(scenes["toy-val-00000000"][0])
    output = search("--index", index, "--top", 30)[1]
    assert len(output.splitlines()) == 1 + 24 + 2
    assert output.endswith("\ncontact sheet: search.png (the first 6)\n")
    output = search("--index", index, "--top", 6, "--image", "query.png")[1]
    assert output.endswith("\ncontact sheet: search.png (the first 5)\n")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--text", " \n"], "--text is empty; say in words what to look for"),
        (["--text", "a\udcffb"], "--text is not valid in the encoding of this terminal"),
        (["--image", "no.png"], "cannot read --image no.png: No such file or directory"),
        (["--image", "text.png"], "--image text.png: the file is not an image"),
        (["--image", "cut.png"], "--image cut.png: the image is damaged"),
        (["--image", "empty.png"], "--image empty.png: the file is empty"),
        (["--text", "a", "--top", "0"], "--top must be at least 1, got 0"),
        (["--text", "a", "--batch-size", "0"], "--batch-size must be at least 1, got 0"),
        (["--text", "a", "--workers", "-1"], "--workers must be at least 0, got -1"),
        (["--text", "a", "--out", "sheet.jpg"], "--out must be a .png file, got sheet.jpg"),
        (["--text", "a", "--index", "index.bin"], "must end in .npz or .safetensors, got index.bin"),
        (["--text", "a", "--faiss-parameters", "nprobe=3"], "--faiss-parameters are for an index of FAISS; name one"),
        (["--text", "a", "--shards", "no.tar"], "1 of 1 shards do not exist: no.tar"),
        (["--text", "a", "--model", "vl-tinny"], "unknown model 'vl-tinny' (did you mean 'vl-tiny'?)"),
        (["--text", "a", "--checkpoint", "no.pt"], "checkpoint no.pt: no such file, nor a pretrained tag of vl-tiny"),
        (["--text", "a", "--faiss", "Nonsense"], "'Nonsense' is no index of FAISS for vectors of"),
    ],
)
def test_wrong_input(checkpoints, toy_shards, scenes, tmp_path, monkeypatch, capsys, no_encoding, flags, message):
    """Before anything is encoded."""
    monkeypatch.chdir(tmp_path)
    picture = scenes["toy-val-00000000"][0]
    for name, data in (("text.png", b"text"), ("cut.png", picture[: len(picture) // 2]), ("empty.png", b"")):
        (tmp_path / name).write_bytes(data)
    defaults = {
        "--checkpoint": f"{checkpoints}/one.pt",
        "--model": "vl-tiny",
        "--shards": f"{toy_shards}/toy-val-000000.tar",
    }
    given = [part for name, value in defaults.items() if name not in flags for part in (name, value)]
    assert main(["search", *given, "--device", "cpu", *flags]) == 2
    output, errors = capsys.readouterr()
    assert output == ""
    line = errors.splitlines()[-1]
    assert line.startswith("vl-plugins search: error: ")
    assert message in line
    assert not (tmp_path / "search.png").exists()


def test_too_few_to_train_an_index_of_faiss(search, index):
    status, _, errors = search("--index", index, "--faiss", "IVF256,Flat")
    assert status == 2
    assert (
        "cannot build the index 'IVF256,Flat' of 24 vectors: Number of training points (24) should be at least as "
        "large as number of clusters (256)" in errors.splitlines()[-1]
    )


@pytest.mark.parametrize("flags", [[], ["--text", "a", "--image", "b.png"]])
def test_one_query(flags, capsys):
    with pytest.raises(SystemExit) as raised:
        main(["search", "--checkpoint", "c.pt", "--shards", "s.tar", *flags])
    assert raised.value.code == 2
    assert "--text" in capsys.readouterr().err


def test_optional_packages(search, index, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "faiss", None)
        status, _, errors = search("--index", index, "--faiss", "Flat")
        assert status == 2
        assert "faiss is not installed; install it with: pip install 'vl_plugins[faiss]'" in errors
        assert search("--index", index, "--no-sheet")[0] == 0
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, output, _ = search("--index", index)
    assert status == 0
    assert output.endswith(
        "\nno contact sheet: matplotlib is not installed; install it with: pip install 'vl_plugins[eval]'\n"
    )
    assert search("--index", index, "--out", "sheet.png")[0] == 2
    assert [file.name for file in tmp_path.iterdir()] == [index.name]


def test_what_a_terminal_would_obey_is_printed_as_text(search, scenes, tmp_path):
    """Shards of another program, with keys for ids."""
    captions = ["\x1b[2J\x1b]0;title\x07 red", "two\nlines\r" + "x" * 300, "plain"]
    with tarfile.open(tmp_path / "odd.tar", "w") as tar:
        for number, caption in enumerate(captions):
            for extension, data in (("png", list(scenes.values())[number][0]), ("txt", caption.encode())):
                member = tarfile.TarInfo(f"k\x1b{number}{'y' * 60}.{extension}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    status, output, errors = search(shards=tmp_path / "odd.tar")
    assert status == 0
    assert (output + errors).replace("\n", "").isprintable()
    lines = output.splitlines()
    assert lines[0].split() == ["rank", "similarity", "key", "caption"]
    assert len(lines) == 1 + 3 + 2
    assert max(map(len, lines)) <= 110
    assert r"\x1b[2J\x1b]0;title\x07 red" in output
    found = results(search("--json", "--no-sheet", shards=tmp_path / "odd.tar")[1])
    assert sorted(result["caption"] for result in found) == sorted(captions)


def test_help_has_an_example(capsys):
    with pytest.raises(SystemExit):
        main(["search", "--help"])
    output = capsys.readouterr().out
    assert "example:\n  vl-plugins search --checkpoint" in output
    assert "--index coco-test.safetensors" in output
