"""What plain readers find in files: numpy, json, csv, tarfile and torch, without the package."""

import csv
import io
import json
import re
import tarfile

import numpy as np
import torch
from PIL import Image
from safetensors import safe_open

__all__ = ["captions_of_shards", "captions_of_source", "recall_bounds", "samples_of"]


def arrays_of(file):
    """Return images, captions, owners and the description of a file of features."""
    if file.suffix == ".npz":
        arrays = dict(np.load(file))
        text = str(arrays["vl_plugins"])
    else:
        with safe_open(file, "np") as opened:
            text = opened.metadata()["vl_plugins"]
            arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return *(arrays[n] for n in ("image_features", "caption_features", "image_of_caption")), json.loads(text)


def recall_bounds(file):
    """Return the least and the greatest recall by name that features may have, if 1e-5 of a score is rounding."""
    images, captions, owners, values = arrays_of(file)
    scores = _scores(images.astype("f8"), captions.astype("f8"), values.get("description", {}))
    right = owners[None] == np.arange(len(images))[:, None]
    found = {}
    for direction, s, r in (("image_to_text", scores, right), ("text_to_image", scores.T, right.T)):
        best = np.where(r, s, -np.inf).max(1, keepdims=True)
        for k in (1, 5, 10):
            bounds = ((~r & (s > best + slack)).sum(1) < k for slack in (-1e-5, 1e-5))
            found[f"{direction}_R@{k}"] = [float(each.mean()) for each in bounds]
    return found


def _scores(images, captions, description):
    if images.ndim == 2:
        return images @ captions.T
    cosines = np.einsum("ikd,cld->iklc", images, captions)
    present = (images.any(2)[:, :, None, None], captions.any(2).T[None, None])
    assert description["similarity"] in ("SmoothChamferSimilarity", "smooth_chamfer")
    alpha = description["similarity_kwargs"].get("alpha", 16.0)
    total = 0
    for axis, (mine, other) in ((2, present), (1, present[::-1])):
        inner = np.log(np.where(other, np.exp(alpha * cosines), 0).sum(axis, keepdims=True)) / (2 * alpha)
        total = total + np.where(mine, inner, 0).sum((1, 2)) / mine.sum((1, 2))
    return total


def samples_of(shards):
    """Return the files by extension of each image in archives."""
    samples = {}
    for shard in shards:
        with tarfile.open(shard) as archive:
            for member in archive:
                name = re.fullmatch(r"((?:.*/)?[^./]+)\.([^/]+)", member.name)
                if member.isreg() and name:
                    samples.setdefault((shard, name[1]), {})[name[2].lower()] = archive.extractfile(member).read()
    return [*samples.values()]


def captions_of(sample):
    content = json.loads(sample.get("json", b"{}"))
    found = content.get("captions") if isinstance(content, dict) else None
    return [sample["txt"].decode()] if found is None else found


def captions_of_shards(shards):
    """Return the captions of each image."""
    return sorted(map(captions_of, samples_of(shards)))


def captions_of_source(file):
    """Return the captions of each image in an annotation file or a table."""
    text, images = file.read_text("utf-8-sig", "replace"), {}
    if file.suffix == ".csv":
        for row in csv.DictReader(io.StringIO(text)):
            images.setdefault(row["image"], []).append(row["caption"])
    elif file.suffix == ".jsonl":
        for row in map(json.loads, filter(str.strip, text.splitlines())):
            found = row["captions"]
            images.setdefault(row["image"], []).extend(found if isinstance(found, list) else [found])
    elif "annotations" in (content := json.loads(text)):
        names = {image["id"]: image["file_name"] for image in content["images"]}
        for one in content["annotations"]:
            if one["image_id"] in names:  # pycocotools ignores others, too
                images.setdefault(names[one["image_id"]], []).append(one["caption"])
    else:
        for image in content["images"]:
            place = image.get("filepath", ""), image["filename"]
            images.setdefault(place, []).extend(sentence["raw"] for sentence in image["sentences"])
    return sorted(images.values())


def picture_of(sample):
    picture = next(sample[extension] for extension in ("jpg", "png", "webp", "jpeg") if extension in sample)
    return Image.open(io.BytesIO(picture)).convert("RGB")


@torch.no_grad()
def embeddings(loaded, weights, shards):
    """Return the embeddings of images and captions in archives by a model with other weights."""
    model, transform, tokenizer = loaded
    own = model.state_dict()
    model.load_state_dict({name: weights[name].reshape(value.shape) for name, value in own.items()})
    images, captions = [], []
    for sample in samples_of(shards):
        image = np.load(io.BytesIO(sample["npy"])).astype("f4") if "npy" in sample else picture_of(sample)
        images.append(model.encode_image(transform(image)[None], normalize=True)[0])
        captions += [*model.encode_text(tokenizer(captions_of(sample)), normalize=True)]
    return torch.stack(images).numpy(), torch.stack(captions).numpy()
