"""``vl-plugins evaluate``: image-text retrieval of models on shards, or of saved features."""

import argparse
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vl_plugins.commands.encode import add_options, encode
from vl_plugins.commands.run_names import run_names, split_name
from vl_plugins.errors import UserError
from vl_plugins.retrieval.protocols import PROTOCOLS

__all__ = ["register", "run"]

ENSEMBLE = "ensemble"
JUDGED = "eccv-caption"


def register(subparsers: argparse._SubParsersAction) -> None:
    """Add the ``evaluate`` command."""
    table = "\n".join(f"  {name:12}  {protocol.description}" for name, protocol in PROTOCOLS.items())
    parser = subparsers.add_parser(
        "evaluate",
        help="measure image-text retrieval of checkpoints or features",
        usage="%(prog)s [options]",
        examples=[
            "vl-plugins evaluate --checkpoint logs/run/checkpoints/epoch_10.pt \\\n"
            "    --shards 'shards/coco-test-{000000..000004}.tar' --protocol coco-5k eccv",
            "vl-plugins evaluate --features vit.safetensors other.npz --ensemble --report report.html",
        ],
        description="Rank all captions for each image and all images for each caption, and print Recall@1, 5 and 10, "
        "median ranks and RSUM.",
        epilog=f"protocols:\n{table}",
    )
    what = parser.add_argument_group("what to evaluate")
    what.add_argument(
        "--features",
        nargs="+",
        metavar="[NAME=]FILE",
        default=[],
        help="embeddings of `vl-plugins encode` or another program, .npz or .safetensors",
    )
    what.add_argument(
        "--checkpoint",
        nargs="+",
        metavar="[NAME=]FILE",
        default=[],
        help="encode first: checkpoints or run folders, hf-hub:ORG/NAME, or pretrained tags of open_clip",
    )
    what.add_argument(
        "--model",
        nargs="+",
        metavar="NAME",
        default=[],
        help="open_clip model, one for all checkpoints or one each (default: that of the run)",
    )
    what.add_argument(
        "--shards", help="shards to encode, or that features are of; {000000..000004} for several (default: as encoded)"
    )
    what.add_argument("--ensemble", action="store_true", help="also evaluate the mean of all similarities")
    what.add_argument(
        "--protocol",
        nargs="+",
        choices=PROTOCOLS,
        metavar="PROTOCOL",
        default=["plain"],
        help="one or more of the protocols below (default: plain)",
    )
    what.add_argument("--normalize", action="store_true", help="normalize --features, which must have norm 1 otherwise")
    how = parser.add_argument_group("how to run")
    add_options(how)
    how.add_argument(
        "--ranking-device", default="cpu", metavar="DEVICE", help="device that compares embeddings (default: cpu)"
    )
    out = parser.add_argument_group("what to write")
    out.add_argument("--json", action="store_true", help="print JSON, with recalls as fractions")
    out.add_argument(
        "--report", metavar="FILE.html", help="write a report of the ensemble or the first model, with examples"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Evaluate and print; progress bars go to standard error."""
    checkpoints, files, models = arguments.checkpoint, arguments.features, arguments.model
    if not checkpoints and not files:
        raise UserError("give --checkpoint with --shards, or --features")
    if checkpoints and not arguments.shards:
        raise UserError("--checkpoint needs --shards: the images and captions to encode")
    if len(models) not in (0, 1, len(checkpoints)):
        raise UserError(f"give one --model for all checkpoints or one each, got {len(models)} for {len(checkpoints)}")
    if arguments.ensemble and len(checkpoints) + len(files) < 2:
        raise UserError("--ensemble averages the similarities of two or more models, got one")
    if arguments.report and not arguments.report.endswith(".html"):
        raise UserError(f"--report must end in .html, got {arguments.report}")
    named = [split_name(argument) for argument in files]
    models = models if len(models) == len(checkpoints) else [*models, None][:1] * len(checkpoints)
    for argument, model in zip(checkpoints, models, strict=True):
        name, path = split_name(argument)
        # A pretrained tag is one of its model.
        named.append((name or ("" if Path(path).exists() or not model else f"{model}/{path}"), path))
    names = run_names(named)
    if twice := [name for name in [*names, ENSEMBLE] if [*names, ENSEMBLE].count(name) > 1]:
        raise UserError(f"two models are called {twice[0]!r}; name them: NAME=FILE")
    return _evaluate(arguments, dict(zip(names, (path for _, path in named), strict=True)), models)


def _evaluate(arguments: argparse.Namespace, paths: Mapping[str, str], models: list[str | None]) -> int:
    from vl_plugins.data import first_captions, read_collection
    from vl_plugins.retrieval.features import load_features
    from vl_plugins.retrieval.protocols import check_images, evaluate

    torch = sys.modules["torch"]
    rank = int(os.environ.get("RANK", 0))
    features, number = {}, len(arguments.features)
    collection = read_collection(arguments.shards) if arguments.shards else None
    for protocol in arguments.protocol if collection is not None else ():
        check_images(protocol, len(collection), arguments.shards)
    for name in [*paths][: number if rank == 0 else 0]:  # an error ends the other processes, which wait for this one
        found = load_features(paths[name], normalize=arguments.normalize)
        if arguments.max_captions:
            kept = first_captions(found.image_of_caption, arguments.max_captions)
            found = found.select(torch.arange(len(found.images)), kept)
        features[name] = found
    encoded = encode(arguments, list(zip([*paths.values()][number:], models, strict=True))) if models else []
    if rank > 0:
        return 0
    features |= {name: found for name, (found, _) in zip([*paths][number:], encoded, strict=True)}
    first = features[next(iter(features))]
    if collection is None and arguments.report and (shards := first.description.get("shards")):
        collection = read_collection(shards)
    if collection is not None:
        if arguments.max_captions:
            collection = collection.with_captions(first_captions(collection.image_of_caption, arguments.max_captions))
        for name, found in features.items():
            found.check_same_items(collection, name, arguments.shards or "its shards")
    contestants = {name: [found] for name, found in features.items()}
    if arguments.ensemble:
        contestants = {ENSEMBLE: [*features.values()], **contestants}
    results: dict[str, dict[str, dict[str, float]]] = {}
    shown = None
    for name, members in contestants.items():
        results[name] = {}
        for protocol in arguments.protocol:
            with_ranks = arguments.report is not None and shown is None
            options = {"device": arguments.ranking_device, "progress": sys.stderr.isatty(), "with_ranks": with_ranks}
            found = evaluate(members, protocol, name=arguments.shards or name, **options)
            results[name] |= found.metrics
            shown = shown or found
    _print(arguments, paths, features, results)
    if arguments.report:
        _write_report(arguments, features, results, shown, collection)
    return 0


def _tables(results: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[dict[str, Mapping[str, float]]]:
    """Return the metrics by the names of their rows: recalls, and those that ECCV Caption judges."""
    tables: list[dict[str, Mapping[str, float]]] = [{}, {}]
    for name, parts in results.items():
        for protocol, metrics in parts.items():
            row = name if protocol == "plain" else protocol if len(results) == 1 else f"{name} {protocol}"
            tables[protocol == JUDGED][row] = metrics
    return tables


def _print(arguments: argparse.Namespace, paths: Mapping[str, str], features: Any, results: Any) -> None:
    from vl_plugins.retrieval import format_metrics_table

    if arguments.json:
        found = [
            {
                "name": name,
                **({"file": paths[name]} if name in paths else {}),
                **(features[name].description if name in features else {}),
                "metrics": metrics,
            }
            for name, metrics in results.items()
        ]
        print(json.dumps({"shards": arguments.shards, "results": found}, indent=2))
        return
    for protocol, metrics in next(iter(results.values())).items():
        print(f"{protocol}: {metrics['num_samples']:,} images, {metrics['num_captions']:,} captions")
    for judged, rows in enumerate(_tables(results)):
        if rows:
            print(format_metrics_table(rows, bool(judged)))
    for name, parts in results.items():
        metrics = next(iter(parts.values()))
        if "image_circular_variance" in metrics:
            images, captions = metrics["image_circular_variance"], metrics["caption_circular_variance"]
            print(f"circular variance of the sets of {name}: images {images:.4g}, captions {captions:.4g}")


def _write_report(arguments: argparse.Namespace, features: Any, results: Any, shown: Any, collection: Any) -> None:
    from vl_plugins.retrieval.report import write_report

    settings = {"protocol": ", ".join(arguments.protocol)}
    if arguments.shards:
        settings["shards"] = arguments.shards
    for name, found in features.items():
        described = {**found.description, "shards": None, "splits": None, "similarity_kwargs": None}
        settings[name] = (
            ", ".join(
                f"{key.replace('_', ' ')} {value[:12] if key.endswith('sha256') else value}"
                for key, value in described.items()
                if value
            )
            or "features of unknown origin"
        )
    write_report(
        arguments.report,
        shown.ranks,
        _tables(results),
        title=f"Image-text retrieval of {next(iter(results))}, protocol {arguments.protocol[0]}",
        settings=settings,
        collection=collection and collection.with_captions(shown.captions),
    )
    print(f"wrote {arguments.report}", file=sys.stderr)
