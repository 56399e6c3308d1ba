"""A metric loss in the place of open_clip's ClipLoss.

With ``--accum-freq N``, open_clip calls the loss L of the whole batch N times in a step. Pass n has the graph of the
n-th part of the images and texts; all other features are constants. So the sum of the N gradients of a feature is
correct, but that of a number s that is in every pass, such as the scale, would be N dL/ds. Scale, bias and parameters
of the loss are therefore constants in all passes but the last.
"""

import contextlib
import copy
import logging
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn

from vl_plugins.distributed import DistributedLoss, world_size
from vl_plugins.errors import MALFORMED_CONTENT, UserError, user_errors
from vl_plugins.integrations.components import create_loss_and_miner, takes_one_set
from vl_plugins.integrations.open_clip.steps import Steps
from vl_plugins.losses.cross_modal import CrossModalLoss
from vl_plugins.losses.statistics import collected_statistics, latest_statistics
from vl_plugins.losses.warmup import Warmup
from vl_plugins.numerics import eager
from vl_plugins.registry import losses_with_scale

__all__ = ["LEARNED", "TwoTowerLoss", "build_loss", "compares_one_set", "create_parts"]

LEARNED = "learned"  # of --loss-kwargs scale: the model's own
MODEL_NUMBERS = ("scale", "bias")  # numbers of a loss that may be the model's logit scale and bias
MAX_SKIPPED = 10  # a training with a GradScaler ends after so many steps in a row without a finite loss


class LoggedLosses(dict[str, Tensor]):
    """The loss of a step by its name, ``<name>_loss``, and statistics of its pairs.

    open_clip 3.x adds up ``values()`` and logs ``items()``. So ``values()`` are the losses alone, while ``items()`` has
    the statistics, too. 4.x adds up the items whose names end in "_loss".
    """

    def values(self) -> Any:
        return [value for name, value in self.items() if name.endswith("_loss")]


