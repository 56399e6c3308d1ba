"""``vl-plugins evaluate``: image-text retrieval of models on shards, or of saved features."""

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vl_plugins.data.collection import Collection
    from vl_plugins.retrieval.evaluation import Result
    from vl_plugins.retrieval.features import Features
    from vl_plugins.retrieval.protocols import Trial
    from vl_plugins.retrieval.queries import Answers

__all__ = ["register", "run"]

# Not imported from open_clip and `protocols`: `--help` does without torch. Tests compare them.
PRECISIONS = ("amp", "amp_bf16", "amp_bfloat16", "bf16", "fp16", "pure_bf16", "pure_fp16", "fp32")
PROTOCOLS = ("plain", "flickr30k-1k", "coco-5k", "coco-1k", "eccv")

DESCRIPTION = """\
Encode every image and every caption of the shards once, rank all captions for every image and
all images for every caption, and print Recall@1, 5 and 10 in percent, median ranks and RSUM.
Image to text counts a hit when any caption of the image is found; ties count against the
model. Embedding sets are compared by the similarity that the model was trained with."""

EPILOG = """\
protocols (checked before anything is encoded: images, captions of each, ids and their order):
  plain         any shards: all images and all captions
  flickr30k-1k  test split of Flickr30K: 1,000 images, 5,000 captions
  coco-5k       Karpathy's test split of COCO: 5,000 images, the first five captions of each
  coco-1k       mean over five folds of 1,000 images of that split, in its order
  eccv          ECCV Caption (mAP@R, R-Precision, R@1) and CxC recalls on that split

examples:
  vl-plugins evaluate --checkpoint logs/run/checkpoints/epoch_10.pt \\
      --shards 'shards/coco-test-{000000..000004}.tar' --protocol coco-5k coco-1k eccv \\
      --save-features vit.safetensors --report report.html

  several GPUs, each with a part of the batches:
  torchrun --nproc-per-node 8 -m vl_plugins.cli evaluate --checkpoint ...

  features saved by this or another program (image_features, caption_features and
  image_of_caption in .npz or .safetensors), two models and the mean of their similarities:
  vl-plugins evaluate --features vit.safetensors other.npz --ensemble \\
      --shards 'shards/coco-test-{000000..000004}.tar' --protocol coco-5k"""


