"""Text encoders of Hugging Face's transformers."""

import math
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from vl_plugins.modules import TowerFeatures
from vl_plugins.utils.errors import UserError
from vl_plugins.utils.optional import require

__all__ = ["HuggingFaceTokenizer", "HuggingFaceTrunk"]

EXTRA = "transformers"
LONGEST_REASON = 300
EXAMPLE_LENGTH = 12  # about as many words as captions of COCO have

# Tokenizers that know no limit name a number beyond any model's.
NO_LIMIT = 1_000_000


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
    so there another pooling is better. The model's own pooling layer is left out.

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
            settings = _attempt(
                f"config {dict(config)} of text encoder {self.name!r}",
                lambda: transformers.AutoConfig.for_model(**config),
            )
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

    def example_inputs(self, batch_size: int, generator: torch.Generator | None = None) -> Tensor:
        """Return made-up token ids of 1 to 12 tokens, (batch_size, 12)."""
        words = self.model.get_input_embeddings().num_embeddings
        tokens = torch.randint(0, words, (batch_size, EXAMPLE_LENGTH), generator=generator)
        tokens[tokens == self.padding] = (self.padding + 1) % words
        lengths = torch.randint(1, EXAMPLE_LENGTH + 1, (batch_size, 1), generator=generator)
        return tokens.masked_fill(torch.arange(EXAMPLE_LENGTH) >= lengths, self.padding)

    def _load(self, auto_class: Any, **options: Any) -> Any:
        # Not even after a question on the terminal, which is what transformers does without this option.
        options["trust_remote_code"] = False
        return _attempt(
            f"text encoder {self.name!r} of Hugging Face", lambda: auto_class.from_pretrained(self.name, **options)
        )

    def _auto_class(self, settings: Any) -> Any:
        transformers = require("transformers", extra=EXTRA)
        kind = type(settings)
        masked, text_encoding = transformers.MODEL_FOR_MASKED_LM_MAPPING, transformers.MODEL_FOR_TEXT_ENCODING_MAPPING
        if kind in masked or kind in text_encoding:
            # Not what the settings say: the encoder of a T5 that was saved alone says that it has no decoder.
            has_decoder = kind().is_encoder_decoder
            if has_decoder and kind in text_encoding:
                return transformers.AutoModelForTextEncoding  # the encoder alone
            if not has_decoder and kind in masked and hasattr(settings, "hidden_size"):
                return transformers.AutoModel
        raise UserError(
            f"text encoder {self.name!r} is of the type {settings.model_type!r}, not a text encoder such as "
            "bert, roberta, deberta-v2, modernbert or t5"
        )


def _attempt(what: str, action: Callable[[], Any]) -> Any:
    try:
        return action()
    # Hub, files, tokenizers and checks of configurations raise nearly anything.
    except Exception as error:
        raise UserError(f"{what} cannot be loaded: {textwrap.shorten(str(error), LONGEST_REASON)}") from error
