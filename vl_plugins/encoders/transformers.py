"""Text encoders of Hugging Face's transformers."""

import math
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from inspect import signature
from typing import Any

from torch import Tensor, nn

from vl_plugins.errors import UserError, require
from vl_plugins.modules import TowerFeatures

__all__ = ["HuggingFaceTrunk"]


class HuggingFaceTrunk(nn.Module):
    """A text encoder of Hugging Face: any that predicts masked words, such as BERT, or the encoder of a T5.

    Local features are the last hidden state, and ``pooled`` its first token, ``[CLS]`` in BERT; a T5 has no such token,
    so another pooling is better there. The model's own pooling layer is left out.

    Args:
        model: name at the hub, such as ``"google-bert/bert-base-uncased"``, or a local folder.
        pretrained: whether to load its weights, in float32; otherwise they are random.
        config: the model to build without pretrained weights, ``{"model_type": "bert"}`` and options of that type;
            then ``model`` is not looked up, which needs no network.

    Raises:
        UserError: it is anything but a text encoder; transformers raises other errors.
    """

    def __init__(self, model: str, pretrained: bool = True, config: Mapping[str, Any] | None = None):
        super().__init__()
        transformers = require("transformers", extra="transformers")
        self.name = str(model)
        if config is None or pretrained:
            settings = self._load(transformers.AutoConfig)
        else:
            settings = transformers.AutoConfig.for_model(**config)
        kind, auto_class = type(settings), transformers.AutoModel
        # Not by the settings: the encoder of a T5 that was saved alone says that it has no decoder.
        if kind().is_encoder_decoder and kind in transformers.MODEL_FOR_TEXT_ENCODING_MAPPING:
            auto_class = transformers.AutoModelForTextEncoding  # the encoder alone
        elif kind().is_encoder_decoder or kind not in transformers.MODEL_FOR_MASKED_LM_MAPPING:
            raise UserError(f"{self.name}: {settings.model_type} is not a text encoder such as bert, roberta or t5")
        self.padding = settings.pad_token_id
        # Nothing would train the parameters of a pooling layer.
        takes_pooling = "add_pooling_layer" in signature(transformers.MODEL_MAPPING[kind]).parameters
        options = {"add_pooling_layer": False} if takes_pooling else {}
        made = self._load(auto_class, **options) if pretrained else auto_class.from_config(settings, **options)
        self.model = made.float()
        self.local_width = self.pooled_width = self.model.config.hidden_size

    def forward(self, token_ids: Tensor) -> TowerFeatures:
        """Return the features of texts, (B, L) token ids of the tokenizer."""
        padding_mask = token_ids == self.padding
        local = self.model(input_ids=token_ids, attention_mask=(~padding_mask).long()).last_hidden_state
        return TowerFeatures(local, local[:, 0], padding_mask, None, has_positions=True)

    @cached_property
    def tokenizer(self) -> Callable[[list[str]], Tensor]:
        """From n texts to token ids (n, L), padded to the longest text and truncated to the most that the model takes.

        Raises:
            UserError: it pads by another token than the model.
        """
        tokenizer = self._load(require("transformers", extra="transformers").AutoTokenizer)
        if tokenizer.pad_token_id != self.padding:
            raise UserError(
                f"{self.name}: the tokenizer pads by the token {tokenizer.pad_token_id}, the model by {self.padding}"
            )
        positions = getattr(self.model.config, "max_position_embeddings", None) or math.inf
        tokenizer.model_max_length = min(tokenizer.model_max_length, positions)
        return partial(_token_ids, tokenizer)

    def _load(self, auto_class: Any, **options: Any) -> Any:
        # False, because transformers asks on the terminal without it.
        return auto_class.from_pretrained(self.name, trust_remote_code=False, **options)


def _token_ids(tokenizer: Any, texts: list[str]) -> Tensor:
    return tokenizer(list(texts), padding=True, truncation=True, return_tensors="pt")["input_ids"]
