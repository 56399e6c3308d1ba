"""What goes into shards comes out of them: for any captions, and for the ids of COCO's test split."""

import io
import json
import tempfile
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest
import torch
import webdataset
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision.transforms import PILToTensor

from vl_plugins.cli import main
from vl_plugins.data.evaluation_reader import EvaluationReader
from vl_plugins.data.manifest import read_manifest
from vl_plugins.data.shards import write_shards
from vl_plugins.data.sources import CaptionedImage
from vl_plugins.data.training_batches import TrainingPipeline

pytestmark = pytest.mark.filterwarnings("ignore:failed to import `ujson`")

transform = PILToTensor()


def encode_number(number):
    """Return a picture of one pixel that shows a number."""
    stream = io.BytesIO()
    Image.new("RGB", (1, 1), (number >> 16, number >> 8 & 255, number & 255)).save(stream, "PNG")
    return stream.getvalue()


def decode_numbers(images):
    return (images.flatten(1).long() * torch.tensor([1 << 16, 1 << 8, 1])).sum(1).tolist()


# Anything that JSON can hold, but for the halves of surrogate pairs; not blank.
texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30).filter(lambda text: text.strip())
ids = st.one_of(st.integers(-(2**63), 2**63), st.text(st.characters(exclude_categories=["Cs"]), max_size=5))
names = st.from_regex(r"[A-Za-z0-9_-]{1,8}", fullmatch=True)


@st.composite
def data_sets(draw):
    dataset = draw(names)
    splits = draw(st.lists(names, min_size=1, max_size=3, unique=True))
    image_ids = draw(st.lists(ids, min_size=len(splits), max_size=12, unique=True))
    images = []
    for index, image_id in enumerate(image_ids):
        # Every split has an image; the others fall where they may.
        split = splits[index] if index < len(splits) else draw(st.sampled_from(splits))
        captions = tuple(draw(st.lists(texts, min_size=1, max_size=4)))
        caption_ids = tuple(10 * index + number for number in range(len(captions)))
        image = CaptionedImage(image_id, f"{index}.png", captions, caption_ids, split, dataset, f"{index}.png")
        images.append(replace(image, group=draw(st.none() | ids)))
    return images


@given(images=data_sets(), samples_per_shard=st.integers(1, 5), batch_size=st.integers(1, 4))
@settings(max_examples=60)
def test_any_data_set(images, samples_per_shard, batch_size):
    with tempfile.TemporaryDirectory() as folder:
        root, out = Path(folder, "root"), Path(folder, "out")
        root.mkdir()
        for number, image in enumerate(images):
            (root / image.file).write_bytes(encode_number(number))
        entries = write_shards(images, root, out, samples_per_shard=samples_per_shard)
        splits = {}
        for number, image in enumerate(images):
            splits.setdefault(f"{image.dataset}-{image.split}", []).append((number, image))
        assert list(entries) == list(splits)
        assert read_manifest(out) == json.loads(json.dumps(entries))
        for name, members in splits.items():
            shards = [str(out / shard) for shard in sorted(entries[name]["shards"])]
            # The library that the format is of.
            samples = list(webdataset.WebDataset(shards, shardshuffle=False))
            assert [decode_numbers(transform(Image.open(io.BytesIO(s["png"])))[None])[0] for s in samples] == [
                number for number, _ in members
            ]
            for sample, (_, image) in zip(samples, members, strict=True):
                metadata = json.loads(sample["json"])
                assert sample["txt"].decode() == image.captions[0]
                assert (metadata.pop("width"), metadata.pop("height")) == (1, 1)
                expected = {**vars(image), "captions": list(image.captions), "caption_ids": list(image.caption_ids)}
                del expected["file"]
                if image.group is None:
                    del expected["group"]
                assert metadata == expected
            # Our readers.
            found, captions, owners = [], [], []
            for batch in EvaluationReader(shards, transform, list, batch_size):
                owners += (len(found) + batch.image_of_caption).tolist()
                found += decode_numbers(batch.images)
                captions += batch.texts
            assert found == [number for number, _ in members]
            assert captions == [caption for _, image in members for caption in image.captions]
            assert owners == [index for index, (_, image) in enumerate(members) for _ in image.captions]
            reader = TrainingPipeline(
                shards, transform, list, 1, captions_per_image="all", allow_duplicate_captions=True
            )
            by_number = {number: image.captions for number, image in members}
            seen = []
            for pictures, batch in reader:
                seen += decode_numbers(pictures)
                assert [*dict.fromkeys(batch)] == [*dict.fromkeys(by_number[seen[-1]])]
            assert sorted(seen) == sorted(by_number)


