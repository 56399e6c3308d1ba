"""Model cards: how a model is opened, how it was trained, and what it reached."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vl_plugins import __version__
from vl_plugins.data.files import sha256
from vl_plugins.errors import MALFORMED_CONTENT, UserError, user_errors
from vl_plugins.integrations.open_clip.checkpoints import read_params
from vl_plugins.integrations.open_clip.flags import default_options, flag
from vl_plugins.integrations.saved_models import SavedModel
from vl_plugins.plots.curves import read_results
from vl_plugins.retrieval.metrics import metrics_table

__all__ = ["model_card"]

# Flags that say where and how a training ran, but not what was trained, and those that the card has in words.
NOT_SHOWN = {"cache_dir", "checkpoint_path", "config", "copy_codebase", "debug", "delete_previous_checkpoint"}
NOT_SHOWN |= {"device", "dist_backend", "dist_url", "distributed", "horovod", "local_rank", "log_every_n_steps"}
NOT_SHOWN |= {"log_level", "log_local", "log_path", "logs", "loss", "loss_kwargs", "model", "model_config", "name"}
NOT_SHOWN |= {"no_set_device_rank", "pretrained", "rank", "remote_sync", "remote_sync_frequency"}
NOT_SHOWN |= {"remote_sync_protocol", "report_to", "resume", "save_frequency", "save_most_recent", "tensorboard"}
NOT_SHOWN |= {"tensorboard_path", "trace", "train_data", "val_data", "wandb", "wandb_notes", "wandb_project_name"}
NOT_SHOWN |= {"workers"}

FRONT = """\
---
library_name: open_clip
pipeline_tag: zero-shot-image-classification
tags:
- clip
- image-text-retrieval
---
"""


def model_card(saved: SavedModel, name: str, results: str | Path | None = None) -> str:
    """Return the text of a model card in Markdown.

    Data, loss and flags are those of the run that the checkpoint lies in. Numbers are those of its epoch in the run's
    ``results.jsonl``, and of a file of results, with intervals where it compares models.

    Args:
        saved: a model of open_clip.
        name: of the model.
        results: what ``vl-plugins evaluate --json`` has printed of this checkpoint.

    Raises:
        UserError: ``results`` are of other checkpoints, or are no results.
    """
    params = read_params(saved.file) if Path(saved.file).is_file() else {}
    lines = [f"# {name}", "", *_model_lines(saved), "", *_usage_lines(name)]
    training = _training_lines(saved, params)
    if training:
        lines += ["", "## Training", "", *training]
    numbers = _lines_of_run(saved, params)
    if results is not None:
        numbers += _lines_of_results(saved, results)
    if numbers:
        lines += ["", "## Image-text retrieval", "", *numbers]
        lines += ["Recalls and RSUM are in percent; i2t ranks captions for an image, t2i images for a caption."]
    lines += ["", f"Written by `vl-plugins export` of vl_plugins {__version__}."]
    return FRONT + "\n".join(lines) + "\n"


def _model_lines(saved: SavedModel) -> list[str]:
    assert saved.settings is not None
    text = f"A model of open_clip, {saved.settings['model']}"
    if saved.settings["pretrained"]:
        text += f", which began with the weights `{saved.settings['pretrained']}`"
    lines = [f"{text}."]
    merged = saved.content.get("merged")
    if merged:
        shares = [f"{share:g} of `{path}`" for path, share in merged["shares"].items()]
        sentence = f"Its weights are a mean, chosen on `{merged['chosen_on']}`: {', '.join(shares)}."
        if merged["batch_norm"]:
            sentence += f" Statistics of batch norm were computed anew on `{merged['batch_norm']}`."
        lines.append(sentence)
    return lines


def _usage_lines(name: str) -> list[str]:
    return [
        "```python",
        "import open_clip",
        "",
        f'model, _, transform = open_clip.create_model_and_transforms("local-dir:{name}")',
        f'tokenizer = open_clip.get_tokenizer("local-dir:{name}")',
        "```",
    ]


def _training_lines(saved: SavedModel, params: Mapping[str, Any]) -> list[str]:
    """Return data, loss and flags, as far as the checkpoint or its run tells."""
    settings = {**params, **saved.content.get("args", {})}
    lines = []
    if "epoch" in saved.content:
        of_epochs = f" of {params['epochs']}" if "epochs" in params else ""
        lines.append(f"- Epoch: {saved.content['epoch']}{of_epochs}")
    if params.get("train_data"):
        lines.append(f"- Data: `{params['train_data']}`")
    if params.get("val_data"):
        lines.append(f"- Validation data: `{params['val_data']}`")
    if params.get("world_size", 1) > 1:
        lines.append(f"- Processes: {params['world_size']}, each with the batch size of the flags")
    if settings.get("loss"):
        options = [f"{option}={value}" for option, value in (settings.get("loss_kwargs") or {}).items()]
        lines.append(f"- Loss: {settings['loss']} of vl_plugins ({', '.join(options)})")
    elif params:
        lines.append(f"- Loss: {'SigLipLoss' if params.get('siglip') else 'ClipLoss'} of open_clip")
    flags = _flags(params)
    if flags:
        lines += ["", "Flags that differ from the defaults:", "", "| flag | value |", "|---|---|"]
        for option, value in flags.items():
            lines.append(f"| `{flag(option)}` | {_cell(str(value))} |")
    return lines


def _flags(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a run that say what was trained and differ from the defaults."""
    flags = {}
    for option, default in vars(default_options()).items():
        value = params.get(option, default)
        if option not in NOT_SHOWN and value not in (default, "", None):
            flags[option] = value
    return flags