def register(subparsers: argparse._SubParsersAction) -> None:
    """Add the ``evaluate`` subcommand."""
    parser = subparsers.add_parser(
        "evaluate",
        help="retrieval recalls of checkpoints or saved features, by named protocols",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    what = parser.add_argument_group("what to evaluate")
    what.add_argument(
        "--model",
        nargs="+",
        metavar="NAME",
        help="name of an open_clip model, or vl-tiny; one for all checkpoints or one for each. Not needed for those of "
        "a training run, which specify it, or whose params.txt does",
    )
    what.add_argument(
        "--model-config",
        metavar="FILE_OR_FOLDER",
        help="model configurations that open_clip does not know, as .json (default: what the run was trained with)",
    )
    what.add_argument(
        "--checkpoint",
        nargs="+",
        metavar="FILE",
        help="checkpoint file of a training run, a pretrained tag of open_clip, or a model with its own weights: "
        "hf-hub:ORG/NAME or local-dir:FOLDER; several are compared",
    )
    what.add_argument(
        "--features",
        nargs="+",
        metavar="FILE",
        help="files of --save-features or of another program, .npz or .safetensors; compared with the shards, if given",
    )
    what.add_argument("--ensemble", action="store_true", help="also the mean of the similarities of all of these")
    what.add_argument("--shards", help="shards of `vl-plugins shards`, with {000000..000004} for many")
    what.add_argument(
        "--protocol",
        nargs="+",
        choices=PROTOCOLS,
        metavar="PROTOCOL",
        default=["plain"],
        help="which images and captions, and which numbers; see below (default: plain)",
    )
    what.add_argument(
        "--max-captions", type=int, metavar="N", help="use the first N captions of an image (default: all)"
    )
    what.add_argument(
        "--normalize",
        action="store_true",
        help="divide the vectors of --features by their norms; otherwise they must be 1",
    )
    how = parser.add_argument_group("how to run")
    how.add_argument("--batch-size", type=int, metavar="N", default=64, help="images per batch (default: %(default)s)")
    how.add_argument("--workers", type=int, metavar="N", default=1, help="loader processes (default: %(default)s)")
    how.add_argument(
        "--device",
        help="cpu, cuda, cuda:1, ... for the model (default: cuda where there is one; with torchrun one each)",
    )
    how.add_argument(
        "--precision",
        choices=PRECISIONS,
        metavar="PRECISION",
        default="fp32",
        help="as in open_clip: fp32, bf16, amp_bf16, ... (default: %(default)s)",
    )
    how.add_argument(
        "--ranking-device", default="cpu", metavar="DEVICE", help="where embeddings are compared (default: %(default)s)"
    )
    out = parser.add_argument_group("what to write")
    out.add_argument("--json", action="store_true", help="print all metrics as JSON instead of a table")
    out.add_argument(
        "--save-features",
        nargs="+",
        metavar="FILE",
        help="write the embeddings, .npz or .safetensors; one file a checkpoint",
    )
    out.add_argument(
        "--csv",
        metavar="FILE.csv",
        help="append a row for each model and protocol; models whose rows it has are not evaluated again",
    )
    out.add_argument("--force", action="store_true", help="evaluate also models whose rows --csv has")
    out.add_argument(
        "--report",
        metavar="FILE.html",
        help="write a page with the numbers, similarity histograms, rank curves, and successes and failures with "
        "thumbnails; of the ensemble or the first model, under the first protocol",
    )
    out.add_argument(
        "--queries",
        nargs="+",
        metavar="TEXT_OR_IMAGE",
        help="show the images and captions nearest to these texts, or image files, in the report; by the first "
        "checkpoint",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Evaluate and print; progress bars go to standard error."""
    _check(arguments)
    from vl_plugins.data.collection import read_collection
    from vl_plugins.integrations.torch_files import check_device
    from vl_plugins.retrieval.evaluation import evaluate_features
    from vl_plugins.retrieval.features import save_features
    from vl_plugins.retrieval.protocols import prepare
    from vl_plugins.retrieval.results_file import append_rows

    if arguments.device is not None:
        check_device("--device", arguments.device)
    check_device("--ranking-device", arguments.ranking_device)
    if arguments.csv and not _drop_finished(arguments):
        print("nothing is left to evaluate; --force evaluates again", file=sys.stderr)
        return 0
    progress = sys.stderr.isatty()
    with _processes(arguments) as processes:
        if processes[0] > 0:
            return _encode_a_part(arguments, processes)
        with _telling_the_others(arguments):
            # What can be wrong with the data is found before a model is loaded.
            collection = read_collection(arguments.shards, arguments.max_captions) if arguments.shards else None
            members = _load_features(arguments, collection)
            items = collection or next(iter(members.values()))
            trials = [prepare(name, items, arguments.shards or arguments.features[0]) for name in arguments.protocol]
        members |= _encode(arguments, collection, processes, progress)
        results = evaluate_features(
            members,
            trials,
            ensemble=arguments.ensemble,
            device=arguments.ranking_device,
            ranks=arguments.report is not None,
            progress=progress,
        )
    # First of all: a full disk must not cost the numbers.
    if arguments.json:
        print(json.dumps(_as_json(arguments, results, members, items), indent=2), flush=True)
    else:
        _print(results, items, trials)
    if arguments.csv:
        append_rows(arguments.csv, _csv_rows(arguments, results, members))
    for file, name in zip(arguments.save_features or (), _names(arguments), strict=False):
        save_features(members[name], file)
    if arguments.report:
        kept = collection and collection.with_captions(trials[0].captions)
        queries = _answer_queries(arguments, members, trials[0]) if arguments.queries else ()
        _write_report(arguments, results, _settings(arguments, members), kept, queries)
    return 0


def _check(arguments: argparse.Namespace) -> None:
    """Raise an error for what cannot work before anything is read."""
    from vl_plugins.utils.errors import UserError

    checkpoints, features = arguments.checkpoint or [], arguments.features or []
    if not checkpoints and not features:
        raise UserError("give --checkpoint with --shards, or --features")
    if checkpoints and not arguments.shards:
        raise UserError("--checkpoint needs --shards: the images and captions to encode")
    if arguments.model and not checkpoints:
        raise UserError("--model needs --checkpoint: a file, or a pretrained tag of open_clip")
    if arguments.model and len(arguments.model) not in (1, len(checkpoints)):
        raise UserError(
            f"give one --model for all checkpoints or one for each, got {len(arguments.model)} for {len(checkpoints)}"
        )
    if arguments.ensemble and len(checkpoints) + len(features) < 2:
        raise UserError("--ensemble averages the similarities of two or more checkpoints or files of features, got one")
    if arguments.save_features and len(arguments.save_features) != len(checkpoints):
        raise UserError(
            f"--save-features needs one file for each checkpoint, got {len(arguments.save_features)} for "
            f"{len(checkpoints)}"
        )
    if arguments.normalize and not features:
        raise UserError("--normalize is for --features; what a model encodes has norm 1")
    if arguments.max_captions is not None and arguments.max_captions < 1:
        raise UserError(f"--max-captions must be at least 1, got {arguments.max_captions}")
    for names in ([*features, *_names(arguments)], arguments.save_features or []):
        if len(set(names)) < len(names):
            raise UserError(f"{next(name for name in names if names.count(name) > 1)} is given twice")
    # Names and files, before torch and open_clip are imported.
    from vl_plugins.data.shard_files import expand_shards
    from vl_plugins.integrations.open_clip.names import check_file, check_model_name

    for model in arguments.model or ():
        check_model_name(model, arguments.model_config)
    for checkpoint in checkpoints:
        check_file("--checkpoint", checkpoint)
    for file in features:
        check_file("--features", file)
    if arguments.shards:
        expand_shards(arguments.shards)
    if arguments.save_features:
        from vl_plugins.retrieval.features import features_file

        for file in arguments.save_features:
            features_file(file)
    if arguments.queries and not (arguments.report and checkpoints):
        raise UserError("--queries needs --report, which shows the answers, and --checkpoint, whose model encodes them")
    if arguments.force and not arguments.csv:
        raise UserError("--force needs --csv: otherwise nothing is left out")
    if arguments.report:
        from vl_plugins.retrieval.report import report_file

        report_file(arguments.report)


def _identity(arguments: argparse.Namespace, *checkpoints: str) -> dict[str, Any]:
    """Return what is evaluated, for --csv: checkpoints or files of features, several for an ensemble."""
    from vl_plugins.integrations.encoding import checkpoint_digest

    return {
        "checkpoint": " + ".join(map(str, checkpoints)),
        "checkpoint_sha256": " + ".join(map(checkpoint_digest, checkpoints)),
        "shards": arguments.shards,
        "max_captions": arguments.max_captions,
        "precision": arguments.precision,
    }


def _drop_finished(arguments: argparse.Namespace) -> bool:
    """Drop what --csv has results of from the arguments; return whether anything is left."""
    from vl_plugins.retrieval.results_file import is_finished, read_rows

    rows = read_rows(arguments.csv)
    if arguments.force:
        return True

    def is_left(*files: str) -> bool:
        if not is_finished(rows, _identity(arguments, *files), arguments.protocol):
            return True
        print(f"{' + '.join(files)}: {arguments.csv} has the results", file=sys.stderr)
        return False

    checkpoints, features = arguments.checkpoint or [], arguments.features or []
    if arguments.ensemble:
        return is_left(*features, *checkpoints)
    left = [is_left(file) for file in checkpoints]
    for name in ("model", "checkpoint", "save_features"):
        values = getattr(arguments, name)
        if values and len(values) == len(checkpoints):
            setattr(arguments, name, [value for value, keep in zip(values, left, strict=True) if keep])
    arguments.features = [file for file in features if is_left(file)]
    return bool(arguments.checkpoint or arguments.features)


def _csv_rows(
    arguments: argparse.Namespace, results: Mapping[str, "Result"], members: Mapping[str, "Features"]
) -> Iterator[dict[str, Any]]:
    from vl_plugins.retrieval.evaluation import ENSEMBLE

    files = dict(zip(_names(arguments), arguments.checkpoint or (), strict=True))
    files = {name: files.get(name, name) for name in members}  # features are named by their files
    for name, result in results.items():
        identity = _identity(arguments, *(files.values() if name == ENSEMBLE else [files[name]]))
        for protocol, metrics in result.metrics.items():
            yield {"name": name, "protocol": protocol, **identity, **metrics}


def _names(arguments: argparse.Namespace) -> list[str]:
    """Name each checkpoint in tables."""
    checkpoints = arguments.checkpoint or []
    if len(checkpoints) == 1:
        return [(arguments.model or [Path(checkpoints[0]).stem])[0]]
    models = arguments.model or []
    if len(models) == len(checkpoints) == len(set(models)):
        return models
    return checkpoints


@contextlib.contextmanager
def _processes(arguments: argparse.Namespace) -> Iterator[tuple[int, int]]:
    """Yield the number of this process and how many there are."""
    if not arguments.checkpoint:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            from vl_plugins.utils.errors import UserError

            raise UserError(
                "several processes share out the encoding, and --features are encoded: run it without torchrun"
            )
        yield 0, 1
        return
    from vl_plugins.commands.torchrun import start_processes, stop_processes

    processes = start_processes()
    try:
        yield processes
    finally:
        stop_processes()


@contextlib.contextmanager
def _telling_the_others(arguments: argparse.Namespace) -> Iterator[None]:
    """Let the other processes begin once everything is checked, or end when something is wrong."""
    if not arguments.checkpoint:
        yield
        return
    from vl_plugins.commands.torchrun import agree_to_begin

    try:
        yield
    except BaseException:
        agree_to_begin(False)
        raise
    agree_to_begin(True)


def _encode_a_part(arguments: argparse.Namespace, processes: tuple[int, int]) -> int:
    """Do what all processes but the first do."""
    from vl_plugins.commands.torchrun import agree_to_begin

    if not agree_to_begin():
        return 2  # the first one has said why
    _encode(arguments, None, processes, progress=False)
    return 0


def _load_features(arguments: argparse.Namespace, collection: "Collection | None") -> dict[str, "Features"]:
    """Read the files of features, and compare them with the shards and with one another."""
    from vl_plugins.data.collection import first_captions
    from vl_plugins.retrieval.features import load_features

    members: dict[str, Features] = {}
    for file in arguments.features or ():
        features = load_features(file).check(file, normalize=arguments.normalize)
        if arguments.max_captions is not None:
            features = features.with_captions(first_captions(features.image_of_caption, arguments.max_captions))
        if collection is not None:
            features.matches(collection, file)
        elif members:
            first, of_first = next(iter(members.items()))
            features.matches(of_first, file, first)
        members[file] = features
    return members


def _encode(
    arguments: argparse.Namespace, collection: "Collection | None", processes: tuple[int, int], progress: bool
) -> dict[str, "Features"]:
    """Encode the shards with each checkpoint; without a result in all processes but the first."""
    if not arguments.checkpoint:
        return {}
    from vl_plugins.commands.torchrun import process_device
    from vl_plugins.integrations.checkpoints import load_model
    from vl_plugins.integrations.encoding import checkpoint_digest, encode_shards

    models = arguments.model or [None]
    models = models if len(models) == len(arguments.checkpoint) else models * len(arguments.checkpoint)
    device = process_device(arguments.device)
    members = {}
    for name, model, checkpoint in zip(_names(arguments), models, arguments.checkpoint, strict=True):
        loaded = load_model(
            checkpoint, model, model_config=arguments.model_config, device=device, precision=arguments.precision
        )
        features = encode_shards(
            loaded,
            arguments.shards,
            collection=collection,
            max_captions=arguments.max_captions,
            batch_size=arguments.batch_size,
            workers=arguments.workers,
            device=device,
            processes=processes,
            precision=arguments.precision,
            progress=f"encoding with {name}" if progress else None,
        )
        if features is None:
            continue
        features.description.update(
            {
                "model": model,
                "checkpoint": str(checkpoint),
                "checkpoint_sha256": checkpoint_digest(checkpoint),
                "shards": arguments.shards,
            }
        )
        members[name] = features.check(name)
    return members


def _settings(arguments: argparse.Namespace, members: Mapping[str, "Features"]) -> dict[str, str]:
    """Say what has been evaluated, for the report."""
    import torch

    import vl_plugins

    settings = {"protocol": ", ".join(arguments.protocol)}
    if arguments.shards:
        settings["shards"] = arguments.shards
    if arguments.max_captions:
        settings["captions of an image"] = f"the first {arguments.max_captions}"
    for name, features in members.items():
        described = features.description
        parts = [str(described[key]) for key in ("model", "checkpoint", "precision") if described.get(key)]
        if described.get("similarity"):
            parts.append(f"sets compared by {described['similarity']}")
        if described.get("checkpoint_sha256") not in (None, described.get("checkpoint")):
            parts.append(f"SHA-256 {described['checkpoint_sha256']}")
        settings[name] = ", ".join(parts) or "features of unknown origin"
    settings["versions"] = f"vl_plugins {vl_plugins.__version__}, torch {torch.__version__}"
    return settings


def _answer_queries(
    arguments: argparse.Namespace, members: Mapping[str, "Features"], trial: "Trial"
) -> "list[Answers]":
    from vl_plugins.commands.torchrun import process_device
    from vl_plugins.integrations.checkpoints import load_model
    from vl_plugins.integrations.encoding import encode_queries
    from vl_plugins.retrieval.queries import answer_queries

    device, precision = process_device(arguments.device), arguments.precision
    model = None if arguments.model is None else arguments.model[0]
    loaded = load_model(
        arguments.checkpoint[0], model, model_config=arguments.model_config, device=device, precision=precision
    )
    embeddings = encode_queries(loaded, arguments.queries, device, precision)
    features = members[_names(arguments)[0]].with_captions(trial.captions)
    return answer_queries(arguments.queries, embeddings, features, device=arguments.ranking_device)


def _write_report(
    arguments: argparse.Namespace,
    results: Mapping[str, "Result"],
    settings: Mapping[str, str],
    collection: "Collection | None",
    queries: "Sequence[Answers]",
) -> None:
    from vl_plugins.retrieval.evaluation import ENSEMBLE
    from vl_plugins.retrieval.report import write_report

    shown = ENSEMBLE if ENSEMBLE in results else next(iter(results))
    title = f"Image-text retrieval of {shown}, protocol {arguments.protocol[0]}"
    write_report(
        arguments.report,
        results[shown].ranks,
        _rows(results),
        title=title,
        settings=settings,
        collection=collection,
        queries=queries,
    )
    print(f"wrote {arguments.report}", file=sys.stderr)


def _rows(results: Mapping[str, "Result"]) -> dict[str, dict[str, float]]:
    """Return the metrics by name of the model, and of the protocol where it says more than `plain`."""
    return {
        name if of == "plain" else of if len(results) == 1 else f"{name} {of}": metrics
        for name, result in results.items()
        for of, metrics in result.metrics.items()
    }


def _print(results: Mapping[str, "Result"], items: "Collection | Features", trials: list) -> None:
    from vl_plugins.retrieval import format_metrics_table, format_precision_table

    images, captions = trials[0].images, len(trials[0].captions)
    left_out = len(items.image_of_caption) - captions
    more = f" ({left_out:,} more are not part of the protocol)" if left_out else ""
    print(f"{images:,} images, {captions:,} captions{more}")
    rows = _rows(results)
    judged = {name: metrics for name, metrics in rows.items() if name.endswith("eccv-caption")}
    others = {name: metrics for name, metrics in rows.items() if name not in judged}
    if others:
        print(format_metrics_table(others))
    if judged:
        print(format_precision_table(judged))
    for name, result in results.items():
        if result.circular_variances is not None:
            of = f" of {name}" if len(results) > 1 else ""
            print(
                "circular variance of the sets{}: images {:.4g}, captions {:.4g}".format(of, *result.circular_variances)
            )


def _as_json(
    arguments: argparse.Namespace,
    results: Mapping[str, "Result"],
    members: Mapping[str, "Features"],
    items: "Collection | Features",
) -> dict[str, Any]:
    from vl_plugins.retrieval.names import clip_benchmark_names, eccv_caption_names

    found = []
    for name, result in results.items():
        described = dict(members[name].description) if name in members else {}
        entry = {"name": name, **described, "metrics": result.metrics}
        if result.circular_variances is not None:
            entry["image_circular_variance"], entry["caption_circular_variance"] = result.circular_variances
        whole = next((result.metrics[of] for of in ("plain", "flickr30k-1k", "coco-5k") if of in result.metrics), None)
        # The same numbers as other tools print them.
        entry["clip_benchmark"] = None if whole is None else clip_benchmark_names(whole)
        entry["eccv_caption"] = eccv_caption_names(result.metrics) or None
        found.append(entry)
    return {
        "num_samples": int(items.image_of_caption.max()) + 1,
        "num_captions": len(items.image_of_caption),
        "shards": arguments.shards,
        "results": found,
    }
