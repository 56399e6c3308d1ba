"""Two towers from a configuration."""

import importlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from pytorch_metric_learning.distances import BaseDistance
from torch import Tensor, nn
from torch.nn import functional

from vl_plugins.encoders import Embedder
from vl_plugins.encoders.vocabulary import Vocabulary, read_word_vectors
from vl_plugins.errors import UserError, one_of, user_errors
from vl_plugins.integrations.pytorch_metric_learning.config import (
    MODEL_PARTS,
    Config,
    TowerConfig,
    split_specification,
)
from vl_plugins.modules import SetHead, SetPrediction, SetPredictionOutput, TowerFeatures
from vl_plugins.registry import options_of

__all__ = ["TRUNKS", "TwoTowers", "build_towers", "embeddings_and_slots", "needs_vocabulary"]

# As strings: timm and transformers are imported where they are used.
TRUNKS = MappingProxyType(
    {
        "image": {
            "features": "vl_plugins.encoders.feature_trunk:FeatureTrunk",
            "timm": "vl_plugins.encoders.timm_trunk:TimmTrunk",
        },
        "text": {
            "gru": "vl_plugins.encoders.gru_trunk:GRUTrunk",
            "hugging_face": "vl_plugins.encoders.hugging_face_trunk:HuggingFaceTrunk",
        },
    }
)
INPUTS_OF_TRUNK = {"features": "features", "timm": "images"}


class TwoTowers(nn.Module):
    """Images and texts to embeddings, with the methods of an open_clip model that evaluation uses.

    Args:
        parts: modules by the names of ``MODEL_PARTS``; heads may be missing.
        vocabulary: tokenizer of texts; that of the text trunk if None.
        inputs: ``"images"`` or ``"features"``, what the image tower takes.
    """

    def __init__(self, parts: Mapping[str, nn.Module], vocabulary: Vocabulary | None, inputs: str):
        super().__init__()
        self.parts = nn.ModuleDict(parts)
        self.vocabulary = vocabulary
        self.inputs = inputs
        self._similarity: list[BaseDistance] = []  # in a list, since its parameters are not those of this module
        self._trained = [parameter for parameter in self.parameters() if parameter.requires_grad]

    @property
    def tokenizer(self) -> Callable[[list[str]], Tensor]:
        """From n texts to token ids (n, L)."""
        trunk: Any = self.parts["text_trunk"]
        return trunk.tokenizer if self.vocabulary is None else self.vocabulary  # the trunk's may be downloaded

    def image_transform(self, is_training: bool) -> Callable[[Any], Tensor]:
        """Return the transform of pictures, or of arrays of features, to tensors."""
        trunk: Any = self.parts["image_trunk"]
        return trunk.image_transform(is_training)

    @property
    def similarity(self) -> BaseDistance | None:
        """The distance of the loss, which compares sets; None for vectors, compared by cosine."""
        return self._similarity[0] if self._similarity else None

    def compare_sets_by(self, distance: BaseDistance) -> None:
        """Set ``similarity``."""
        self._similarity = [distance]

    def unfreeze(self) -> None:
        """Make all parameters trainable that were trainable in the beginning."""
        for parameter in self._trained:
            parameter.requires_grad_(True)

    @property
    def head(self) -> str | None:
        """``"set"`` where embeddings are sets."""
        return "set" if "image_head" in self.parts else None

    @property
    @torch.no_grad()
    def grid(self) -> tuple[int, int] | None:
        """(height, width) of the local features of an image; None if they have no such order."""
        trunk: Any = self.parts["image_trunk"]
        return trunk(trunk.example_inputs(1).to(next(self.parameters()))).grid

    def encode_image(self, images: Tensor, normalize: bool = False) -> Tensor:
        """Return the embeddings of images (B, D), or their sets (B, K, D); with ``normalize`` all of unit length."""
        return self._encode("image", images, normalize)

    def encode_text(self, texts: Tensor, normalize: bool = False) -> Tensor:
        """Return the embeddings of texts (B, D), or their sets (B, K, D); with ``normalize`` all of unit length."""
        return self._encode("text", texts, normalize)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return embeddings of images, which are floating-point numbers, or of texts, which are integers."""
        return self.encode_image(inputs) if inputs.is_floating_point() else self.encode_text(inputs)

    def predict_image_sets(self, images: Tensor) -> SetPredictionOutput:
        """Return the sets of images with slots and attention maps.

        Raises:
            UserError: the model has no set head.
        """
        if self.head is None:
            raise UserError("the model has no set head, so it makes no sets")
        head: Any = self.parts["image_head"]
        return head.predict(self._features("image", images))

    def _features(self, tower: str, inputs: Tensor) -> TowerFeatures:
        return self.parts[f"{tower}_embedder"](self.parts[f"{tower}_trunk"](inputs))

    def _encode(self, tower: str, inputs: Tensor, normalize: bool) -> Tensor:
        output = self._features(tower, inputs)
        if f"{tower}_head" in self.parts:
            output = self.parts[f"{tower}_head"](output)
        embeddings, _ = embeddings_and_slots(output)
        return functional.normalize(embeddings.float(), dim=-1) if normalize else embeddings


def embeddings_and_slots(output: Any) -> tuple[Tensor, Tensor | None]:
    """Return the embeddings of a tower's output, and the slots of sets if there are any."""
    if isinstance(output, TowerFeatures):
        assert output.pooled is not None, "a trunk that does not pool needs an embedder"
        return output.pooled, None
    if isinstance(output, Mapping):
        return output["features"], output.get("slots")
    return output, None


