"""``vl-plugins search``: the pictures or captions of shards that are nearest to a text or to a picture."""

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vl_plugins.utils.errors import MissingExtraError, UserError

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from vl_plugins.data.collection import Collection
    from vl_plugins.retrieval.features import Features
    from vl_plugins.retrieval.search import ExactIndex, FaissIndex

__all__ = ["register", "run"]

DEFAULT_TOP = 12
DEFAULT_SHEET = Path("search.png")

WIDTH = 110  # characters of a line of the table
SHORTEST_CAPTION = 30
LONGEST_KEY = 40
LONGEST_FACTORY = 60  # in the name of a file

DESCRIPTION = """\
Find the pictures of shards, or their captions, that a model places nearest to a text or to a
picture. The best are printed and drawn on a contact sheet. With --index the embeddings of all
pictures and captions are kept in a file, so that only the first query has to wait for them. The
search compares the query with all of them, unless --faiss names an index of the FAISS library.
Embedding sets are compared by the similarity that the model was trained with."""

EPILOG = """\
example:
  vl-plugins search --checkpoint logs/run/checkpoints/epoch_10.pt --model ViT-B-32-quickgelu \\
      --shards 'shards/coco-test-{000000..000004}.tar' --index coco-test.safetensors \\
      --text "two dogs on a beach"
  ... --image dog.jpg --target captions --out captions-of-dog.png
  ... --text "a red bus" --faiss IVF256,Flat --faiss-parameters nprobe=16"""


def register(subparsers: argparse._SubParsersAction) -> None:
    """Add the ``search`` subcommand."""
    parser = subparsers.add_parser(
        "search",
        help="pictures or captions of shards that are nearest to a text or a picture",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    query = parser.add_mutually_exclusive_group(required=True)
    query.add_argument("--text", help="what to look for, in words")
    query.add_argument("--image", type=Path, metavar="FILE", help="what to look for, as a JPEG, PNG or WebP file")
    parser.add_argument(
        "--checkpoint", required=True, help="checkpoint file of a training run, or a pretrained tag of open_clip"
    )
    parser.add_argument(
        "--model", help="name of an open_clip model, or vl-tiny; a checkpoint of a model with --head says it itself"
    )
    parser.add_argument(
        "--shards", required=True, help="shards to search in, of `vl-plugins shards`; {000000..000004} for many"
    )
    parser.add_argument(
        "--target", default="images", choices=("images", "captions"), help="what to find (default: %(default)s)"
    )
    parser.add_argument("--top", type=int, default=DEFAULT_TOP, metavar="K", help="how many (default: %(default)s)")
    index = parser.add_argument_group("index")
    index.add_argument(
        "--index",
        type=Path,
        metavar="FILE",
        help="a .safetensors or .npz file that keeps the embeddings: made when missing, used when it is there and of "
        "this checkpoint and these shards",
    )
    index.add_argument(
        "--faiss",
        metavar="FACTORY",
        help='search with an index of FAISS: "Flat", "HNSW32", "IVF256,Flat", ...; kept beside --index',
    )
    index.add_argument(
        "--faiss-parameters",
        metavar="NAME=N,...",
        help="how thoroughly FAISS searches, such as nprobe=16 of IVF or efSearch=64 of HNSW (default: FAISS's own)",
    )
    output = parser.add_argument_group("output")
    sheet = output.add_mutually_exclusive_group()
    sheet.add_argument("--out", type=Path, metavar="FILE", help=f"the contact sheet, a .png (default: {DEFAULT_SHEET})")
    sheet.add_argument("--no-sheet", action="store_true", help="draw no contact sheet")
    output.add_argument("--json", action="store_true", help="print the results as JSON instead of a table")
    encoding = parser.add_argument_group("encoding")
    encoding.add_argument("--batch-size", type=int, default=64, help="images per batch (default: %(default)s)")
    encoding.add_argument("--workers", type=int, default=1, help="loader processes (default: %(default)s)")
    encoding.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: cuda where there is one)")
    encoding.add_argument(
        "--precision", default="fp32", help="as in open_clip: fp32, amp_bf16, ... (default: %(default)s)"
    )
    parser.set_defaults(run=run)


