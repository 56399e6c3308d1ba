"""``vl-plugins export``: a model as a folder that plain open_clip opens."""

import argparse
from pathlib import Path

__all__ = ["register", "run"]


def register(subparsers: argparse._SubParsersAction) -> None:
    """Add the ``export`` command."""
    parser = subparsers.add_parser(
        "export",
        help="write a model for use without this package",
        usage="%(prog)s [options] CHECKPOINT --to FOLDER",
        examples=[
            "vl-plugins export logs/run --to clip-coco",
            "vl-plugins export merged.pt --to clip-coco --results results.json",
        ],
        description="Write a folder that plain open_clip opens as local-dir:FOLDER, or as hf-hub:ORG/NAME once it is "
        "uploaded: weights as safetensors, configuration, tokenizer, and a model card with data, loss, flags and "
        "numbers. Embeddings stay as they are, bit by bit.",
    )
    add = parser.add_argument
    add("checkpoint", help="checkpoint or run folder, hf-hub:ORG/NAME, local-dir:FOLDER, or open_clip's pretrained tag")
    add("--to", metavar="FOLDER", required=True, help="folder to write; it must be empty or not exist")
    results = "what `vl-plugins evaluate --json` printed of this checkpoint, for the model card"
    add("--results", metavar="FILE", help=results)
    add("--model", metavar="NAME", help="open_clip model (default: that of the run)")
    config = "your own model configurations for open_clip (default: those of the run)"
    add("--model-config", metavar="FILE_OR_FOLDER", help=config)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the folder and say how to open it."""
    from vl_plugins.errors import require

    require("open_clip", extra="open-clip")
    from vl_plugins.integrations.open_clip.exporting import check_can_be_exported, check_folder, export_model
    from vl_plugins.integrations.open_clip.model_card import model_card
    from vl_plugins.integrations.saved_models import read_saved_model

    check_folder(arguments.to)
    saved = read_saved_model(arguments.checkpoint, arguments.model, arguments.model_config)
    check_can_be_exported(saved)
    card = model_card(saved, Path(arguments.to).name, arguments.results)
    export_model(saved, arguments.to, card)
    print(f'wrote {arguments.to}: open_clip.create_model_and_transforms("local-dir:{arguments.to}") opens it')
    return 0
