"""The state of losses in the checkpoints of sentence-transformers' trainers, which have that of the model only."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer
from transformers import TrainerCallback

from vl_plugins.errors import reason, warn_of_input
from vl_plugins.integrations.sentence_transformers.losses import RetrievalLoss

__all__ = ["LossStateCallback"]

KEY = "vl_plugins_losses"  # in the first group of parameters of an optimizer's state


class LossStateCallback(TrainerCallback):
    """Keeps what losses learn and count in the checkpoints of the trainer, and restores it when training resumes.

    The trainer optimizes the parameters of a loss, such as a learned scale, but writes those of the model only. This
    callback writes them beside the state of the optimizer, in ``optimizer.pt``, and so it does with the step of a
    warm-up. ``save_only_model=True`` leaves out both.

    Args:
        loss: that of the trainer: a :class:`RetrievalLoss`, a loss that holds one, or a dict of losses.

    Raises:
        ValueError: there is no :class:`RetrievalLoss`, or the checkpoint is of another loss.

    Example::

        loss = RetrievalLoss(model, "unified", learn_scale=True)
        callbacks = [LossStateCallback(loss)]
        trainer = SentenceTransformerTrainer(model, args, train_dataset=pairs, loss=loss, callbacks=callbacks)
        trainer.train(resume_from_checkpoint=True)
    """

    def __init__(self, loss: nn.Module | Mapping[str, nn.Module]):
        self.losses: dict[str, RetrievalLoss] = {}
        losses = loss if isinstance(loss, Mapping) else {"loss": loss}
        for name, outer_loss in losses.items():
            for path, module in outer_loss.named_modules():
                if isinstance(module, RetrievalLoss):
                    self.losses[f"{name}.{path}"] = module
                    module.is_in_checkpoints = True
        if not self.losses:
            raise ValueError(f"loss must be a RetrievalLoss, or hold one, got {loss}")
        self._saving: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """Restore the losses from what the trainer has loaded into the optimizer, and add them to what it saves."""
        self._clear_gradients()
        optimizer = getattr(optimizer, "optimizer", optimizer)  # that in the wrapper of accelerate
        if not isinstance(optimizer, Optimizer):
            raise ValueError(f"the state of a loss is saved with an optimizer of torch, got {type(optimizer).__name__}")
        saved = optimizer.param_groups[0].pop(KEY, None)
        if saved is not None:
            self._load(saved)
        elif state.global_step > 0 and any(self._states().values()):
            warn_of_input(
                f"the checkpoint of step {state.global_step} has no state of the loss, which starts anew: it was "
                "written without LossStateCallback, or without the state of the optimizer"
            )
        if self._saving is not None:
            self._saving.remove()
        self._saving = optimizer.register_state_dict_post_hook(self._save)

    def on_step_end(self, *arguments: Any, **options: Any) -> None:
        self._clear_gradients()

    def _clear_gradients(self) -> None:
        """Clear the gradients of parameters of the losses, as the trainer does from sentence-transformers 6.2 on."""
        for loss in self.losses.values():
            loss.loss.zero_grad()

    def _states(self) -> dict[str, dict[str, Any]]:
        return {name: dict(loss.loss.state_dict()) for name, loss in self.losses.items()}

    def _save(self, optimizer: Optimizer, state: dict[str, Any]) -> None:
        state["param_groups"][0][KEY] = self._states()

    def _load(self, saved: Mapping[str, Mapping[str, Any]]) -> None:
        for name, loss in self.losses.items():
            try:
                loss.loss.load_state_dict(saved.get(name, {}))
            except RuntimeError as error:
                raise ValueError(
                    f"the checkpoint is of another loss: {reason(error)}; resume with the loss of its run, or without "
                    "LossStateCallback"
                ) from error
