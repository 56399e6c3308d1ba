"""The best epoch of a training, and when to stop.

A validation is the best one if its metric is better than that of all validations before it. ``best.pt`` holds the
weights of that epoch. What was compared so far is in every checkpoint, so that a resumed training compares as if it had
not been interrupted.
"""

import logging
import math
import os
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from open_clip_train.distributed import broadcast_object, is_master

from vl_plugins.errors import UserError
from vl_plugins.integrations.loading import BEST
from vl_plugins.integrations.open_clip.checkpoints import read_checkpoint
from vl_plugins.integrations.open_clip.host import weights_of

__all__ = ["BestCheckpoint", "BestEpoch"]

ENTRY = "best"  # of a checkpoint: a BestEpoch as a dict
# Names of metrics of which the smallest is the best have one of these.
SMALLER_IS_BETTER = ("loss", "rank")
SAME = 1e-9  # relative difference of values that count as equal
# Entries of a checkpoint with which a training goes on.
OF_TRAINING = ("optimizer", "scaler", "global_step", "samples_seen")


class BestEpoch(NamedTuple):
    """What the validations of a training were so far.

    Attributes:
        metric: which is compared.
        value: the best one; NaN if there is none.
        epoch: of that value; 0 is before the first step, -1 if there is none.
        evaluations_since: validations since then.
    """

    metric: str
    value: float = math.nan
    epoch: int = -1
    evaluations_since: int = 0

    def after(self, value: float, epoch: int) -> "BestEpoch":
        """Return the best epoch after another validation."""
        # Equal recalls may differ in the last digits of their sum.
        is_equal = math.isclose(value, self.value, rel_tol=SAME)
        is_beyond = value < self.value if self._minimizes() else value > self.value
        is_first = math.isnan(self.value) and not math.isnan(value)
        if is_first or (is_beyond and not is_equal):
            return BestEpoch(self.metric, value, epoch)
        return self._replace(evaluations_since=self.evaluations_since + 1)

    def _minimizes(self) -> bool:
        return any(word in self.metric for word in SMALLER_IS_BETTER)


class BestCheckpoint:
    """Writes ``best.pt``, and ends a training without improvement.

    Args:
        args: the launcher's options. ``epochs`` becomes the current epoch to end the training.
        add_entries: returns a checkpoint with the entries that the launcher's checkpoints have beside open_clip's.
        write: of a checkpoint and a file.

    Attributes:
        best: the best epoch so far.
    """

    def __init__(
        self,
        args: Namespace,
        add_entries: Callable[[dict[str, Any]], dict[str, Any]],
        write: Callable[[dict[str, Any], Path], None],
    ):
        self.args, self.add_entries, self.write = args, add_entries, write
        self.best = BestEpoch(args.save_best)

    @property
    def entry(self) -> dict[str, Any]:
        """The entry of every checkpoint for :meth:`resume`."""
        return {ENTRY: self.best._asdict()}

    def compare(self, metrics: Mapping[str, float], epoch: int, model: Any) -> None:
        """Compare the metrics of a validation; the first process has them, and all processes call this.

        Args:
            metrics: as in ``results.jsonl``; {} if nothing was validated.
            epoch: how many were trained.
            model: as open_clip validates it; a task in 4.x.
        """
        value = metrics.get(self.best.metric)
        if self.args.distributed:
            value = broadcast_object(self.args, value)
        if value is None:
            if metrics:
                logging.info(f"Epoch {epoch} has no {self.best.metric}, so it does not count for --save-best")
            return
        self.best = self.best.after(float(value), epoch)
        if self.best.evaluations_since == 0:
            # With FSDP, all processes gather the weights.
            checkpoint = {"epoch": epoch, "name": self.args.name, **weights_of(model)}
            if self.args.save_logs:
                self.write(self.add_entries(checkpoint), Path(self.args.checkpoint_path) / BEST)
        if is_master(self.args):
            logging.info(f"The best {self.best.metric} is {self.best.value:.4f}, of epoch {self.best.epoch}")
        self._end_without_improvement(epoch)

    def resume(self, checkpoint: Mapping[str, Any], file: str) -> None:
        """Go on from a checkpoint.

        Args:
            checkpoint: with or without an entry of :attr:`entry`.
            file: of the checkpoint.

        Raises:
            UserError: the entry is damaged.
        """
        if ENTRY not in checkpoint:
            return
        best = _read_entry(checkpoint, file)
        if best.metric != self.best.metric:
            logging.info(f"Epochs were compared by {best.metric} so far: they are compared anew by {self.best.metric}")
            return
        self.best = best
        saves = self.args.logs and self.args.logs.lower() != "none"
        if saves and is_master(self.args) and best.epoch >= 0:
            self._restore_file(file)
        self._end_without_improvement(checkpoint["epoch"])

    def last_line(self) -> str:
        """Return the last line of the log."""
        metric, value, epoch, _ = self.best
        if epoch < 0:
            return f"No epoch has a {metric} that is a number, so there is no best one"
        if epoch == 0:
            return (
                f"No epoch has a better {metric} than the weights before the first step, {value:.4f}, which {BEST} "
                "holds. Try a smaller --lr, or `vl-plugins merge` of both, which is often better than either"
            )
        return f"The best {metric} is {value:.4f}, of epoch {epoch}: {Path(self.args.checkpoint_path) / BEST}"

    def _end_without_improvement(self, epoch: int) -> None:
        patience = self.args.patience
        if patience is None or self.best.evaluations_since < patience:
            return
        if is_master(self.args):
            logging.info(
                f"No better {self.best.metric} in {patience} validations: the training ends after epoch {epoch}"
            )
        self.args.epochs = epoch

    def _restore_file(self, resumed: str) -> None:
        """Let ``best.pt`` hold the weights of the best epoch again.

        A training with another name has none, and one that was interrupted may have that of a later epoch, which is
        trained again.
        """
        own = Path(self.args.checkpoint_path) / BEST
        folder = Path(resumed).parent
        for file in (own, folder / BEST, folder / f"epoch_{self.best.epoch}.pt", Path(resumed)):
            checkpoint = read_checkpoint(file) if file.is_file() else {}
            if not self._is_of_best_epoch(checkpoint, file):
                continue
            if file != own:
                for name in OF_TRAINING:
                    checkpoint.pop(name, None)
                self.write(checkpoint, own)
            return
        lost = f"The weights of the best epoch, {self.best.epoch}, are no longer there"
        if own.exists():
            os.remove(own)
            lost += f", and {own}, of an epoch that is trained again, is removed"
        logging.warning(lost)

    def _is_of_best_epoch(self, checkpoint: Mapping[str, Any], file: Path) -> bool:
        if checkpoint.get("epoch") != self.best.epoch or ENTRY not in checkpoint:
            return False
        best = _read_entry(checkpoint, str(file))
        return best._replace(evaluations_since=0) == self.best._replace(evaluations_since=0)


def _read_entry(checkpoint: Mapping[str, Any], file: str) -> BestEpoch:
    """Return the best epoch of a checkpoint, whose content is not to be trusted."""
    entry = checkpoint[ENTRY]
    is_damaged = not isinstance(entry, Mapping) or list(entry) != list(BestEpoch._fields)
    if not is_damaged:
        for value, kind in zip(entry.values(), (str, float, int, int), strict=True):
            is_damaged = is_damaged or type(value) is not kind
    if is_damaged:
        raise UserError(f"{file}: its best epoch is damaged: {entry!r:.80}")
    return BestEpoch(**entry)
