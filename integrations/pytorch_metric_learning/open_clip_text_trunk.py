"""Text towers of open_clip."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from vl_plugins.integrations.checkpoints import load_model
from vl_plugins.modules import TowerFeatures
from vl_plugins.utils.optional import require

__all__ = ["OpenCLIPTextTrunk"]


class OpenCLIPTextTrunk(nn.Module):
    """The text tower of an open_clip model.

    Local features are the tokens of the last block, ``pooled`` is what ``encode_text`` gives.

    Args:
        model: name of an open_clip model, or one of ``configs/models``.
        pretrained: one of the model's pretrained tags, or a checkpoint file; random weights by default.

    Attributes:
        local_width: width of the tokens.
        pooled_width: width of the model's embeddings.

    Raises:
        UserError: an unknown model or tag, or a file that is not there or does not fit the model.
    """

    def __init__(self, model: str, pretrained: str | Path | None = None):
        super().__init__()
        open_clip = require("open_clip", extra="open-clip")
        from vl_plugins.integrations.open_clip.models import check_model

        check_model(model)
        self.name = model
        if pretrained:
            self.model, _, _ = load_model(pretrained, model)
        else:
            self.model = open_clip.create_model(model, load_weights=False, pretrained_text=False)
        # Not used for texts; nothing would train them.
        self.model.visual = self.model.logit_scale = self.model.logit_bias = None
        with torch.no_grad():
            features = self.eval()(self.example_inputs(1))
        self.train()
        self.local_width, self.pooled_width = features.local.shape[-1], features.pooled.shape[-1]

    def forward(self, texts: Tensor) -> TowerFeatures:
        """Return the features of texts (B, L), token ids as the tokenizer makes them."""
        from vl_plugins.integrations.open_clip.towers import text_features

        return text_features(self.model, texts)

    @property
    def tokenizer(self) -> Callable[[list[str]], Tensor]:
        """The model's tokenizer, from a list of n texts to (n, L) token ids."""
        from vl_plugins.integrations.open_clip.models import get_tokenizer

        return get_tokenizer(self.name)

    def example_inputs(self, batch_size: int, generator: torch.Generator | None = None) -> Tensor:
        """Return random token ids (batch_size, L)."""
        size = (batch_size, min(self.model.context_length, 77))  # Hugging Face towers take 512 tokens or more
        return torch.randint(1, self.model.vocab_size, size, generator=generator)
