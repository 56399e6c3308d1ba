"""``vl-plugins evaluate``: image-text retrieval of models on shards, or of saved features."""

import argparse
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vl_plugins.commands.encode import add_options, encode
from vl_plugins.commands.run_names import ENSEMBLE, named_runs
from vl_plugins.errors import InputWarning, UserError, one_of

__all__ = ["register", "run"]

FEWEST_SEEDS = 3  # from which on files that differ in a number are taken for seeds
EPILOG = """\
protocols:
  plain         all images and all captions
  flickr30k-1k  Flickr30K's test split: 1,000 images, 5,000 captions
  coco-5k       Karpathy's COCO test split: 5,000 images, 25,000 captions
  coco-1k       mean over five folds of 1,000 images of that split
  eccv          ECCV Caption (mAP@R, R-Precision, R@1) and CxC on that split"""


def register(subparsers: argparse._SubParsersAction) -> None:
    """Add the ``evaluate`` command."""
    parser = subparsers.add_parser(
        "evaluate",
        help="measure image-text retrieval of models, and compare them",
        usage="%(prog)s [options]",
        examples=[
            "vl-plugins evaluate --checkpoint logs/run/checkpoints/epoch_10.pt \\\n"
            "    --shards 'shards/coco-test-{000000..000004}.tar' --protocol coco-5k eccv",
            "vl-plugins evaluate --features clip=a.npz clip=b.npz clip=c.npz \\\n"
            "    unified=d.npz unified=e.npz unified=f.npz --baseline clip",
        ],
        description="Rank all captions for each image and all images for each caption, and print Recall@1, 5 and 10, "
        "median ranks and RSUM. Two models or more are compared, with 95 % confidence intervals of the differences.",
        epilog=EPILOG,
    )
    add: Any = parser.add_argument_group("what to evaluate").add_argument
    several: Any = {"nargs": "+", "metavar": "[NAME=]FILE", "default": []}
    features = "embeddings of `vl-plugins encode` or another program: .npz, .safetensors, .parquet or a folder of .npy"
    add("--features", **several, help=f"{features}; a name that occurs again is another training seed of that model")
    checkpoints = "encode first: checkpoints or run folders, hf-hub:ORG/NAME, or pretrained tags of open_clip"
    add("--checkpoint", **several, help=checkpoints)
    add("--model", metavar="NAME", help="open_clip model of all checkpoints (default: that of each run)")
    shards = "data to encode, or that features are of: shards, {000000..000004} for several, or a table or folder"
    add("--shards", help=shards)
    add("--baseline", metavar="NAME", help="model that the others are compared with (default: the first)")
    add("--ensemble", action="store_true", help="also evaluate the mean of all similarities")
    add("--protocol", nargs="+", metavar="NAME", default=["plain"], help="one or more of those below (default: plain)")
    add("--normalize", action="store_true", help="normalize --features, which must have norm 1 otherwise")
    per_caption = "--features repeat each image for each of its captions, as in VSE++; make these rows one image"
    add("--image-per-caption", action="store_true", help=per_caption)
    running = parser.add_argument_group("how to run")
    add_options(running)
    running.add_argument(
        "--ranking-device", default="cpu", metavar="DEVICE", help="device that compares embeddings (default: cpu)"
    )
    add = parser.add_argument_group("what to write").add_argument
    add("--json", action="store_true", help="print JSON, with recalls as fractions")
    add("--rules", action="store_true", help="also print the recalls that other tools compute")
    report = "write a report of the ensemble or the first model, and of differences; with --shards it has examples"
    add("--report", metavar="FILE.html", help=report)
    add("--per-query", metavar="FILE", help="write a row for each query, .parquet or .csv")
    suspects = "write captions for which the first model finds a wrong image first, .parquet or .csv; needs --shards"
    add("--suspects", metavar="FILE", help=suspects)
    add("--confidence", type=float, metavar="P", help="confidence of --suspects, between 0 and 1 (default: 0.5)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Evaluate and print; progress bars go to standard error."""
    _check(arguments)
    runs = named_runs([*arguments.features, *arguments.checkpoint])
    names = list(dict.fromkeys(name for name, _ in runs))
    if ENSEMBLE in names:
        raise UserError(f"{ENSEMBLE!r} is the name of all models together; name the model: NAME=FILE")
    _warn_of_seeds(names, [*arguments.features, *arguments.checkpoint])
    if arguments.baseline is not None:
        if len(names) < 2:
            raise UserError("--baseline: there is nothing to compare with; give two models or more")
        one_of("baseline", arguments.baseline, names)
    features, collection = _features(arguments, runs)
    if features:  # only the first process has them
        from vl_plugins.commands.evaluation import write_evaluation

        write_evaluation(arguments, runs, features, collection)
    return 0


def _warn_of_seeds(names: Sequence[str], words: Sequence[str]) -> None:
    """Warn of files like ``clip-0.npz clip-1.npz``: without a common name they are models of their own."""
    runs_of_stem: dict[str, list[str]] = {}
    for name in names:
        stem = name.rstrip("0123456789").rstrip("-_.")
        if stem and stem != name and not any(word.startswith(f"{name}=") for word in words):
            runs_of_stem.setdefault(stem, []).append(name)
    for stem, runs in runs_of_stem.items():
        if len(runs) >= FEWEST_SEEDS:
            state = f"{', '.join(runs)} are compared as {len(runs)} models"
            warnings.warn(f"{state}; give seeds of one model one name: {stem}=FILE", InputWarning, stacklevel=2)


def _check(arguments: argparse.Namespace) -> None:
    """Raise an error for options that do not fit together, before anything is encoded."""
    if not (arguments.features or arguments.checkpoint) or (arguments.checkpoint and not arguments.shards):
        raise UserError("give --features, or --checkpoint with --shards")
    if arguments.suspects and not arguments.shards:
        raise UserError("--suspects writes captions, which only shards have: give --shards")
    if arguments.confidence is not None:
        if not arguments.suspects:
            raise UserError("--confidence is for --suspects")
        from vl_plugins.retrieval.per_query import check_confidence

        check_confidence(arguments.confidence)
    for file in (arguments.per_query, arguments.suspects):
        if file:
            from vl_plugins.retrieval.per_query import check_table_file

            check_table_file(file)


def _features(arguments: argparse.Namespace, runs: Sequence[tuple[str, str]]) -> tuple[list[Any], Any]:
    """Return the features of each run, read or encoded, and the collection of the shards that they are of.

    Features are only in the first process; in the others the list is empty.
    """
    shards = arguments.shards
    files, checkpoints = runs[: len(arguments.features)], runs[len(arguments.features) :]
    collection: Any = None
    if shards:
        from vl_plugins.data import read_collection
        from vl_plugins.data.records import as_rule

        rule = as_rule(arguments.caption_lines, arguments.caption_fields)
        collection = read_collection(shards, caption_lines=rule)  # before torch is imported
    from vl_plugins.retrieval.features import load_features
    from vl_plugins.retrieval.protocols import check_images

    for protocol in arguments.protocol if shards else ():
        check_images(protocol, len(collection), shards)
    features = []
    if os.environ.get("RANK", "0") == "0":  # its errors end the other processes, which wait for this one
        _check_different_files(runs)
        for _, path in files:
            options = {"normalize": arguments.normalize, "image_per_caption": arguments.image_per_caption}
            features.append(load_features(path, **options))
    if checkpoints:
        for encoded in encode(arguments, [path for _, path in checkpoints], collection, shards):
            if encoded is not None:
                features.append(encoded)
    if collection is not None:
        digest = collection.digest()
        for (name, _), of_run in zip(runs, features, strict=False):
            of_run.check_same_items(collection, name, shards)
            if of_run.description.get("shards_sha256", digest) != digest:
                raise UserError(f"{name} and {shards} do not belong together: the pictures or captions differ")
    return features, collection


def _check_different_files(runs: Sequence[tuple[str, str]]) -> None:
    """Raise an error if two runs have one file: they are neither two seeds of a model nor two models."""
    if len(runs) < 2:
        return  # a large file need not be read twice
    first_of_content: dict[str, tuple[str, str]] = {}
    for name, path in runs:
        content = _content(path)
        if content not in first_of_content:
            first_of_content[content] = name, path
            continue
        other_name, other_path = first_of_content[content]
        same = f"{path} is given twice" if path == other_path else f"{other_path} and {path} have the same content"
        if name == other_name:
            raise UserError(f"{same}: one training cannot be two seeds of {name}")
        raise UserError(f"{same}: as {other_name} and {name}, a model would be compared with itself")


def _content(path: str) -> str:
    """Return what tells whether two paths have the same content: a SHA-256, or the name of a published model."""
    from vl_plugins.data.files import sha256

    if os.path.isfile(path):
        return sha256(path)
    arrays = sorted(Path(path).rglob("*.npy"))
    if arrays:  # a folder of features
        return " ".join(sha256(array) for array in arrays)
    if os.path.isdir(path):
        from vl_plugins.integrations.loading import checkpoint_of_run

        checkpoint = checkpoint_of_run(path)
        return sha256(checkpoint) if os.path.isfile(checkpoint) else os.path.abspath(checkpoint)
    return path
