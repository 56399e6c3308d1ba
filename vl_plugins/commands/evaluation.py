"""The work of ``vl-plugins evaluate``, once its options have been checked."""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

import vl_plugins
from vl_plugins.commands.members import Member
from vl_plugins.data.collection import Collection, first_captions, read_collection
from vl_plugins.distributed import process_device, start_processes, stop_processes
from vl_plugins.errors import UserError
from vl_plugins.integrations.checkpoints import load_model
from vl_plugins.integrations.encoding import checkpoint_digest, encode_queries, encode_shards
from vl_plugins.integrations.torch_files import check_device
from vl_plugins.retrieval import format_metrics_table, format_precision_table
from vl_plugins.retrieval.evaluation import ENSEMBLE, Result, evaluate_features
from vl_plugins.retrieval.features import Features, features_file, load_features, save_features
from vl_plugins.retrieval.protocols import Trial, check_number, prepare
from vl_plugins.retrieval.queries import Answers, answer_queries
from vl_plugins.retrieval.report import report_file, write_report
from vl_plugins.retrieval.results_file import append_rows, is_finished, read_rows

__all__ = ["evaluate"]


def evaluate(arguments: argparse.Namespace, members: Sequence[Member]) -> int:
    """Evaluate some members and print their metrics; return the exit status."""
    check_device("--ranking-device", arguments.ranking_device)
    if arguments.device is not None:
        check_device("--device", arguments.device)
    for member in members:
        if member.save is not None:
            features_file(member.save)
    if arguments.report:
        report_file(arguments.report)
    rank, world_size = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
    if arguments.csv and not arguments.force:
        members = _unfinished(arguments, members, quiet=rank > 0)
        if not members:
            print("nothing is left to evaluate; --force evaluates again", file=sys.stderr)
            return 0
    checkpoints = [member for member in members if member.is_checkpoint]
    if world_size > 1 and not checkpoints:
        raise UserError("--features are encoded already, so there is no work for several processes: leave out torchrun")
    features: dict[str, Features] = {}
    collection = read_collection(arguments.shards) if arguments.shards else None
    if rank == 0:  # an error ends the other processes, which wait for this one
        if collection is not None:
            for protocol in arguments.protocol:
                check_number(protocol, len(collection), arguments.shards)
        features = {
            member.name: _read_features(arguments, member.file) for member in members if not member.is_checkpoint
        }
    encoded, queries = _encode(arguments, checkpoints, collection)
    if rank > 0:
        return 0
    if collection is not None and arguments.max_captions is not None:
        collection = collection.with_captions(first_captions(collection.image_of_caption, arguments.max_captions))
    features |= encoded
    items, source = collection or next(iter(features.values())), arguments.shards or next(iter(features))
    for name, member in features.items():
        member.matches(items, name, source)
    trials = [prepare(protocol, items, source) for protocol in arguments.protocol]
    results = evaluate_features(
        features,
        trials,
        ensemble=arguments.ensemble,
        device=arguments.ranking_device,
        ranks=arguments.report is not None,
        progress=sys.stderr.isatty(),
    )
    # First of all: a full disk must not cost the numbers.
    if arguments.json:
        print(json.dumps(_as_json(arguments, members, results, features, items), indent=2), flush=True)
    else:
        _print(results, items, trials)
    if arguments.csv:
        append_rows(arguments.csv, _csv_rows(arguments, members, results))
    for member in members:
        if member.save is not None:
            save_features(features[member.name], member.save)
    if arguments.report:
        captions, answers = trials[0].captions, ()
        if queries is not None:
            first = features[checkpoints[0].name].with_captions(captions)
            answers = answer_queries(arguments.queries, queries, first, device=arguments.ranking_device)
        shown = collection and collection.with_captions(captions)
        _write_report(arguments, members, results, features, shown, answers)
    return 0


def _read_features(arguments: argparse.Namespace, file: str) -> Features:
    features = load_features(file).check(file, normalize=arguments.normalize)
    if arguments.max_captions is None:
        return features
    return features.with_captions(first_captions(features.image_of_caption, arguments.max_captions))


def _encode(
    arguments: argparse.Namespace, checkpoints: Sequence[Member], collection: Collection | None
) -> tuple[dict[str, Features], torch.Tensor | None]:
    """Encode the shards with each checkpoint, and the queries with the first; all processes share the work.

    Returns:
        Features by name, and embeddings of the queries; nothing in all processes but the first.
    """
    features: dict[str, Features] = {}
    queries = None
    if collection is None or not checkpoints:
        return features, queries
    processes = start_processes()
    device, precision = process_device(arguments.device), arguments.precision
    try:
        for member in checkpoints:
            loaded = load_model(
                member.file, member.model, model_config=arguments.model_config, device=device, precision=precision
            )
            encoded = encode_shards(
                loaded,
                collection,
                max_captions=arguments.max_captions,
                batch_size=arguments.batch_size,
                workers=arguments.workers,
                device=device,
                processes=processes,
                precision=precision,
                progress=f"encoding with {member.name}" if sys.stderr.isatty() else None,
            )
            if encoded is None:
                continue
            found, _ = encoded
            origin = {
                "model": member.model,
                "checkpoint": member.file,
                "checkpoint_sha256": checkpoint_digest(member.file),
                "shards": arguments.shards,
            }
            found.description.update(origin)
            features[member.name] = found.check(member.name)
            if arguments.queries and queries is None:
                queries = encode_queries(loaded, arguments.queries, device, precision)
    finally:
        stop_processes()
    return features, queries