class _Found(NamedTuple):
    """A result, with what the shards say of it.

    Args:
        similarity: to the query.
        image: index of the image, the one with the caption where captions are searched.
        caption: index of the caption that was found, or of the image's first.
    """

    similarity: float
    image: int
    caption: int


def run(arguments: argparse.Namespace) -> int:
    """Encode or load, search, print and draw; the progress bar and notes go to standard error."""
    # Here, because every command imports this module and most need no model.
    sheet, no_sheet = _check(arguments)
    picture = None if arguments.image is None else _read_picture(arguments.image)

    from vl_plugins.commands.torchrun import process_device
    from vl_plugins.data.collection import read_collection
    from vl_plugins.integrations.checkpoints import load_model
    from vl_plugins.retrieval.search import check_factory

    collection = read_collection(arguments.shards)
    device = process_device(arguments.device)
    loaded = load_model(arguments.checkpoint, arguments.model, device=device, precision=arguments.precision)
    if arguments.faiss is not None and _set_similarity(loaded) is not None:
        raise UserError(
            f"checkpoint {arguments.checkpoint} makes embedding sets, which FAISS cannot compare; leave out --faiss to "
            "search them by the similarity of the model"
        )
    # All that can be wrong with the query or an index that is there shows before the shards are encoded.
    query = _encode_query(loaded, arguments.text if picture is None else picture[1], device, arguments.precision)
    if arguments.faiss is not None:
        check_factory(arguments.faiss, query.shape[1])
    features = _features(arguments, loaded, collection, device)
    index = _index(arguments, features, loaded)
    similarities, indices = index.search(query, arguments.top)
    found = _look_up(collection, arguments.target, similarities[0].tolist(), indices[0].tolist())
    if len(found) < min(arguments.top, len(index)):
        _say(
            f"FAISS found {len(found)} of the {arguments.top} nearest: the index looks only at a part of the "
            f"{arguments.target}; --faiss-parameters makes it look at more, such as nprobe=16"
        )

    if not arguments.json:
        # Whatever becomes of the picture.
        print(_format(collection, found))
    drawn = len(found)
    if sheet is not None:
        drawn = _draw(collection, found, sheet, arguments, None if picture is None else picture[0])
    if arguments.json:
        print(json.dumps(_as_json(arguments, collection, found, sheet), indent=2))
    elif sheet is not None:
        print(f"\ncontact sheet: {sheet}" + (f" (the first {drawn})" if drawn < len(found) else ""))
    elif no_sheet is not None:
        print(f"\nno contact sheet: {no_sheet}")
    return 0


def _check(arguments: argparse.Namespace) -> tuple[Path | None, MissingExtraError | None]:
    """Check what needs no model; return where to draw the contact sheet, or why there will be none."""
    from vl_plugins.retrieval.features import features_file
    from vl_plugins.utils.optional import require

    for option, least in (("top", 1), ("batch_size", 1), ("workers", 0)):
        if getattr(arguments, option) < least:
            raise UserError(f"--{option.replace('_', '-')} must be at least {least}, got {getattr(arguments, option)}")
    if arguments.text is not None:
        if not arguments.text.strip():
            raise UserError("--text is empty; say in words what to look for")
        try:
            arguments.text.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"--text is not valid in the encoding of this terminal: {error}") from error
    if arguments.index is not None:
        features_file(arguments.index)
    if arguments.faiss is not None:
        require("faiss", extra="faiss")
    elif arguments.faiss_parameters is not None:
        raise UserError("--faiss-parameters are for an index of FAISS; name one with --faiss, such as IVF256,Flat")
    if arguments.no_sheet:
        return None, None
    sheet = arguments.out or DEFAULT_SHEET
    if sheet.suffix.lower() != ".png":
        raise UserError(f"--out must be a .png file, got {sheet}")
    try:
        require("matplotlib", extra="eval")
    except MissingExtraError as error:
        if arguments.out is not None:
            raise
        return None, error
    return sheet, None


