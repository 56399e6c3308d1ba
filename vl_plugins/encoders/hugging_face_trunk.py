"""Text encoders of Hugging Face's transformers."""

import math
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from typing import Any

from torch import Tensor, nn

from vl_plugins.errors import UserError, require
from vl_plugins.modules import TowerFeatures

__all__ = ["HuggingFaceTokenizer", "HuggingFaceTrunk"]

EXTRA = "transformers"
LONGEST_REASON = 300

NO_LIMIT = 1_000_000  # tokenizers that know no limit name a larger number


@dataclass(frozen=True)
class HuggingFaceTokenizer:
    """From a list of n texts to their token ids (n, L), int64, padded to the longest of them.

    Args:
        tokenizer: of transformers.
        max_length: number of tokens to which texts are cut off, special ones included; None for no limit.
    """

    tokenizer: Any
    max_length: int | None

    def __call__(self, texts: list[str]) -> Tensor:
        encoded = self.tokenizer(
            list(texts),
            padding=True,
            truncation=self.max_length is not None,
            max_length=self.max_length,
            return_tensors="pt",
        )
        return encoded["input_ids"]


class HuggingFaceTrunk(nn.Module):
    """A text encoder of Hugging Face: any that predicts masked words, such as BERT, or the encoder of a T5.

    Local features are the last hidden state, and ``pooled`` its first token, ``[CLS]`` in BERT; a T5 has no such token,
    so another pooling is better there. The model's own pooling layer is left out.

    Args:
        model: name at the hub, such as ``"google-bert/bert-base-uncased"``, or a local folder.
        pretrained: whether to load its weights; otherwise they are random. They are of float32 in any case.
        config: what to build without pretrained weights, ``{"model_type": "bert"}`` and options of that type. The
            configuration of ``model`` is not looked up then, which needs no network.

    Attributes:
        local_width: width of the hidden state.
        pooled_width: the same.

    Raises:
        UserError: a model that is not there or cannot be loaded, a configuration that is wrong, one of anything but a
            text encoder, or without a padding token.
    """

    def __init__(self, model: str, pretrained: bool = True, config: Mapping[str, Any] | None = None):
        super().__init__()
        transformers = require("transformers", extra=EXTRA)
        self.name = str(model)
        if config is not None and not pretrained:
            what = f"config {dict(config)} of text encoder {self.name!r}"
            settings = _attempt(what, transformers.AutoConfig.for_model, **config)
        else:
            settings = self._load(transformers.AutoConfig)
        auto_class = self._auto_class(settings)
        if settings.pad_token_id is None:
            raise UserError(f"the configuration of text encoder {self.name!r} has no pad_token_id")
        self.padding = settings.pad_token_id
        # It would have parameters that nothing trains.
        takes_pooling = "add_pooling_layer" in signature(transformers.MODEL_MAPPING[type(settings)]).parameters
        options = {"add_pooling_layer": False} if takes_pooling else {}
        made = self._load(auto_class, **options) if pretrained else auto_class.from_config(settings, **options)
        self.model = made.float()
        self.local_width = self.pooled_width = self.model.config.hidden_size

    def forward(self, token_ids: Tensor) -> TowerFeatures:
        """Return the features of texts, (B, L) token ids as the tokenizer makes them."""
        padding_mask = token_ids == self.padding
        local = self.model(input_ids=token_ids, attention_mask=(~padding_mask).long()).last_hidden_state
        return TowerFeatures(local, local[:, 0], padding_mask, None, has_positions=True)

    @cached_property
    def tokenizer(self) -> HuggingFaceTokenizer:
        """The model's tokenizer; texts are cut off at the most tokens that the model takes.

        Raises:
            UserError: it is not there, or pads by another token than the model.
        """
        tokenizer = self._load(require("transformers", extra=EXTRA).AutoTokenizer)
        if tokenizer.pad_token_id != self.padding:
            raise UserError(
                f"the tokenizer of text encoder {self.name!r} pads by the token {tokenizer.pad_token_id}, "
                f"the model by {self.padding}"
            )
        positions = getattr(self.model.config, "max_position_embeddings", None) or math.inf
        max_length = min(tokenizer.model_max_length, positions)
        return HuggingFaceTokenizer(tokenizer, max_length if max_length < NO_LIMIT else None)

    def _load(self, auto_class: Any, **options: Any) -> Any:
        # Not even after a question on the terminal, which is what transformers does without this option.
        options["trust_remote_code"] = False
        what = f"text encoder {self.name!r} of Hugging Face"
        return _attempt(what, auto_class.from_pretrained, self.name, **options)

    def _auto_class(self, settings: Any) -> Any:
        transformers = require("transformers", extra=EXTRA)
        kind = type(settings)
        # Not what the settings say: the encoder of a T5 that was saved alone says that it has no decoder.
        if kind().is_encoder_decoder:
            if kind in transformers.MODEL_FOR_TEXT_ENCODING_MAPPING:
                return transformers.AutoModelForTextEncoding  # the encoder alone
        elif kind in transformers.MODEL_FOR_MASKED_LM_MAPPING and hasattr(settings, "hidden_size"):
            return transformers.AutoModel
        raise UserError(
            f"text encoder {self.name!r} is of the type {settings.model_type!r}, not a text encoder such as "
            "bert, roberta, deberta-v2, modernbert or t5"
        )


def _attempt(what: str, action: Callable, *arguments: Any, **options: Any) -> Any:
    try:
        return action(*arguments, **options)
    # Hub, files, tokenizers and checks of configurations raise nearly anything.
    except Exception as error:
        raise UserError(f"{what} cannot be loaded: {textwrap.shorten(str(error), LONGEST_REASON)}") from error