def needs_vocabulary(config: Config) -> bool:
    """Return whether the text tower takes the words of the training captions."""
    name, _ = split_specification("text.trunk", config.text.trunk)
    return name == "gru"


def build_towers(config: Config, vocabulary: Vocabulary | None = None, *, pretrained: bool = True) -> TwoTowers:
    """Return the towers of a configuration, on the CPU, with weights by its seed.

    Args:
        config: what to build.
        vocabulary: words of the text tower, if :func:`needs_vocabulary`.
        pretrained: whether to load the pretrained weights of the configuration; otherwise all are random.

    Raises:
        UserError: an unknown name or option, or weights that cannot be loaded.
    """
    torch.manual_seed(config.seed)
    name, _ = split_specification("image.trunk", config.image.trunk)
    expected = INPUTS_OF_TRUNK.get(name)
    if expected not in (None, config.data.inputs):
        raise UserError(f"image.trunk {name!r} takes {expected}, but data.inputs is {config.data.inputs!r}")
    image_trunk = _trunk("image", config.image, {}, pretrained)
    text_trunk = _trunk("text", config.text, _words(config, vocabulary, pretrained), pretrained)
    parts: dict[str, nn.Module] = {}
    for tower, trunk, settings in (("image", image_trunk, config.image), ("text", text_trunk, config.text)):
        with user_errors(tower):
            embedder = Embedder(
                trunk.local_width, trunk.pooled_width, config.dim, settings.pooling, settings.projection
            )
        parts |= {f"{tower}_trunk": trunk, f"{tower}_embedder": embedder}
        if config.head is not None:
            parts[f"{tower}_head"] = _set_head(config, embedder)
    parts = {name: parts[name] for name in MODEL_PARTS if name in parts}
    return TwoTowers(parts, vocabulary if needs_vocabulary(config) else None, config.data.inputs)


def _trunk(tower: str, settings: TowerConfig, words: Mapping[str, Any], pretrained: bool) -> Any:
    name, options = split_specification(f"{tower}.trunk", settings.trunk)
    module, _, class_name = TRUNKS[tower][one_of(f"trunk of {tower}s", name, TRUNKS[tower])].partition(":")
    factory = getattr(importlib.import_module(module), class_name)
    if not pretrained:
        random = {"pretrained": False, "weights": None}
        options |= {option: random[option] for option in random if option in options_of(factory)}
    with user_errors(f"{tower}.trunk {name!r}"):
        return factory(**{**options, **words})


def _words(config: Config, vocabulary: Vocabulary | None, pretrained: bool) -> dict[str, Any]:
    """Return the options of a text trunk that follow from its vocabulary."""
    if not needs_vocabulary(config):
        return {}
    if vocabulary is None:
        raise UserError("the text trunk needs a vocabulary: data.train names the shards whose captions it is made of")
    _, options = split_specification("text.trunk", config.text.trunk)
    words: dict[str, Any] = {"vocabulary_size": len(vocabulary)}
    if "word_vectors" in options:
        path = options["word_vectors"]
        words["word_vectors"] = read_word_vectors(path, vocabulary)[0] if path and pretrained else None
    return words


def _set_head(config: Config, embedder: Embedder) -> SetHead:
    _, options = split_specification("head", config.head)
    options = {"dim": config.dim, "local_dim": embedder.local_width, **options}
    with user_errors("head"):
        return SetHead(SetPrediction(**options))