class TwoTowerLoss(nn.Module):
    """Calls a pytorch-metric-learning loss on the two towers' features, the way open_clip's train step calls ClipLoss.

    Image to text and text to image are added, see :class:`~vl_plugins.losses.CrossModalLoss`. With several processes,
    each compares its own rows with those of all if the loss allows it, and otherwise the joined batch. The gradients,
    which data parallelism averages, are those of one process with the joined batch.

    Args:
        name: the loss is logged as ``<name>_loss``.
        loss: called as ``loss(embeddings, labels, indices_tuple, ref_emb, ref_labels)``.
        miner: called as ``miner(embeddings, labels, ref_emb, ref_labels)`` for each direction.
        model_numbers: which of ``"scale"`` and ``"bias"`` are the model's logit scale and bias.
        one_set: compare images and texts as one set of embeddings, for losses without ``ref_emb``.
        steps: the step, by which ``warmup_steps`` count, and its labels; without them all images are different.

    Attributes:
        compares_own_rows: whether each process compares its own rows only, with those of all.
        has_scaler: whether the training has a GradScaler, which leaves out steps whose loss is not finite.
    """

    def __init__(
        self,
        name: str,
        loss: Any,
        miner: nn.Module | None = None,
        model_numbers: Sequence[str] = (),
        *,
        one_set: bool = False,
        steps: Steps | None = None,
    ):
        super().__init__()
        self.name, self.model_numbers, self.has_scaler = name, tuple(model_numbers), False
        self.steps = Steps() if steps is None else steps
        self.loss: Any = loss
        self.compares_own_rows = miner is None and not one_set and getattr(loss, "compares_own_rows", False)
        self.one_set = one_set
        self.skipped_steps: list[int] = []
        self.compare: nn.Module = CrossModalLoss(loss, miner, one_set)
        if self.compares_own_rows:
            self.loss.gather_across_devices = True
        else:
            self.compare = DistributedLoss(self.compare)

    def forward(
        self,
        image_features: Tensor,
        text_features: Tensor,
        logit_scale: Tensor,
        logit_bias: Tensor | None = None,
        output_dict: bool = False,
        image_slots: Tensor | None = None,
        text_slots: Tensor | None = None,
    ) -> dict[str, Tensor] | Tensor:
        """Return the loss; with ``output_dict`` as ``{"<name>_loss": loss}``.

        In a step that is logged, the value of the loss is its mean over the processes, and the dict has the
        statistics of :mod:`vl_plugins.losses.statistics`, too.

        Args:
            image_features: (B, D), or sets (B, K, D).
            text_features: (k * B, D) or (k * B, K, D), the k captions of an image side by side.
            logit_scale: 0-D or (1,), already exponentiated.
            logit_bias: 0-D or (1,), or None.
            image_slots: (B, K, D), from which the sets were made; for the regularization.
            text_slots: (k * B, K, D).

        Raises:
            ValueError: texts or labels that do not fit the images.
            UserError: the loss is NaN or infinite, with a GradScaler in ten steps in a row.
        """
        is_last_pass = self.steps.count_pass()
        is_logged = output_dict and is_last_pass and self.steps.is_logged
        numbers = {"scale": logit_scale, "bias": logit_bias}
        options: dict[str, Any] = {}
        for name in self.model_numbers:
            number = numbers[name]
            options[name] = number if number is None or is_last_pass else number.detach()
        if hasattr(self.loss, "regularization"):
            options |= {"slots": image_slots, "ref_slots": text_slots}
        parameters = list(self.loss.parameters())
        with _as_constants([] if is_last_pass else parameters):
            loss, statistics = self._compare(image_features, text_features, options, is_logged)
        # DistributedDataParallel fails if a parameter has no part in a backward pass.
        for parameter in (logit_scale, logit_bias, *parameters):
            if parameter is not None:
                loss = loss + 0 * parameter.sum()
        if not output_dict:
            return loss
        if is_logged:
            loss, statistics = _means_over_processes(loss, statistics)
        return LoggedLosses({f"{self.name}_loss": loss}, **statistics)

    @eager
    def _compare(
        self, images: Tensor, texts: Tensor, options: dict[str, Any], is_logged: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss, and statistics of its pairs if the step is logged."""
        for module in self.loss.modules():
            if isinstance(module, Warmup):
                module.step = self.steps.number
        for name, values in self.steps.ids.items():
            if name == "labels" or not self.one_set:  # which has no texts apart that ids could be of
                options[name] = values.to(images.device)
        with collected_statistics(self.loss) if is_logged else contextlib.nullcontext():
            loss = self.compare(images, ref_emb=texts, **options)
        statistics = latest_statistics(self.loss) if is_logged else {}
        if not loss.isfinite():  # waits for the GPU
            self._skip_step(loss)
        return loss, statistics

    def _skip_step(self, loss: Tensor) -> None:
        """Count a step whose loss is not finite; raise ``UserError`` if it ends the training."""
        step = self.steps.number
        if not self.has_scaler:
            raise UserError(f"step {step}: the loss is {loss.item():g}")
        if step not in self.skipped_steps[-1:]:  # else it was counted in an earlier pass
            self.skipped_steps.append(step)
            logging.warning(
                f"step {step}: the loss is {loss.item():g}, so the GradScaler leaves the step out; "
                f"{len(self.skipped_steps):,} were left out so far"
            )
        if self.skipped_steps[-MAX_SKIPPED:] == list(range(step - MAX_SKIPPED + 1, step + 1)):
            raise UserError(f"step {step}: the loss is {loss.item():g}, as in the {MAX_SKIPPED - 1} steps before")


def _means_over_processes(loss: Tensor, statistics: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a loss whose value is the mean over the processes and whose gradient is that of this one, and means."""
    if world_size() == 1:
        return loss, statistics
    numbers = [loss.detach(), *statistics.values()]
    means = torch.stack([number.to(loss.dtype) for number in numbers])
    distributed.all_reduce(means)
    means /= world_size()
    loss = loss + (means[0] - loss).detach()
    return loss, dict(zip(statistics, means[1:], strict=True))


@contextlib.contextmanager
def _as_constants(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Treat parameters as constants within the block."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def build_loss(args: Namespace, steps: Steps | None = None) -> TwoTowerLoss:
    """Build the loss of ``--loss`` with its miner, reducer and distance.

    A loss that has a scale takes the model's own, unless ``--loss-kwargs`` gives one; and so does one with a bias.

    Args:
        args: the launcher's options.
        steps: of the training.

    Raises:
        UserError: an unknown name or option.
        ValueError: a hyper-parameter out of its range.
    """
    sets = args.head == "set"
    components = {}
    for kind in ("miner", "reducer", "distance"):
        if getattr(args, kind):
            components[kind] = {"name": getattr(args, kind), **getattr(args, f"{kind}_kwargs")}
    loss, miner, model_numbers = create_parts(args.loss, args.loss_kwargs, sets=sets, **components)
    one_set = False
    if ":" not in args.loss:
        with user_errors(f"--loss {args.loss}: its first call", *MALFORMED_CONTENT):
            one_set = compares_one_set(loss, miner, args.loss_kwargs, model_numbers, sets)
    name = args.loss.rpartition(":")[2]
    return TwoTowerLoss(name, loss, miner, model_numbers, one_set=one_set, steps=steps)


def create_parts(
    name: str, options: Mapping[str, Any], miner: Any = None, **components: Any
) -> tuple[nn.Module, nn.Module | None, list[str]]:
    """Return a loss, a miner or None, and which numbers of the loss are the model's.

    Those are the model's that ``options`` leave open or call ``"learned"``.
    """
    given_numbers = dict(options)
    is_learned = {}
    for number in MODEL_NUMBERS:
        is_learned[number] = given_numbers.get(number) == LEARNED
        if is_learned[number] or given_numbers.get(number) is None:
            given_numbers.pop(number, None)
    loss, created_miner = create_loss_and_miner({"name": name, **given_numbers}, miner, **components)
    compared = getattr(loss, "base", loss)
    model_numbers = []
    for number in MODEL_NUMBERS:
        if is_learned[number] and not hasattr(compared, number):
            with_scale = f"; losses that have one: {', '.join(losses_with_scale())}" if number == "scale" else ""
            raise UserError(f"loss {name!r} has no {number}{with_scale}")
        is_open = number not in given_numbers and not options.get(f"learn_{number}")
        if is_learned[number] or (is_open and number in getattr(compared, "numbers", ())):
            model_numbers.append(number)
    return loss, created_miner, model_numbers


def compares_one_set(
    loss: nn.Module, miner: Any, options: Mapping[str, Any], model_numbers: Sequence[str], sets: bool = False
) -> bool:
    """Return whether a loss takes no second set of embeddings, after a call with a few random ones.

    The call raises an error if the parts of the loss do not work together: components of pytorch-metric-learning use
    some of their options only when they are called. A loss of the user's own is not tried by the launcher: it may need
    the real embeddings, and its errors are bugs, which keep their traceback.
    """
    loss, miner = copy.deepcopy((loss, miner))
    width = options.get("embedding_size", 8)
    shape = (4, 2, width) if sets else (4, width)
    with torch.random.fork_rng(devices=[]):
        images, texts = torch.randn(2, *shape)
        call: dict[str, Any] = {"slots": images, "ref_slots": texts} if hasattr(loss, "regularization") else {}
        for name in model_numbers:
            call[name] = torch.tensor(10.0)
        labels = torch.arange(len(images)) % options.get("num_classes", len(images))
        try:
            CrossModalLoss(loss, miner)(images, labels, None, texts, labels.clone(), **call)
        except ValueError as error:
            if not takes_one_set(error):
                raise
            CrossModalLoss(loss, miner, one_set=True)(images, labels, None, texts, labels.clone(), **call)
            return True
    return False
