"""Means of the weights of checkpoints, between two models (Wortsman et al. 2022, "Robust fine-tuning of zero-shot
models") or of several (Wortsman et al. 2022, "Model soups").
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from vl_plugins.errors import MALFORMED_CONTENT, UserError, user_errors
from vl_plugins.integrations.encoding import encode_batches, validate
from vl_plugins.integrations.saved_models import SavedModel, check_same_model

__all__ = ["Mean", "Merger", "average"]

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")  # of batch norm


class Mean(NamedTuple):
    """A weighted mean of models, evaluated.

    Attributes:
        weights: of the mean, by name.
        metrics: on the shards to choose by.
        retained: on the shards of what should not be forgotten; None without any.
    """

    weights: dict[str, Tensor]
    metrics: dict[str, float]
    retained: dict[str, float] | None


def average(models: Sequence[Mapping[str, Tensor]], shares: Sequence[float]) -> dict[str, Tensor]:
    """Return the weighted mean of the tensors of models, name by name.

    A mean is computed in float64 and rounded to the tensor's type, the wider one where models differ. Integers, such as
    the number of batches that batch norm has seen, are those of the model with the largest share. A share of 1 returns
    the tensors of that model.

    Args:
        models: tensors by name, with the same names and shapes in all models.
        shares: of the models; they add up to 1.

    >>> average([{"w": torch.zeros(2)}, {"w": torch.ones(2)}], [0.75, 0.25])
    {'w': tensor([0.2500, 0.2500])}
    """
    largest = max(range(len(models)), key=lambda index: shares[index])
    means = dict(models[largest])
    if shares[largest] == 1:
        return means
    for name, tensor in means.items():
        if not tensor.is_floating_point():
            continue
        dtype = tensor.dtype
        total = torch.zeros_like(tensor, dtype=torch.float64)
        for model, share in zip(models, shares, strict=True):
            dtype = torch.promote_types(dtype, model[name].dtype)
            total += share * model[name].double()
        means[name] = total.to(dtype)
    return means


class Merger:
    """Averages models and evaluates the means.

    Args:
        models: two or more that differ in their weights alone.
        model: the same model on its device and in its precision, to evaluate with; its weights are replaced.
        device, precision: of ``model``; the latter as open_clip's ``--precision``.
        shards: to choose by, as a loader of :func:`vl_plugins.data.evaluation_loader`.
        retain: of what should not be forgotten, or None.
        batch_norm: on which to recompute the running statistics of means, or None.

    Raises:
        UserError: the models are different ones; or ``batch_norm`` is given without need.
    """

    def __init__(
        self,
        models: Sequence[SavedModel],
        model: nn.Module,
        *,
        device: str | torch.device,
        precision: str,
        shards: DataLoader,
        retain: DataLoader | None = None,
        batch_norm: DataLoader | None = None,
    ):
        self.models, self.model, self.device, self.precision = models, model, device, precision
        self.shards, self.retain, self.batch_norm = shards, retain, batch_norm
        for further_model in models[1:]:
            check_same_model(models[0], further_model)
        self._norms: dict[str, Any] = {}
        for name, module in model.named_modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats:
                self._norms[name] = module
        if batch_norm is not None and not self._norms:
            raise UserError("--batch-norm: the models have no batch norm; leave it out")

    def check_batch_norm(self) -> None:
        """Raise ``UserError`` if a mean needs statistics of batch norm that nothing recomputes.

        Where all models have the same statistics, as with a locked tower, these fit their mean too.
        """
        if self.batch_norm is not None:
            return
        first, *further_models = self.models
        for norm in self._norms:
            statistic = f"{norm}.running_mean"
            for model in further_models:
                if not torch.equal(first.weights[statistic], model.weights[statistic]):
                    raise UserError(
                        f"{first.name} and {model.name} have batch norm ({norm}), and a mean of running statistics "
                        "fits neither: where it was measured, RSUM was 35.9 with averaged statistics and 61.9 with "
                        "recomputed ones. Add --batch-norm SHARDS, of training data, to recompute them"
                    )

    def evaluate(self, shares: Sequence[float]) -> Mean:
        """Average the models by their shares, which add up to 1, and evaluate the mean.

        Raises:
            UserError: see :meth:`check_batch_norm`; or data cannot be read.
        """
        weights = average([model.weights for model in self.models], shares)
        self.model.load_state_dict(weights)
        if 1 not in shares and self._norms:
            self.check_batch_norm()
            if self.batch_norm is not None:
                self._recompute_statistics()
                computed = self.model.state_dict()
                for norm in self._norms:
                    for statistic in STATISTICS:
                        name = f"{norm}.{statistic}"
                        weights[name] = computed[name].to("cpu", weights[name].dtype)
                self.model.load_state_dict(weights)  # rounded as they will be written
        retained = None if self.retain is None else self._metrics(self.retain)
        return Mean(weights, self._metrics(self.shards), retained)

    def _metrics(self, batches: DataLoader) -> dict[str, float]:
        with user_errors(f"{self.models[0].name} cannot be evaluated", *MALFORMED_CONTENT):
            bar = tqdm(batches, "evaluating", unit="batch", leave=False, disable=None)  # None: in a terminal only
            return validate(self.model, bar, self.device, self.precision)

    def _recompute_statistics(self) -> None:
        """Let the running statistics be the means over the batches of ``batch_norm``."""
        momenta = {}
        for name, norm in self._norms.items():
            momenta[name] = norm.momentum
            norm.momentum = None  # all batches count the same
            norm.reset_running_stats()
            norm.train()
        bar = tqdm(self.batch_norm, "batch norm", unit="batch", leave=False, disable=None)
        encode_batches(self.model, bar, self.device, self.precision)
        for name, norm in self._norms.items():
            norm.momentum = momenta[name]
            norm.eval()
