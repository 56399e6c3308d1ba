"""``vl-plugins evaluate``: image-text retrieval of models on shards, or of saved features."""

import argparse
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from vl_plugins.commands.encode import add_options, encode
from vl_plugins.commands.run_names import run_names
from vl_plugins.errors import UserError

__all__ = ["register", "run"]

ENSEMBLE = "ensemble"
JUDGED = "eccv-caption"
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
        help="measure image-text retrieval of checkpoints or features",
        usage="%(prog)s [options]",
        examples=[
            "vl-plugins evaluate --checkpoint logs/run/checkpoints/epoch_10.pt \\\n"
            "    --shards 'shards/coco-test-{000000..000004}.tar' --protocol coco-5k eccv",
            "vl-plugins evaluate --features vit.safetensors other.npz --ensemble",
        ],
        description="Rank all captions for each image and all images for each caption, and print Recall@1, 5 and 10, "
        "median ranks and RSUM.",
        epilog=EPILOG,
    )
    add: Any = parser.add_argument_group("what to evaluate").add_argument
    several: Any = {"nargs": "+", "metavar": "[NAME=]FILE", "default": []}
    add("--features", **several, help="embeddings of `vl-plugins encode` or another program, .npz or .safetensors")
    checkpoints = "encode first: checkpoints or run folders, hf-hub:ORG/NAME, or pretrained tags of open_clip"
    add("--checkpoint", **several, help=checkpoints)
    add("--model", metavar="NAME", help="open_clip model of all checkpoints (default: that of each run)")
    add("--shards", help="shards to encode, or that features are of; {000000..000004} for several")
    add("--ensemble", action="store_true", help="also evaluate the mean of all similarities")
    add("--protocol", nargs="+", metavar="NAME", default=["plain"], help="one or more of those below (default: plain)")
    add("--normalize", action="store_true", help="normalize --features, which must have norm 1 otherwise")
    running = parser.add_argument_group("how to run")
    add_options(running)
    running.add_argument(
        "--ranking-device", default="cpu", metavar="DEVICE", help="device that compares embeddings (default: cpu)"
    )
    add = parser.add_argument_group("what to write").add_argument
    add("--json", action="store_true", help="print JSON, with recalls as fractions")
    report = "write a report of the ensemble or the first model; with --shards it has examples"
    add("--report", metavar="FILE.html", help=report)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Evaluate and print; progress bars go to standard error."""
    files, checkpoints = arguments.features, arguments.checkpoint
    if not (files or checkpoints) or (checkpoints and not arguments.shards):
        raise UserError("give --features, or --checkpoint with --shards")
    paths = run_names([*files, *checkpoints])
    if ENSEMBLE in paths:
        raise UserError(f"{ENSEMBLE!r} is the name of all models together; name the model: NAME=FILE")
    features, collection = _features(arguments, paths)
    if features:  # only the first process has them
        _evaluate(arguments, paths, features, collection)
    return 0


def _features(arguments: argparse.Namespace, paths: Mapping[str, str]) -> tuple[Any, Any]:
    """Return the features of each model, read or encoded, and the collection of the shards that they are of."""
    shards = arguments.shards
    files, checkpoints = [*paths][: len(arguments.features)], [*paths][len(arguments.features) :]
    collection: Any = None
    if shards:
        from vl_plugins.data import read_collection

        collection = read_collection(shards)  # before torch is imported
    from vl_plugins.retrieval.features import load_features
    from vl_plugins.retrieval.protocols import check_images

    for protocol in arguments.protocol if shards else ():
        check_images(protocol, len(collection), shards)
    features = {}
    if os.environ.get("RANK", "0") == "0":  # its errors end the other processes, which wait for this one
        features = {name: load_features(paths[name], normalize=arguments.normalize) for name in files}
    if checkpoints:
        encoded = encode(arguments, [paths[name] for name in checkpoints])
        features |= {name: found for name, found in zip(checkpoints, encoded, strict=True) if found is not None}
    if collection is None:
        return features, None
    from vl_plugins.integrations.encoding import hash_shards

    digest = hash_shards(collection)
    for name, found in features.items():
        found.check_same_items(collection, name, shards)
        if found.description.get("shards_sha256", digest) != digest:
            raise UserError(f"{name} and {shards} do not belong together: the pictures or captions differ")
    return features, collection


def _evaluate(arguments: argparse.Namespace, paths: Mapping[str, str], features: Any, collection: Any) -> None:
    """Print the metrics of each model, then write the report."""
    from vl_plugins.retrieval import format_metrics_table
    from vl_plugins.retrieval.protocols import evaluate

    ensemble = {ENSEMBLE: [*features.values()]} if arguments.ensemble else {}
    results: dict[str, Any] = {}
    shown: Any = None  # by the report
    for name, members in (ensemble | {name: [found] for name, found in features.items()}).items():
        results[name] = {}
        for protocol in arguments.protocol:
            options = {"device": arguments.ranking_device, "progress": sys.stderr.isatty()}
            options["with_ranks"] = arguments.report is not None and shown is None
            found = evaluate(members, protocol, name=arguments.shards or name, **options)
            results[name] |= found.metrics
            shown = shown or found
    tables, first = _tables(results), next(iter(results))
    size = "{num_samples:,} images, {num_captions:,} captions"
    settings = {protocol: size.format(**metrics) for protocol, metrics in results[first].items()}
    if arguments.json:
        known = {name: found.description | {"file": paths[name]} for name, found in features.items()}
        rows = [known.get(name, {}) | {"name": name, "metrics": metrics} for name, metrics in results.items()]
        print(json.dumps({"shards": arguments.shards, "results": rows}, indent=2))
    else:
        print(*(f"{protocol}: {size}" for protocol, size in settings.items()), sep="\n")
        print(*(format_metrics_table(rows, bool(judged)) for judged, rows in enumerate(tables) if rows), sep="\n")
        for name, parts in results.items():
            metrics = next(iter(parts.values()))
            if "image_circular_variance" in metrics:
                images, captions = metrics["image_circular_variance"], metrics["caption_circular_variance"]
                print(f"circular variance of the sets of {name}: images {images:.4g}, captions {captions:.4g}")
    if arguments.report:
        from vl_plugins.retrieval.report import write_report

        write_report(
            arguments.report,
            shown.ranks,
            tables,
            title=f"Image-text retrieval of {first}, protocol {arguments.protocol[0]}",
            settings=settings | {name: _settings(found.description) for name, found in features.items()},
            collection=collection and collection.with_captions(shown.captions),
            max_image_pixels=arguments.max_image_pixels,
        )
        print(f"wrote {arguments.report}", file=sys.stderr)


def _tables(results: Mapping[str, Any]) -> list[dict[str, Mapping[str, float]]]:
    """Return the metrics by the names of their rows: recalls, and those that ECCV Caption judges."""
    tables: list[dict[str, Any]] = [{}, {}]
    for name, parts in results.items():
        for protocol, metrics in parts.items():
            row = name if protocol == "plain" else protocol if len(results) == 1 else f"{name} {protocol}"
            tables[protocol == JUDGED][row] = metrics
    return tables


def _settings(description: Mapping[str, Any]) -> str:
    """Return in one line what is known of features."""
    known = {key: value for key, value in description.items() if value and key != "splits"}
    texts = (f"{key.replace('_', ' ')} {str(value)[: 12 if 'sha256' in key else None]}" for key, value in known.items())
    return ", ".join(texts) or "features of unknown origin"
