"""Image models of timm."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vl_plugins.errors import require
from vl_plugins.modules import TowerFeatures

__all__ = ["TimmTrunk"]

# With these options, and a model `local-dir:FOLDER`, timm reads files, in some versions as pickles that can run code.
FILE_OPTIONS = frozenset({"checkpoint_path", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir", "local-dir"})


class TimmTrunk(nn.Module):
    """An image model of timm with feature maps or tokens, without its classifier.

    Local features are the positions of the last feature map, or the patches of a transformer without class and register
    tokens, as the model's ``forward_features`` returns them. ``pooled`` is the input of the model's classifier. Layers
    that only ``pooled`` goes through get no gradient where an embedder does not use it.

    Args:
        model: name of a model, with or without the tag of its weights: ``"resnet152.tv_in1k"``.
        pretrained: whether to load the weights of timm: those of the tag, or the model's default ones.
        weights: file of weights to load instead, of torch or safetensors, for models of the same sizes. A classifier in
            it is left out.
        image_size: height and width of images in pixels, or both in one number; by default those of the weights.
        crop_area: least and largest share of the picture's area in a random crop of training. VSE++ has 0.08 to 1, the
            default of timm and torchvision for classification, which cuts off most of what a caption says.
        horizontal_flip: probability in training that a picture is mirrored; its caption is not.
        crop_pct: share of height and width in the center crop of evaluation; by default that of the weights.
        options: any that ``timm.create_model`` takes for this model, such as ``drop_path_rate``.

    Attributes:
        image_size: (height, width).

    Raises:
        ValueError: an option that timm would read a file by, or a file that lacks weights; timm raises other errors.
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
        for name in FILE_OPTIONS.intersection([*options, model.partition(":")[0]]):
            raise ValueError(f"{name} is not supported: give a file of weights with the option weights")
        timm = require("timm", extra="timm")
        size = (image_size, image_size) if isinstance(image_size, int) else image_size and tuple(image_size)
        # Other models take images of any size, and have no such option.
        if size and getattr(timm.get_pretrained_cfg(model), "fixed_input_size", False):
            options = {"img_size": size} | options
        self.model = timm.create_model(model, pretrained, **{"num_classes": 0} | options)
        if weights is not None:
            read = timm.models.load_checkpoint(self.model, str(weights), strict=False, weights_only=True)
            if read.missing_keys:  # they would stay random
                raise ValueError(f"{weights} does not have the weights {', '.join(read.missing_keys[:3])}")
        self.local_width, self.pooled_width = self.model.num_features, self.model.head_hidden_size
        config = timm.data.resolve_model_data_config(self.model)
        self.image_size = size or config["input_size"][1:]
        config |= {"input_size": (3, *self.image_size)} | ({} if crop_pct is None else {"crop_pct": crop_pct})
        config |= {"scale": tuple(crop_area), "hflip": horizontal_flip, "color_jitter": None}
        self._transform = partial(timm.data.create_transform, **config)

    def forward(self, images: Tensor) -> TowerFeatures:
        """Return the features of images (B, 3, H, W)."""
        output = self.model.forward_features(images)
        pooled = self.model.forward_head(output, pre_logits=True)
        if output.ndim == 4:
            maps = output if getattr(self.model, "output_fmt", "NCHW") == "NHWC" else output.permute(0, 2, 3, 1)
            return TowerFeatures(maps.flatten(1, 2), pooled, None, tuple(maps.shape[1:3]), has_positions=False)
        # Models without this number have a class token if they pool by it.
        by_token = getattr(self.model, "global_pool", None) == "token"
        local = output[:, getattr(self.model, "num_prefix_tokens", int(by_token)) :]
        grid_size = getattr(getattr(self.model, "patch_embed", None), "dynamic_feat_size", None)
        grid = grid_size and tuple(grid_size(tuple(images.shape[2:])))
        has_all_patches = grid and grid[0] * grid[1] == local.shape[1]
        return TowerFeatures(local, pooled, None, grid if has_all_patches else None, has_positions=True)

    def image_transform(self, is_train: bool) -> Callable[[Any], Tensor]:
        """Return timm's transform of pictures for the model: random crop and flip in training, or a center crop."""
        return self._transform(is_training=is_train)
