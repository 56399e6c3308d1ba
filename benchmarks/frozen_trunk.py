"""Features of pictures from the image tower of a checkpoint, and that tower's weights for timm.

    python -m benchmarks.frozen_trunk CHECKPOINT toy OUT

Writes OUT/features/NAME.npy for each picture below the folder `toy`, which `vl-plugins shards coco --features` reads:
one row for each position of the last feature map but one, beside what the last map has there. Writes
OUT/trunk.safetensors, which the trainer for pytorch-metric-learning takes as `image.trunk.weights`.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import interpolate

from vl_plugins.integrations.loading import load_model

BATCH_SIZE = 128


@torch.inference_mode()
def region_features(trunk: Any, images: Tensor) -> Tensor:
    """Return the features (B, N, W) of images: the last two feature maps, at the positions of the finer one."""
    finer, coarser = trunk.forward_intermediates(images, indices=2, intermediates_only=True)
    maps = torch.cat([finer, interpolate(coarser, size=finer.shape[2:])], dim=1)
    return maps.flatten(2).transpose(1, 2)


def write_features(checkpoint: Path, pictures: Path, out: Path) -> int:
    """Write the weights, and the features of all ``.png`` pictures below a folder; return their number."""
    model: Any
    model, transform, _ = load_model(checkpoint)
    trunk = model.visual.trunk
    (out / "features").mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in trunk.state_dict().items()}, out / "trunk.safetensors")
    files = sorted(pictures.rglob("*.png"))
    for names in batches(files):
        images = torch.stack([transform(Image.open(file).convert("RGB")) for file in names])
        for file, features in zip(names, region_features(trunk, images), strict=True):
            np.save(out / "features" / f"{file.stem}.npy", features.numpy())
    return len(files)


def batches(files: list[Path]) -> Iterator[list[Path]]:
    for start in range(0, len(files), BATCH_SIZE):
        yield files[start : start + BATCH_SIZE]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="of open_clip, with an image tower of timm")
    parser.add_argument("pictures", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args(argv)
    print(f"wrote the features of {write_features(arguments.checkpoint, arguments.pictures, arguments.out):,} pictures")
    return 0


if __name__ == "__main__":
    sys.exit(main())