def _read_picture(file: Path) -> tuple[bytes, "Image"]:
    """Return the query's file and its pixels, as readers of shards make them."""
    import io

    from vl_plugins.data.images import inspect_image
    from vl_plugins.data.storage import error_text
    from vl_plugins.utils.optional import require

    try:
        data = file.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read --image {file}: {error_text(error)}") from error
    try:
        inspect_image(data)
    except UserError as error:
        raise UserError(f"--image {file}: {error}") from error
    with require("PIL.Image", extra="data").open(io.BytesIO(data)) as image:
        return data, image.convert("RGB")


def _encode_query(loaded: tuple, query: "str | Image", device: str, precision: str) -> "Tensor":
    """Return the query's embedding (1, D), or its set (1, K, D), in float32 on the CPU."""
    import torch

    from vl_plugins.integrations.precision import autocast, input_dtype

    model, transform, tokenizer = loaded
    with torch.inference_mode(), autocast(precision, device):
        if isinstance(query, str):
            features = model.encode_text(tokenizer([query]).to(device), normalize=True)
        else:
            pixels = transform(query)[None].to(device=device, dtype=input_dtype(precision))
            features = model.encode_image(pixels, normalize=True)
    features = features.float().cpu()
    if not features.isfinite().all():
        raise UserError("the model's embedding of the query is NaN or infinite; its training may have diverged")
    return features


def _set_similarity(loaded: tuple) -> Any:
    """Return the module by which a model compares sets; None for one of single vectors."""
    return getattr(loaded[0], "similarity", None)


def _features(arguments: argparse.Namespace, loaded: tuple, collection: "Collection", device: str) -> "Features":
    """Return the embeddings of the shards, from the file of --index or into it."""
    from vl_plugins.integrations.encoding import encode_shards
    from vl_plugins.retrieval.features import load_features, save_features

    file, origin = arguments.index, None
    if file is not None:
        origin = _origin(arguments, loaded, collection)
        if file.exists():
            features = load_features(file)
            difference = _difference(features, origin, collection, str(file))
            if difference:
                raise UserError(
                    f"--index {file} does not fit: {difference}; name another file, or delete this one to have it "
                    "made again"
                )
            return features.check(f"--index {file}")
    else:
        _say(
            f"encoding {len(collection.keys):,} images and {len(collection.captions):,} captions for this query only; "
            "--index FILE would keep the embeddings"
        )
    features = encode_shards(
        loaded,
        arguments.shards,
        collection=collection,
        batch_size=arguments.batch_size,
        workers=arguments.workers,
        device=device,
        precision=arguments.precision,
        progress="encoding" if sys.stderr.isatty() else None,
    ).check("the model's embeddings")
    features.matches(collection, "what was encoded")
    if file is not None:
        save_features(replace(features, description={**features.description, **origin}), file)
        _say(
            f"kept the embeddings of {len(features.images):,} images and {len(features.captions):,} captions in {file}"
        )
    return features


def _origin(arguments: argparse.Namespace, loaded: tuple, collection: "Collection") -> dict[str, Any]:
    """Return what an index must have been made of, as it is written into its file."""
    from vl_plugins.integrations.encoding import checkpoint_digest

    texts = json.dumps([collection.keys, collection.captions]).encode()
    return {
        "checkpoint": arguments.checkpoint,
        "checkpoint_digest": checkpoint_digest(arguments.checkpoint),
        "model": arguments.model or getattr(loaded[0], "description", {}).get("model"),
        "precision": arguments.precision,
        "texts_sha256": hashlib.sha256(texts).hexdigest(),
        "shards_sha256": _shard_digests(collection.shards),
    }


