"""``vl-plugins merge``: means of the weights of models, evaluated, and the best of them as a checkpoint."""

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vl_plugins.commands.encode import add_options, device_of
from vl_plugins.commands.run_names import run_names
from vl_plugins.errors import UserError

if TYPE_CHECKING:
    from vl_plugins.integrations.merging import Mean

__all__ = ["register", "run"]

WEIGHTS = (0.0, 0.25, 0.5, 0.75, 1.0)


def register(subparsers: argparse._SubParsersAction) -> None:
    """Add the ``merge`` command."""
    parser = subparsers.add_parser(
        "merge",
        help="average the weights of models, and keep the best mean",
        usage="%(prog)s [options] [NAME=]CHECKPOINT [NAME=]CHECKPOINT ...",
        examples=[
            "vl-plugins merge openai logs/run --model ViT-B-32-quickgelu \\\n"
            "    --shards 'shards/coco-val-{000000..000004}.tar' \\\n"
            "    --retain flickr30k-val.tar --out merged.pt --plot curve.png",
            "vl-plugins merge logs/seed-0 logs/seed-1 logs/seed-2 \\\n"
            "    --shards 'shards/coco-val-{000000..000004}.tar' --out mean.pt",
        ],
        description="With two models, a pretrained and a fine-tuned one, evaluate (1 - W) A + W B for each weight W. "
        "With more, evaluate each and the mean of all. Write the one with the best RSUM. The weight is chosen on "
        "--shards, so give validation data, and report numbers of another split.",
    )
    models = "models that differ in their weights: checkpoints or run folders, hf-hub:ORG/NAME, local-dir:FOLDER, or"
    parser.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT", help=f"{models} open_clip's pretrained tags")
    add = parser.add_argument
    add("--shards", required=True, help="validation data to choose by: shards, a table or folder")
    add("--out", required=True, metavar="FILE.pt", help="where to write the best as a checkpoint")
    weights = f"shares of the second of two models (default: {' '.join(f'{weight:g}' for weight in WEIGHTS)})"
    add("--weights", nargs="+", type=float, metavar="W", help=weights)
    add("--retain", metavar="SHARDS", help="data of what should not be forgotten, shown beside")
    norm = "data, such as that of the training, to recompute the running statistics of batch norm of means"
    add("--batch-norm", metavar="SHARDS", help=norm)
    add("--plot", metavar="FILE", help="draw the curves between two models, .png, .pdf or .svg")
    add("--model", metavar="NAME", help="open_clip model of all checkpoints (default: that of each run)")
    add_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Evaluate, print a table, and write the best model and the plot."""
    paths = run_names(arguments.checkpoints)
    _check(arguments, paths)
    shares = _shares(arguments, list(paths))
    merger = _merger(arguments, list(paths.values()))
    if any(1 not in of_models for of_models in shares.values()):
        merger.check_batch_norm()  # before anything is evaluated
    means: dict[str, Mean] = {}
    best = ""
    for name, of_models in shares.items():
        mean = merger.evaluate(of_models)
        if not best or mean.metrics["rsum"] > means[best].metrics["rsum"]:
            if best:
                means[best].weights.clear()  # of a large model, two in memory are enough
            best = name
        else:
            mean.weights.clear()
        means[name] = mean
    print(_table(means))
    shares_of_paths = dict(zip(paths.values(), shares[best], strict=True))
    merged = {"shares": shares_of_paths, "chosen_on": arguments.shards, "batch_norm": arguments.batch_norm}
    merger.models[0].write(arguments.out, means[best].weights, merged=merged)
    print(f"wrote {arguments.out}: {best}, with the best RSUM of {arguments.shards}; report numbers of another split")
    if arguments.plot:
        from vl_plugins.plots.curves import plot_merging_curve

        rsums = [mean.metrics["rsum"] for mean in means.values()]
        retained = [mean.retained["rsum"] for mean in means.values() if mean.retained is not None]
        plot_merging_curve(_weights(arguments), rsums, retained, list(paths), arguments.plot)
        print(f"wrote {arguments.plot}")
    return 0


def _check(arguments: argparse.Namespace, paths: Mapping[str, str]) -> None:
    """Raise an error for options that do not fit, before any model is loaded."""
    if len(paths) < 2:
        raise UserError("give two checkpoints or more")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("merge runs in one process: start it without torchrun")
    if len(paths) > 2 and (arguments.weights or arguments.plot):
        raise UserError(f"--weights and --plot are for two models, got {len(paths)}: of more, the mean is evaluated")
    for weight in _weights(arguments):
        if not 0 <= weight <= 1:
            raise UserError(f"--weights must be from 0 to 1, got {weight:g}")
    if Path(arguments.out).suffix != ".pt":
        raise UserError(f"--out must end in .pt, got {arguments.out}")
    out = Path(arguments.out)
    for path in paths.values():
        if out.exists() and Path(path).exists() and out.resolve().is_relative_to(Path(path).resolve()):
            raise UserError(f"--out {out} would replace a file of {path}: choose another name")
    if arguments.plot:
        from vl_plugins.plots.figures import check_picture

        check_picture(arguments.plot)
    from vl_plugins.data.reading import check_data

    for data in (arguments.shards, arguments.retain, arguments.batch_norm):
        if data is not None:
            check_data(data)


def _weights(arguments: argparse.Namespace) -> list[float]:
    """Return the different weights of the second model, from the smallest on."""
    return sorted(set(arguments.weights or WEIGHTS))


def _shares(arguments: argparse.Namespace, names: Sequence[str]) -> dict[str, tuple[float, ...]]:
    """Return the shares of the models in each mean, by the name of its row."""
    shares: dict[str, tuple[float, ...]] = {}
    if len(names) == 2:
        for weight in _weights(arguments):
            row = f"{weight:g}"
            if weight in (0, 1):
                row += f" ({names[int(weight)]})"
            shares[row] = (1 - weight, weight)
        return shares
    for name in names:
        shares[name] = tuple(float(name == model) for model in names)
    shares["mean of all"] = (1 / len(names),) * len(names)
    return shares


def _merger(arguments: argparse.Namespace, checkpoints: Sequence[str]) -> Any:
    """Return the models, the one to evaluate with, and the data."""
    from vl_plugins.data import ShardDataset, evaluation_loader, read_collection
    from vl_plugins.data.records import as_rule
    from vl_plugins.integrations.loading import load_model
    from vl_plugins.integrations.merging import Merger
    from vl_plugins.integrations.saved_models import read_saved_model

    device = device_of(arguments)
    rule = as_rule(arguments.caption_lines, arguments.caption_fields)
    collections = {}
    for name in ("shards", "retain", "batch_norm"):
        data = getattr(arguments, name)
        if data is not None:
            collections[name] = read_collection(data, caption_lines=rule)
    config = arguments.model_config
    models = [read_saved_model(checkpoint, arguments.model, config) for checkpoint in checkpoints]
    model, transform, tokenizer = load_model(
        checkpoints[0], arguments.model, model_config=config, device=device, precision=arguments.precision
    )
    loaders = {}
    for name, collection in collections.items():
        inputs = getattr(model, "inputs", "images")
        dataset = ShardDataset(
            collection, transform, tokenizer, inputs=inputs, max_image_pixels=arguments.max_image_pixels
        )
        loaders[name] = evaluation_loader(dataset, arguments.batch_size, workers=arguments.workers)
    return Merger(models, model, device=device, precision=arguments.precision, **loaders)


def _table(means: Mapping[str, "Mean"]) -> str:
    """Return the metrics of all means, one in a row, with those of ``--retain`` beside them."""
    from vl_plugins.retrieval.metrics import metrics_table
    from vl_plugins.tables import align_columns

    rows = metrics_table({name: mean.metrics for name, mean in means.items()})
    retained = {name: mean.retained for name, mean in means.items() if mean.retained is not None}
    if retained:
        heading, *cells = metrics_table(retained)
        rows[0] += ["| retain:", *heading[1:]]
        for row, retained_row in zip(rows[1:], cells, strict=True):
            row += ["|", *retained_row[1:]]
    return "\n".join("  ".join(row).rstrip() for row in align_columns(rows))
