"""Two towers from a configuration."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from vl_plugins.data import read_collection
from vl_plugins.data.records import as_rule
from vl_plugins.encoders import (
    Embedder,
    FeatureTrunk,
    GRUTrunk,
    HuggingFaceTrunk,
    TimmTrunk,
    Vocabulary,
    read_word_vectors,
)
from vl_plugins.errors import check_sizes, one_of
from vl_plugins.integrations.pytorch_metric_learning.config import Config, TowerConfig, config_errors, split
from vl_plugins.modules import SetHead, SetPrediction, SetPredictionOutput
from vl_plugins.registry import options_of

__all__ = ["Tower", "TwoTowers", "build_towers"]

TRUNKS: dict[str, dict[str, Any]] = {
    "image": {"features": FeatureTrunk, "timm": TimmTrunk},
    "text": {"gru": GRUTrunk, "hugging_face": HuggingFaceTrunk},
}


class Tower(nn.Module):
    """Trunk, embedder and an optional set head: inputs to embeddings.

    ``forward`` returns embeddings (B, D) and None, or sets (B, K, D) and the slots from which they were made (B, K, D).
    """

    def __init__(self, trunk: Any, embedder: nn.Module, head: SetHead | None):
        super().__init__()
        self.trunk, self.embedder, self.head = trunk, embedder, head

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        features = self.embedder(self.trunk(inputs))
        if self.head is None:
            return features.pooled, None
        sets = self.head.predict(features)
        return sets.embeddings, sets.slots


class TwoTowers(nn.Module):
    """Images and texts to embeddings, with the methods of an open_clip model that evaluation uses.

    Attributes:
        image, text: the towers.
        vocabulary: tokenizer of texts; None for that of the text trunk.
        inputs: ``"images"`` or ``"features"``, the inputs of the image tower.
        head: ``"set"`` where embeddings are sets.
        similarity: of sets, perhaps with parameters, or of order embeddings; None for vectors, compared by cosine.
    """

    def __init__(self, image: Tower, text: Tower, vocabulary: Vocabulary | None, inputs: str):
        super().__init__()
        self.image, self.text, self.vocabulary, self.inputs = image, text, vocabulary, inputs
        self.similarity: nn.Module | None = None
        self.head = None if image.head is None else "set"

    def parts(self) -> dict[str, nn.Module]:
        """Return the modules that can be frozen: ``image_trunk``, ``image_embedder``, ... ``text_head``."""
        modules = {}
        for side, tower in (("image", self.image), ("text", self.text)):
            for name, module in tower.named_children():
                modules[f"{side}_{name}"] = module
        return modules

    @property
    def tokenizer(self) -> Callable[[list[str]], Tensor]:
        """From n texts to token ids (n, L)."""
        return self.text.trunk.tokenizer if self.vocabulary is None else self.vocabulary

    @property
    @torch.no_grad()
    def grid(self) -> tuple[int, int] | None:
        """(height, width) of the local features of an image; None if they are no grid."""
        size: Any = getattr(self.image.trunk, "image_size", None)
        device = next(self.parameters()).device
        return None if size is None else self.image.trunk(torch.zeros(1, 3, *size, device=device)).grid

    def encode_image(self, images: Tensor, normalize: bool = False) -> Tensor:
        """Return the embeddings of images (B, D), or their sets (B, K, D); with ``normalize`` all of unit length."""
        return _normalized(self.image(images)[0], normalize)

    def encode_text(self, texts: Tensor, normalize: bool = False) -> Tensor:
        """Return the embeddings of texts (B, D), or their sets (B, K, D); with ``normalize`` all of unit length."""
        return _normalized(self.text(texts)[0], normalize)

    def predict_image_sets(self, images: Tensor) -> SetPredictionOutput:
        """Return the sets of images with slots and attention maps, of a model with a set head."""
        tower: Any = self.image
        return tower.head.predict(tower.embedder(tower.trunk(images)))


def _normalized(embeddings: Tensor, normalize: bool) -> Tensor:
    return functional.normalize(embeddings.float(), dim=-1) if normalize else embeddings


def build_towers(config: Config, vocabulary: Vocabulary | None, *, pretrained: bool) -> TwoTowers:
    """Return the towers of :func:`~vl_plugins.integrations.pytorch_metric_learning.build_objective`."""
    words: dict[str, Any] = {}
    with config_errors("text.trunk"):
        name, options = split(config.text.trunk)
    if name == "gru":
        if vocabulary is None:
            rule = as_rule(config.data.caption_lines, config.data.caption_fields)
            captions = read_collection(config.data.train, "skip", rule).captions
            with config_errors("text.vocabulary"):
                vocabulary = Vocabulary.from_captions(captions, **config.text.vocabulary)
        path = options.get("word_vectors")
        with config_errors("text.trunk.word_vectors"):
            vectors = read_word_vectors(path, vocabulary) if path and pretrained else None
        words = {"vocabulary_size": len(vocabulary), "word_vectors": vectors}
    torch.manual_seed(config.seed)
    check_sizes("configuration", [asdict(config.image), asdict(config.text), config.dim, config.head])
    # In this order, because each draws weights from the same random numbers.
    image_trunk = _trunk("image", config.image, {}, pretrained)
    text_trunk = _trunk("text", config.text, words, pretrained)
    image = _tower("image", config, config.image, image_trunk)
    text = _tower("text", config, config.text, text_trunk)
    return TwoTowers(image, text, vocabulary, config.data.inputs)


def _trunk(side: str, settings: TowerConfig, words: dict[str, Any], pretrained: bool) -> Any:
    with config_errors(f"{side}.trunk"):
        name, options = split(settings.trunk)
        factory = TRUNKS[side][one_of(f"{side}.trunk", name, TRUNKS[side])]
        if not pretrained:
            options |= {option: None for option in ("pretrained", "weights") if option in options_of(factory)}
        return factory(**options | words)


def _tower(side: str, config: Config, settings: TowerConfig, trunk: Any) -> Tower:
    with config_errors(side):
        embedder = Embedder(trunk.local_width, trunk.pooled_width, config.dim, settings.pooling, settings.projection)
    if config.head is None:
        return Tower(trunk, embedder, None)
    with config_errors("head"):
        name, options = split(config.head)
        one_of("head", name, ["set"])
        prediction = SetPrediction(**{"dim": config.dim, "local_dim": embedder.local_width, **options})
        return Tower(trunk, embedder, SetHead(prediction))