def _identity(arguments: argparse.Namespace, members: Sequence[Member]) -> dict[str, Any]:
    """Return what is evaluated, for --csv: one member, or all of an ensemble."""
    return {
        "checkpoint": " + ".join(member.file for member in members),
        "checkpoint_sha256": " + ".join(checkpoint_digest(member.file) for member in members),
        "shards": arguments.shards,
        "max_captions": arguments.max_captions,
        "precision": arguments.precision,
    }


def _unfinished(arguments: argparse.Namespace, members: Sequence[Member], quiet: bool) -> list[Member]:
    """Return the members without results in --csv; of an ensemble all or none."""
    rows = read_rows(arguments.csv)
    left: list[Member] = []
    for together in [members] if arguments.ensemble else [[member] for member in members]:
        if not is_finished(rows, _identity(arguments, together), arguments.protocol):
            left += together
        elif not quiet:
            print(f"{' + '.join(member.file for member in together)}: {arguments.csv} has the results", file=sys.stderr)
    return left


def _csv_rows(
    arguments: argparse.Namespace, members: Sequence[Member], results: Mapping[str, Result]
) -> Iterator[dict[str, Any]]:
    for name, result in results.items():
        identity = _identity(arguments, [member for member in members if name in (member.name, ENSEMBLE)])
        for protocol, metrics in result.metrics.items():
            yield {"name": name, "protocol": protocol, **identity, **metrics}


def _write_report(
    arguments: argparse.Namespace,
    members: Sequence[Member],
    results: Mapping[str, Result],
    features: Mapping[str, Features],
    collection: Collection | None,
    answers: Sequence[Answers],
) -> None:
    settings = {"protocol": ", ".join(arguments.protocol)}
    if arguments.shards:
        settings["shards"] = arguments.shards
    if arguments.max_captions:
        settings["captions per image"] = f"the first {arguments.max_captions}"
    for name, described in ((name, member.description) for name, member in features.items()):
        parts = [str(described[key]) for key in ("model", "checkpoint", "precision") if described.get(key)]
        if described.get("similarity"):
            parts.append(f"sets compared by {described['similarity']}")
        if described.get("checkpoint_sha256") not in (None, described.get("checkpoint")):
            parts.append(f"SHA-256 {described['checkpoint_sha256']}")
        settings[name] = ", ".join(parts) or "features of unknown origin"
    settings["versions"] = f"vl_plugins {vl_plugins.__version__}, torch {torch.__version__}"
    shown = ENSEMBLE if ENSEMBLE in results else next(iter(results))
    ranks = results[shown].ranks
    assert ranks is not None  # --report asks for them
    write_report(
        arguments.report,
        ranks,
        _rows(results),
        title=f"Image-text retrieval of {shown}, protocol {arguments.protocol[0]}",
        settings=settings,
        paths={
            _row_name(results, member.name, protocol): member.file
            for member in members
            for protocol in results[member.name].metrics
        },
        collection=collection,
        queries=answers,
    )
    print(f"wrote {arguments.report}", file=sys.stderr)


def _rows(results: Mapping[str, Result]) -> dict[str, dict[str, float]]:
    return {
        _row_name(results, name, protocol): metrics
        for name, result in results.items()
        for protocol, metrics in result.metrics.items()
    }


def _row_name(results: Mapping[str, Result], name: str, protocol: str) -> str:
    return name if protocol == "plain" else protocol if len(results) == 1 else f"{name} {protocol}"


def _print(results: Mapping[str, Result], items: Collection | Features, trials: Sequence[Trial]) -> None:
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
            owner = f" of {name}" if len(results) > 1 else ""
            image, caption = result.circular_variances
            print(f"circular variance of the sets{owner}: images {image:.4g}, captions {caption:.4g}")


def _as_json(
    arguments: argparse.Namespace,
    members: Sequence[Member],
    results: Mapping[str, Result],
    features: Mapping[str, Features],
    items: Collection | Features,
) -> dict[str, Any]:
    found = []
    files = {member.name: member.file for member in members if not member.is_checkpoint}
    for name, result in results.items():
        entry: dict[str, Any] = {"name": name, **({"features": files[name]} if name in files else {})}
        entry |= {**(features[name].description if name in features else {}), "metrics": result.metrics}
        if result.circular_variances is not None:
            entry["image_circular_variance"], entry["caption_circular_variance"] = result.circular_variances
        found.append(entry)
    return {
        "num_samples": int(items.image_of_caption.max()) + 1,
        "num_captions": len(items.image_of_caption),
        "shards": arguments.shards,
        "results": found,
    }
