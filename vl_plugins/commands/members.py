"""The checkpoints and files of features of ``vl-plugins evaluate``, with short names."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from vl_plugins.commands.run_names import run_names, split_name
from vl_plugins.errors import UserError

__all__ = ["Member", "collect_members"]


class Member(NamedTuple):
    """A checkpoint, or a file of features.

    Attributes:
        name: in tables and reports.
        file: its path, or the pretrained tag of a checkpoint.
        is_checkpoint: whether it must be encoded.
        model: of a checkpoint, as ``--model``.
        save: file for the embeddings of a checkpoint.
    """

    name: str
    file: str
    is_checkpoint: bool
    model: str | None = None
    save: str | None = None


def collect_members(
    checkpoints: Sequence[str], features: Sequence[str], models: Sequence[str], save: Sequence[str]
) -> list[Member]:
    """Return the files of features, and then the checkpoints.

    Each is ``NAME=FILE``, or named by :func:`vl_plugins.commands.run_names.run_names`; a pretrained tag by its model.

    Args:
        checkpoints: files or pretrained tags.
        features: files.
        models: none, one, or one for each checkpoint.
        save: none, or one file for each checkpoint.

    Raises:
        UserError: a name or a file to write is given twice.
    """
    if len(models) != len(checkpoints):
        models = [*models, None][:1] * len(checkpoints)
    files: Sequence[str | None] = save or [None] * len(checkpoints)
    members = [Member(*split_name(argument), is_checkpoint=False) for argument in features]
    for argument, model, file in zip(checkpoints, models, files, strict=True):
        name, path = split_name(argument)
        is_tag = not Path(path).is_file()
        members.append(Member(name or (model or "" if is_tag else ""), path, True, model, file))
    names = run_names([(member.name, member.file) for member in members])
    for value, number in Counter([*names, *filter(None, save)]).items():
        if number > 1:
            raise UserError(f"{value} is given twice")
        if value == "ensemble":
            raise UserError("'ensemble' is the name of all models together; give another name: NAME=FILE")
    return [member._replace(name=name) for member, name in zip(members, names, strict=True)]