def _shard_digests(shards: Sequence[str]) -> list[str | None]:
    """Return the hash of each shard as the manifest beside it says; None where there is none."""
    from vl_plugins.data.manifest import ForeignManifestError, read_manifest
    from vl_plugins.data.shard_files import locate

    places = [locate(shard) for shard in shards]
    folders: dict[str, dict[str, Any]] = {}
    for folder in dict.fromkeys(place.folder for place in places if place is not None):
        folders[folder] = {}
        try:
            splits = read_manifest(folder) or {}
        except ForeignManifestError:
            continue
        for split in splits.values():
            listed = split.get("shards") if isinstance(split, dict) else None
            folders[folder] |= listed if isinstance(listed, dict) else {}
    entries = [{} if place is None else folders[place.folder].get(place.name) for place in places]
    digests = [entry.get("sha256") if isinstance(entry, dict) else None for entry in entries]
    return [digest if isinstance(digest, str) else None for digest in digests]


def _difference(features: "Features", origin: dict[str, Any], collection: "Collection", name: str) -> str | None:
    """Say in what an index differs from what it must have been made of; None when in nothing."""
    description = features.description
    if not origin.keys() <= description.keys():
        return "it does not say of which checkpoint and shards it is, as an index of `vl-plugins search` does"
    differences = []
    if description["checkpoint_digest"] != origin["checkpoint_digest"]:
        differences.append(f"it was made with {_name_checkpoint(description)}, not with {_name_checkpoint(origin)}")
    for option in ("model", "precision"):
        if description[option] != origin[option]:
            differences.append(f"it was made with {option} {description[option]}, not {origin[option]}")
    if not differences:
        try:
            features.matches(collection, name)
        except UserError as error:
            differences.append(str(error))
    if not differences and description["texts_sha256"] != origin["texts_sha256"]:
        differences.append("the shards have the same ids, but other keys or captions than it was made of")
    digests = description["shards_sha256"], origin["shards_sha256"]
    if not differences and digests[0] != digests[1] and not any(None in each for each in digests):
        differences.append("the shards have the same ids and captions, but are other files (sha256 in manifest.json)")
    return "; ".join(differences) or None


def _name_checkpoint(description: dict[str, Any]) -> str:
    name, digest = description["checkpoint"], description["checkpoint_digest"]
    return f"checkpoint {name}" if digest == name else f"checkpoint {name} (SHA-256 {digest[:12]}...)"


def _index(arguments: argparse.Namespace, features: "Features", loaded: tuple) -> "ExactIndex | FaissIndex":
    """Return the index to search, that of FAISS from the file beside --index or into it."""
    from vl_plugins.retrieval.search import FaissIndex, StaleIndexError, build_index

    target, factory = arguments.target, arguments.faiss
    if factory is None:
        # On the CPU, where the embeddings are: open_clip lets GPUs round products to TF32, which moves ranks.
        similarity = _set_similarity(loaded)
        return build_index(features, target, similarity=similarity and similarity.cpu().compute_mat)
    index = file = None
    if arguments.index is not None:
        file = _faiss_file(arguments.index, target, factory)
        if file.exists():
            try:
                index = FaissIndex.read(file, getattr(features, target), factory)
            except StaleIndexError as error:
                _say(f"{error}; making it again")
    if index is None:
        index = build_index(features, target, faiss=factory)
        if file is not None:
            index.write(file)
            _say(f"kept the index {factory} of {len(index):,} {target} in {file}")
    if arguments.faiss_parameters is not None:
        index.set_parameters(arguments.faiss_parameters)
    return index


def _faiss_file(features: Path, target: str, factory: str) -> Path:
    """Return the file of an index beside that of the embeddings; two kinds of one name take turns in it."""
    kind = re.sub("[^A-Za-z0-9]+", "-", factory)[:LONGEST_FACTORY].strip("-")
    return features.with_name(f"{features.stem}.{target}.{kind}.faiss")


