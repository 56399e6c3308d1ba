"""A guard that stops the training, or skips the step, when the loss is not finite."""

import logging
from typing import Any

import torch
from torch import Tensor, distributed, nn

from vl_plugins.integrations.open_clip import host
from vl_plugins.integrations.open_clip.training import Training
from vl_plugins.integrations.open_clip.validation import encode_batches
from vl_plugins.retrieval.tiles import slices, tile_shape
from vl_plugins.utils.errors import UserError

__all__ = ["NonFiniteGuard", "NonFiniteLossError"]

logger = logging.getLogger(__name__)

# A run in which nothing is learned any more should end.
SKIPPED_IN_A_ROW = 20
NAMED_KEYS = 16
ENCODED = 8  # pictures, and captions, of the last batch of an epoch


class NonFiniteLossError(UserError):
    """The loss is NaN or infinite."""


class NonFiniteGuard(nn.Module):
    """Calls a loss, and looks before each step of the optimizer whether it was finite in all processes.

    It looks when the backward pass is done, as a gradient scaler does, so that nothing waits in between. ``"skip"``
    leaves the weights and the state of the optimizer as they are; after 20 steps skipped in a row it stops. A
    gradient scaler skips such steps by itself; they are reported at the next one.

    Args:
        loss: as open_clip calls it, with features by name; returns a dict of terms.
        action: ``"stop"`` or ``"skip"``.
        training: says which step it is, and which images it is of.
        calls_per_step: micro-batches of a step.
        world_size: number of processes.
    """

    def __init__(
        self, loss: nn.Module, action: str, training: Training, *, calls_per_step: int = 1, world_size: int = 1
    ):
        super().__init__()
        self.loss = loss
        self.action = action
        self.run = training
        self.calls_per_step = calls_per_step
        self.world_size = world_size
        self._calls = 0
        self._skipped = 0
        self._is_finite: Tensor | None = None  # of all calls since the last look, on the device
        self._inputs: dict[str, Tensor] = {}
        self._keys: list[str] | None = None
        self._terms: dict[str, Tensor] = {}

    def forward(self, *args, **inputs) -> dict[str, Tensor] | Tensor:
        if self._is_finite is not None and self._calls % self.calls_per_step == 0:
            self._look()  # no step of the optimizer since: the gradient scaler left it out
        losses = self.loss(*args, **inputs)
        if torch.is_grad_enabled():
            self._note(losses, inputs)
        return losses

    @torch.compiler.disable
    def _note(self, losses, inputs) -> None:
        terms = losses if isinstance(losses, dict) else {"loss": losses}
        is_finite = torch.stack([term.detach().isfinite().all() for term in terms.values()]).all()
        first = self._is_finite is None
        self._is_finite = is_finite if first else self._is_finite & is_finite
        self._calls += 1
        # Of the last call, which has all features of the step.
        self._terms = {name: term.detach() for name, term in terms.items()}
        self._inputs = {name: value.detach() for name, value in inputs.items() if isinstance(value, Tensor)}
        self._keys = self.run.batch_keys()  # now: it may be looked at when the next batch is there

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Look, and let the optimizer do nothing where the step is to be skipped."""
        if self._is_finite is None or self._look():
            return
        # An optimizer passes over parameters without a gradient.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def after_epoch(self, batch: Any) -> None:
        """Look at what the epoch's last step has made of the model, before it is evaluated and saved.

        Args:
            batch: of the trainer; some of it is encoded, because weights that are finite may be too large to be of use.

        Raises:
            NonFiniteLossError: a weight, or an embedding, is not finite.
        """
        model, args = self.run.model, self.run.args
        weights = {name: _local(weight.detach()) for name, weight in model.named_parameters()}
        weights = {name: weight for name, weight in weights.items() if weight.numel()}
        # By their extremes: `isfinite` of the weights themselves would need copies as large as they are.
        extremes = [torch.stack([weight.amin(), weight.amax()]) for weight in weights.values()]
        is_finite = torch.stack([pair.isfinite().all() for pair in extremes]).tolist()
        if not all(is_finite):
            bad = [name for name, finite in zip(weights, is_finite, strict=True) if not finite]
            raise self._diverged(f"{len(bad)} of {len(weights)} weights are not finite after it, such as {bad[0]}")
        pair = host.adapter().pair_of(batch)
        if pair is None:
            return
        images, texts = (part[:ENCODED] for part in pair)
        places = torch.zeros(len(texts), dtype=torch.int64), torch.arange(len(images))  # of no consequence here
        model.eval()
        (encoded,) = encode_batches(model, [(images, texts, *places)], args.device, args.precision)
        model.train()
        if not all(vectors.isfinite().all() for vectors in (encoded.images, encoded.captions)):
            raise self._diverged("the model's embeddings are not finite after it")

    def _diverged(self, what: str) -> NonFiniteLossError:
        return NonFiniteLossError(
            f"{self._step()}: {what}; this epoch is not saved. Give a lower --lr than "
            f"{self.run.args.lr:g}, or --grad-clip-norm"
        )

    def _look(self) -> bool:
        """Return whether the loss was finite everywhere, or raise; forget it then."""
        own, self._is_finite = self._is_finite, None
        everywhere = own.to(torch.uint8)
        if self.world_size > 1 and distributed.is_initialized():  # not under Horovod
            distributed.all_reduce(everywhere, op=distributed.ReduceOp.MIN)
        if everywhere.item():
            self._skipped = 0
            return True
        self._skipped += 1
        what = self._describe() if not own.item() else f"{self._step()}: the loss of another process is not finite"
        if self.action == "stop":
            raise NonFiniteLossError(f"{what}. --on-nan skip leaves such steps out")
        if self._skipped >= SKIPPED_IN_A_ROW:
            raise NonFiniteLossError(f"{what}. {self._skipped} steps in a row were skipped")
        logger.warning(f"{what}. The step is skipped")
        return False

    def _step(self) -> str:
        done = -(-self._calls // self.calls_per_step) - 1
        return f"step {self.run.steps_before + done}"

    def _describe(self) -> str:
        values = ", ".join(f"{name} {term.item():g}" for name, term in self._terms.items())
        parts = [f"{self._step()}: the loss is not finite ({values})"]
        bad: set[int] = set()
        features = {name: self._inputs.get(f"{name}_features") for name in ("image", "text")}
        for name, vectors in features.items():
            if vectors is None:
                continue
            rows = torch.where(~vectors.flatten(1).isfinite().all(dim=1))[0].tolist()
            if rows:
                parts.append(f"{len(rows)} of {len(vectors)} {name} features are not finite")
                per_image = max(1, len(vectors) // max(1, len(features["image"])))
                bad |= {row // per_image for row in rows}
        if all(vectors is not None for vectors in features.values()):
            parts.append(_range_of_similarities(*features.values()))
        if "logit_scale" in self._inputs:
            parts.append(f"logit scale {self._inputs['logit_scale'].mean().item():g}")
        return "; ".join([*parts, self._name_keys(bad)])

    def _name_keys(self, bad: set[int]) -> str:
        keys = self._keys
        if keys is None:
            return "batch keys are not known to open_clip's reader"
        logger.error(f"keys of the batch: {' '.join(keys)}")
        named = [keys[row] for row in sorted(bad) if row < len(keys)] or keys
        more = f" and {len(named) - NAMED_KEYS} more" if len(named) > NAMED_KEYS else ""
        return f"{'keys of these' if bad else 'batch keys'}: {', '.join(named[:NAMED_KEYS])}{more}"


def _local(weight: Tensor) -> Tensor:
    """Return what this process holds of a weight; under FSDP that is a part."""
    return weight.to_local() if hasattr(weight, "to_local") else weight


@torch.no_grad()
def _range_of_similarities(images: Tensor, texts: Tensor) -> str:
    """Say between which values the products of finite vectors are, tile by tile."""
    images, texts = (vectors.flatten(0, -2) if vectors.ndim == 3 else vectors for vectors in (images, texts))
    images, texts = (vectors[vectors.isfinite().all(dim=1)].float() for vectors in (images, texts))
    if 0 in (len(images), len(texts)):
        return "no similarity is finite"
    least, most = torch.inf, -torch.inf
    height, width = tile_shape((len(images), len(texts)), images.device)
    for rows in slices(len(images), height):
        for columns in slices(len(texts), width):
            similarities = images[rows] @ texts[columns].T
            least, most = min(least, similarities.min().item()), max(most, similarities.max().item())
    return f"similarities of finite features from {least:.4g} to {most:.4g}"