@pytest.fixture(scope="module")
def coco_test_split(tmp_path_factory):
    """Annotation files with the true ids of COCO's test split, as ECCV Caption ships them, and generated pictures.

    One is in Karpathy's format with running sentence ids, the other in the official one with other captions between.
    """
    eccv_caption = resources.files("eccv_caption") / "data"
    captions_of = json.loads((eccv_caption / "original_image_to_caption.json").read_text())
    folder = tmp_path_factory.mktemp("coco_test")
    (folder / "val2014").mkdir()
    items, official = [], {"images": [], "annotations": []}
    for number, (image_id, caption_ids) in enumerate(captions_of.items()):
        filename = f"COCO_val2014_{int(image_id):012d}.png"
        (folder / "val2014" / filename).write_bytes(encode_number(number))
        sentences = []
        for position, caption_id in enumerate(caption_ids):
            raw = f"Caption {caption_id} of the picture {image_id}."
            sentences.append({"raw": raw, "tokens": [], "imgid": number, "sentid": 5 * number + position})
            official["annotations"].append({"id": caption_id, "image_id": int(image_id), "caption": f"{raw} "})
        item = {"filepath": "val2014", "filename": filename, "cocoid": int(image_id), "imgid": number}
        items.append({**item, "split": "test", "sentences": sentences})
        official["images"].append({"id": int(image_id), "file_name": filename})
    official["annotations"].sort(key=lambda annotation: annotation["id"])
    official["images"].reverse()
    (folder / "dataset_coco.json").write_text(json.dumps({"dataset": "coco", "images": items}))
    (folder / "captions_val2014.json").write_text(json.dumps(official))
    return folder, {int(image_id): caption_ids for image_id, caption_ids in captions_of.items()}


def test_the_structure_of_cocos_test_split(coco_test_split, tmp_path, capsys):
    folder, captions_of = coco_test_split
    assert (len(captions_of), sum(map(len, captions_of.values()))) == (5000, 25000)
    out = tmp_path / "shards"
    files = ["--annotations", folder / "dataset_coco.json", "--coco-annotations", folder / "captions_val2014.json"]
    assert main(["shards", "coco", *map(str, files), "--images", str(folder), "--out", str(out)]) == 0
    entry = read_manifest(out)["coco-test"]
    assert (entry["images"], entry["captions"], entry["rejected"]) == (5000, 25000, 0)
    assert entry["source"]["caption_ids"] == "coco-annotation"
    assert list(entry["shards"]) == [f"coco-test-{number:06d}.tar" for number in range(5)]
    assert main(["shards", "verify", str(out)]) == 0
    assert "5,000 samples" in capsys.readouterr().out

    shards = [str(out / shard) for shard in entry["shards"]]
    records = [json.loads(sample["json"]) for sample in webdataset.WebDataset(shards, shardshuffle=False)]
    assert {record["image_id"]: record["caption_ids"] for record in records} == captions_of
    assert [record["image_id"] for record in records] == list(captions_of)

    numbers, captions, owners = [], [], []
    for batch in EvaluationReader(shards, transform, list, 100):
        owners += (len(numbers) + batch.image_of_caption).tolist()
        numbers += decode_numbers(batch.images)
        captions += batch.texts
    assert numbers == list(range(5000))
    assert captions == [
        f"Caption {caption_id} of the picture {image_id}."
        for image_id, caption_ids in captions_of.items()
        for caption_id in caption_ids
    ]
    assert owners == [index for index in range(5000) for _ in range(5)]