def _look_up(
    collection: "Collection", target: str, similarities: Sequence[float], indices: Sequence[int]
) -> list[_Found]:
    """Return what was found, without the places for which there was nothing."""
    image_of_caption = collection.image_of_caption.tolist()
    first_caption: dict[int, int] = {}
    for caption, image in enumerate(image_of_caption):
        first_caption.setdefault(image, caption)
    return [
        _Found(similarity, index, first_caption[index])
        if target == "images"
        else _Found(similarity, image_of_caption[index], index)
        for similarity, index in zip(similarities, indices, strict=True)
        if index >= 0
    ]


def _format(collection: "Collection", found: Sequence[_Found]) -> str:
    """Return the results as a table of at most 110 columns."""
    rows = [("key", "image id")]
    for hit in found:
        key, image_id = collection.keys[hit.image], collection.image_ids[hit.image]
        rows.append((_shorten(_printable(key), LONGEST_KEY), _shorten(_printable(str(image_id)), LONGEST_KEY)))
    # A second column of the same names says nothing.
    names = [row[:1] if all(key == image_id for key, image_id in rows[1:]) else row for row in rows]
    widths = [max(map(len, column)) for column in zip(*names, strict=True)]
    starts = ["rank  similarity", *(f"{rank:>4}  {hit.similarity:>10.4f}" for rank, hit in enumerate(found, start=1))]
    captions = ["caption", *(_printable(collection.captions[hit.caption]) for hit in found)]
    lines = []
    for start, name, caption in zip(starts, names, captions, strict=True):
        line = "  ".join([start, *(text.ljust(width) for text, width in zip(name, widths, strict=True))])
        lines.append(f"{line}  {_shorten(caption, max(SHORTEST_CAPTION, WIDTH - len(line) - 2))}")
    return "\n".join(lines)


def _draw(
    collection: "Collection", found: Sequence[_Found], sheet: Path, arguments: argparse.Namespace, query: bytes | None
) -> int:
    """Draw the contact sheet, with a picture that was the query first; return how many results are on it."""
    from vl_plugins.data.contact_sheet import MOST_SAMPLES, draw_contact_sheet
    from vl_plugins.data.statistics import ShardSample

    samples, labels = [], []
    if query is not None:
        samples.append(ShardSample(arguments.image.name, query, []))
        labels.append("query")
    shown = found[: MOST_SAMPLES - len(samples)]
    pictures = collection.pictures(hit.image for hit in shown)
    for rank, hit in enumerate(shown, start=1):
        captions = [collection.captions[hit.caption]]
        samples.append(ShardSample(collection.keys[hit.image], pictures[hit.image], captions))
        labels.append(f"{rank}: {hit.similarity:.4f}")
    title = arguments.text if query is None else arguments.image.name
    draw_contact_sheet(samples, sheet, title=title, labels=labels)
    return len(shown)


def _as_json(
    arguments: argparse.Namespace, collection: "Collection", found: Sequence[_Found], sheet: Path | None
) -> dict[str, Any]:
    results = []
    for rank, hit in enumerate(found, start=1):
        result = {
            "rank": rank,
            "similarity": hit.similarity,
            "key": collection.keys[hit.image],
            "image_id": collection.image_ids[hit.image],
            "caption": collection.captions[hit.caption],
        }
        if arguments.target == "captions":
            result["caption_id"] = collection.caption_ids[hit.caption]
        results.append(result)
    image = None if arguments.image is None else str(arguments.image)
    return {
        "query": {"text": arguments.text} if image is None else {"image": image},
        "target": arguments.target,
        "num_images": len(collection.keys),
        "num_captions": len(collection.captions),
        "results": results,
        "contact_sheet": None if sheet is None else str(sheet),
    }


def _shorten(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 3]}..."


def _printable(text: str) -> str:
    """Return a text so that a terminal can print it on one line."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def _say(text: str) -> None:
    print(f"vl-plugins search: {_printable(text)}", file=sys.stderr)