def _lines_of_run(saved: SavedModel, params: Mapping[str, Any]) -> list[str]:
    """Return the table of the checkpoint's epoch in ``results.jsonl``; none without that file or epoch."""
    file = Path(saved.file).parent / "results.jsonl"
    if not file.is_file() or "epoch" not in saved.content:
        return []
    for row in read_results(file):
        if row["epoch"] == saved.content["epoch"]:
            source = f"validation after epoch {row['epoch']}"
            if params.get("val_data"):
                source += f" on `{params['val_data']}`"
            return [f"In the {source}:", "", *_table({"validation": row}), ""]
    return []


def _lines_of_results(saved: SavedModel, results: str | Path) -> list[str]:
    """Return the table of a checkpoint in a file of results, and differences from a baseline with their intervals."""
    with user_errors(f"--results {results} is not what `vl-plugins evaluate --json` prints", *MALFORMED_CONTENT):
        content = json.loads(Path(results).read_bytes())
        row = _row_of(saved, content["results"])
        if row is None:
            checkpoints = sorted({str(row.get("checkpoint", row["name"])) for row in content["results"]})
            raise UserError(f"--results {results} are of {', '.join(checkpoints)}, not of {saved.file} as it is now")
        lines = [f"On `{content['shards']}`:", "", *_table(row["metrics"]), ""]
        for result, differences in content.get("differences", {}).items():
            if row["name"] in differences:
                sentence = _difference(differences[row["name"]], content["baseline"])
                lines += [f"- {result}: {sentence}"]
        return [*lines, ""]


def _row_of(saved: SavedModel, rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the results of a checkpoint, found by the content of a file, or the name of a tag or model of the hub."""
    if Path(saved.file).is_file():
        digest = sha256(saved.file)
        return next((row for row in rows if row.get("checkpoint_sha256") == digest), None)
    return next((row for row in rows if row.get("checkpoint") == str(saved.file)), None)


def _difference(by_metric: Mapping[str, Mapping[str, Any]], baseline: str) -> str:
    """Return the difference of RSUM, or of mAP@R, from the baseline in words."""
    metric = "rsum" if "rsum" in by_metric else next(iter(by_metric))
    values = by_metric[metric]
    seeds, baseline_seeds = values["seeds"]
    label = "RSUM" if metric == "rsum" else metric
    text = f"{label} − {baseline}: {values['difference']:+.1f}, "
    text += f"95 % interval [{values['low']:+.1f}, {values['high']:+.1f}], "
    return text + f"from {values['images']:,} images, seeds {seeds} vs {baseline_seeds}"


def _table(metrics: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return the recalls of rows, and below them what ECCV Caption judges, as Markdown."""
    judged = {name: of_row for name, of_row in metrics.items() if "rsum" not in of_row}
    recalls = {name: of_row for name, of_row in metrics.items() if "rsum" in of_row}
    lines = []
    for rows, is_judged in ((recalls, False), (judged, True)):
        if not rows:
            continue
        heading, *cells = metrics_table(rows, is_judged)
        lines += ["", f"| {' | '.join(heading)} |", f"|{'---|' * len(heading)}"]
        for row in cells:
            lines.append(f"| {' | '.join(map(_cell, row))} |")
    return lines[1:]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
