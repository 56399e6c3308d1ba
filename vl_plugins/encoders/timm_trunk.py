"""Image models of timm."""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vl_plugins.errors import UserError, require, unknown_name
from vl_plugins.modules import TowerFeatures

__all__ = ["TimmTrunk"]

# Of an error that lists every weight of a model.
LONGEST_REASON = 600

# With these timm reads files of its own choice, by some versions as pickles that can run code.
FILE_OPTIONS = frozenset({"checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"})


class TimmTrunk(nn.Module):
    """An image model of timm that gives feature maps or tokens, without its classifier.

    Local features are the places of the last feature map, or the patches of a transformer without class and register
    tokens, as the model's ``forward_features`` gives them. ``pooled`` is what the model itself would classify. Layers
    that only ``pooled`` goes through get no gradient where an embedder does not use it.

    Args:
        model: name of a model, with or without the tag of its weights: ``"resnet152.tv_in1k"``.
        pretrained: whether to load the weights of timm; those of the tag, or the model's default ones.
        weights: file of weights to load instead, of torch or safetensors, adapted as timm does. All have to fit but
            those of the classifier.
        image_size: height and width of images in pixels, or both in one number; by default those of the weights.
        crop_area: part of the picture's area that a random crop keeps in training, from least to most. VSE++ has 0.08
            to 1, the default of timm and torchvision for classification, where little is left of what a caption says.
        horizontal_flip: probability in training that a picture is mirrored, which its caption is not.
        crop_pct: part of height and width that the center crop keeps in evaluation; by default that of the weights.
        options: any that ``timm.create_model`` takes for this model, such as ``drop_path_rate``.

    Attributes:
        local_width: width of the local features.
        pooled_width: width of the model's own embedding.
        image_size: (height, width).

    Raises:
        UserError: an unknown model, tag or option, or weights that are not there or do not fit.
    """

    def __init__(
        self,
        model: str,
        pretrained: bool = False,
        weights: str | Path | None = None,
        image_size: int | tuple[int, int] | None = None,
        crop_area: Sequence[float] = (0.5, 1.0),
        horizontal_flip: float = 0.5,
        crop_pct: float | None = None,
        **options: Any,
    ):
        super().__init__()
        if len(crop_area) != 2 or not 0 < crop_area[0] <= crop_area[1] <= 1:
            raise ValueError(f"crop_area must be two numbers in (0, 1], the smaller first, got {crop_area!r}")
        for name, value in (("horizontal_flip", horizontal_flip), ("crop_pct", crop_pct)):
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {value!r}")
        for name in FILE_OPTIONS.intersection(options):
            raise ValueError(f"{name} is not supported: name a file of weights with the option weights")
        self.crop_area, self.horizontal_flip, self.crop_pct = tuple(crop_area), horizontal_flip, crop_pct
        timm = require("timm", extra="timm")
        if not timm.is_model(model.partition(".")[0]):
            raise unknown_name("timm model", model, timm.list_models())
        if image_size is not None:
            image_size = (image_size, image_size) if isinstance(image_size, int) else tuple(image_size)
        num_classes, overlay = (0, None) if weights is None else _classes_and_overlay(timm, model, weights)
        try:
            # Others take images of any size, and know no such option.
            fixed = image_size and timm.get_pretrained_cfg(model, allow_unregistered=False).fixed_input_size
            size = {"img_size": image_size} if fixed else {}
            self.model = timm.create_model(
                model,
                pretrained=pretrained or weights is not None,
                pretrained_cfg_overlay=overlay,
                num_classes=num_classes,
                **size,
                **options,
            )
        # From torch for weights, from timm and its models for names and options, and from the hub.
        except (AssertionError, OSError, RuntimeError, TypeError, ValueError) as error:
            where = "" if weights is None else f" with the weights {weights}"
            reason = textwrap.shorten(str(error), LONGEST_REASON)
            raise UserError(f"timm model {model!r}{where} cannot be created: {reason}") from error
        if weights is not None:
            self.model.reset_classifier(0)
            self.model.pretrained_cfg.pop("state_dict")  # of no more use, and as large as the model
        self.local_width = self.model.num_features
        self.pooled_width = self.model.head_hidden_size
        self.image_size = image_size or self._data_config()["input_size"][1:]

    @classmethod
    def forwarded_options(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return all given ones: each model of timm has others, and checks them itself."""
        return dict(given)

    def forward(self, images: Tensor) -> TowerFeatures:
        """Return the features of images (B, 3, H, W).

        Raises:
            UserError: a model whose features are neither maps nor tokens.
        """
        output = self.model.forward_features(images)
        pooled = self.model.forward_head(output, pre_logits=True)
        shape = tuple(output.shape) if isinstance(output, Tensor) else ()
        if len(shape) == 4:
            maps = output if getattr(self.model, "output_fmt", "NCHW") == "NHWC" else output.permute(0, 2, 3, 1)
            return TowerFeatures(maps.flatten(1, 2), pooled, None, tuple(maps.shape[1:3]), has_positions=False)
        # Models that do not say how many tokens are no patches have a class token if they pool by it.
        by_token = getattr(self.model, "global_pool", None) == "token"
        prefix = getattr(self.model, "num_prefix_tokens", int(by_token))
        if len(shape) == 3 and shape[1] > prefix:
            local = output[:, prefix:]
            return TowerFeatures(local, pooled, None, self._grid(images, local.shape[1]), has_positions=True)
        raise UserError(
            f"timm model {type(self.model).__name__} gives features of the shape {shape or type(output).__name__}; "
            "local features are maps (B, C, H, W) or (B, H, W, C), or tokens (B, N, C) of patches"
        )

    def image_transform(self, is_train: bool) -> Callable[[Any], Tensor]:
        """Return timm's transform of pictures for the model: random crop and flip in training, or a center crop."""
        config = self._data_config() | {"input_size": (3, *self.image_size)}
        if self.crop_pct is not None:
            config["crop_pct"] = self.crop_pct
        data = require("timm.data", extra="timm")
        return data.create_transform(
            **config, is_training=is_train, scale=self.crop_area, hflip=self.horizontal_flip, color_jitter=None
        )

    def example_inputs(self, batch_size: int) -> Tensor:
        """Return made-up images (batch_size, 3, height, width)."""
        return torch.randn(batch_size, 3, *self.image_size)

    def _data_config(self) -> dict[str, Any]:
        return require("timm.data", extra="timm").resolve_model_data_config(self.model)

    def _grid(self, images: Tensor, length: int) -> tuple[int, int] | None:
        grid_size = getattr(getattr(self.model, "patch_embed", None), "dynamic_feat_size", None)
        if grid_size is None:
            return None
        height, width = grid_size(tuple(images.shape[2:]))
        return (height, width) if height * width == length else None  # None where patches are dropped


def _classes_and_overlay(timm: Any, model: str, weights: str | Path) -> tuple[int, dict[str, Any]]:
    """Return the number of classes that a file has weights for, and what makes timm load it as it loads its own."""
    if not Path(weights).is_file():
        raise UserError(f"weights of timm model {model!r}: no such file: {weights}")
    try:
        state = timm.models.load_state_dict(str(weights), weights_only=True)
    # Readers of damaged files raise nearly anything.
    except Exception as error:
        reason = textwrap.shorten(str(error), LONGEST_REASON)
        raise UserError(f"weights of timm model {model!r} cannot be read from {weights}: {reason}") from error
    classifiers = timm.get_pretrained_cfg(model).classifier or ()
    names = [f"{name}.weight" for name in ([classifiers] if isinstance(classifiers, str) else classifiers)]
    num_classes = next((len(state[name]) for name in names if name in state), 0)
    # Where timm expects another number of classes, it does not say which weights do not fit.
    return num_classes, {"state_dict": state, "num_classes": num_classes, "label_offset": 0, "custom_load": False}
