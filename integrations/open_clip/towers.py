"""Local and pooled features of the towers of any open_clip model, through what the towers offer publicly."""

from typing import Any

import torch
from open_clip import CLIP, CustomTextCLIP
from open_clip.hf_model import HFTextEncoder
from open_clip.timm_model import TimmModel
from open_clip.transformer import TextTransformer, VisionTransformer
from torch import Tensor

from vl_plugins.errors import UserError
from vl_plugins.modules import TowerFeatures

__all__ = ["image_features", "text_features"]

LAST = 1  # of the blocks, as ``forward_intermediates`` counts them


def image_features(model: CLIP | CustomTextCLIP, images: Tensor) -> TowerFeatures:
    """Run the image tower of an open_clip model.

    Args:
        model: with an image tower of open_clip or timm.
        images: (B, 3, H, W), as ``encode_image`` takes them.

    Raises:
        UserError: a timm model that does not give the features of its blocks.
    """
    visual = model.visual
    trunk = visual.trunk if isinstance(visual, TimmModel) else visual
    if not hasattr(trunk, "forward_intermediates"):
        raise UserError(f"--head set: the image tower {type(trunk).__name__} has no local features")
    # Patches that are dropped in training leave no map. Towers that cannot drop any may offer maps alone.
    drops_patches = isinstance(visual, VisionTransformer) or hasattr(trunk, "patch_drop")
    output = model.forward_intermediates(
        image=images, image_indices=LAST, normalize=False, image_output_fmt="NLC" if drops_patches else "NCHW"
    )
    (local,) = output["image_intermediates"]
    if not drops_patches:
        grid = tuple(local.shape[2:])
        return TowerFeatures(
            local.flatten(2).transpose(1, 2), output["image_features"], None, grid, has_positions=False
        )
    height, width = images.shape[2:]
    if isinstance(trunk, VisionTransformer):
        height, width = height // trunk.patch_size[0], width // trunk.patch_size[1]
    else:
        height, width = trunk.patch_embed.dynamic_feat_size((height, width))
    grid = (height, width) if local.shape[1] == height * width else None
    return TowerFeatures(local, output["image_features"], None, grid, has_positions=True)


def text_features(model: CLIP | CustomTextCLIP, texts: Tensor) -> TowerFeatures:
    """Run the text tower of an open_clip model.

    Args:
        model: with a text tower of open_clip or Hugging Face.
        texts: (B, L) token ids, as ``encode_text`` takes them.
    """
    tower = getattr(model, "text", model)
    if isinstance(tower, HFTextEncoder):
        caught: list[Any] = []  # a tower that is built to return its tokens breaks ``encode_text``
        handle = tower.transformer.register_forward_hook(lambda module, inputs, output: caught.append(output))
        try:
            pooled = tower(texts)
        finally:
            handle.remove()
        local, padding_mask = caught[0].last_hidden_state, texts == tower.config.pad_token_id
    else:
        output = model.forward_intermediates(text=texts, text_indices=LAST, normalize=False, text_output_fmt="NLC")
        (local,), pooled = output["text_intermediates"], output["text_features"]
        padding_mask = _padding_mask(tower, texts)
    return TowerFeatures(local, pooled, padding_mask, None, has_positions=True)


def _padding_mask(tower: CLIP | TextTransformer, texts: Tensor) -> Tensor:
    """Return what follows the end of each text, (B, L).

    CLIP pads with 0, which is also the token of "!", so its end is where the tower itself looks for it.
    """
    pool_type = getattr(tower, "pool_type", None) or tower.text_pool_type
    if pool_type == "argmax":
        end = texts.argmax(dim=-1)
    elif pool_type == "eos":
        end_token = tower.eos_id if hasattr(tower, "eos_id") else tower.text_eos_id
        end = (texts == end_token).int().argmax(dim=-1)
    else:
        return texts == tower.pad_id
    return torch.arange(texts.shape[1], device=texts.device) > end[:, None]
