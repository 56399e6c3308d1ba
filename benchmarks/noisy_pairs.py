"""Noisy pairs: swap the captions of training images, and train with the margin of Noisy Correspondence Rectifier (NCR).

    python -m benchmarks.noisy_pairs swap dataset_toy.json dataset_noisy.json --fraction 0.2
    python -m benchmarks.noisy_pairs train --loss adaptive_margin ...

``train`` takes the options of ``python -m vl_plugins.integrations.open_clip`` and knows one more loss, which
benchmarks/studies/noise.yaml compares with a fixed margin.
"""

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from vl_plugins.integrations.open_clip.launcher import main as train
from vl_plugins.losses import Pairs, UnifiedLoss, soft_margin

TOP = 0.1  # of the positive pairs of a batch, which are taken to match


def swap_captions(annotations: dict[str, Any], fraction: float, seed: int = 0) -> None:
    """Give a part of the training images, drawn by ``seed``, the captions of the next one of them."""
    images = [image for image in annotations["images"] if image["split"] == "train"]
    chosen = random.Random(seed).sample(images, round(fraction * len(images)))
    captions = [image["sentences"] for image in chosen]
    for image, sentences in zip(chosen, captions[1:] + captions[:1], strict=True):
        image["sentences"] = sentences
        image["sentids"] = [sentence["sentid"] for sentence in sentences]


class AdaptiveMarginLoss(UnifiedLoss):
    """Unified loss with a soft margin for each positive pair by how similar it is already, see Huang et al. 2021, NCR.

    The confidence is the similarity over the mean of the best positive pairs of the batch, in [0, 1]. NCR's division of
    the data set by the losses of two networks is not part of this.
    """

    has_independent_pairs = False

    def __init__(self, scale: float = 50.0):
        super().__init__(margin=0.0, scale=scale)

    def pair_loss(self, positive: Tensor, negative: Tensor, pairs: Pairs) -> Tensor:
        similarities = positive.detach()
        certain = similarities.topk(max(1, round(TOP * len(similarities)))).values.mean().clamp(min=1e-6)
        margin = soft_margin((similarities / certain).clamp(0, 1), margin=0.2)
        return super().pair_loss(positive, negative + margin, pairs)


def train_with_adaptive_margin(arguments: Sequence[str]) -> int:
    """Run open_clip's trainer as if a package with this loss was installed."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder, "noisy_pairs-0.dist-info")
        package.mkdir()
        (package / "METADATA").write_text("Name: noisy_pairs\nVersion: 0\n")
        loss = "adaptive_margin = benchmarks.noisy_pairs:AdaptiveMarginLoss"
        (package / "entry_points.txt").write_text(f"[vl_plugins.losses]\n{loss}\n")
        sys.path.append(folder)
        return train(arguments)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    swap = commands.add_parser("swap", help="swap captions")
    swap.add_argument("annotations", type=Path, help="in Karpathy's format")
    swap.add_argument("out", type=Path, help="file for the annotations with swapped captions")
    swap.add_argument("--fraction", type=float, required=True, help="of the training images, [0, 1]")
    swap.add_argument("--seed", type=int, default=0)
    commands.add_parser("train", help="train", add_help=False)
    arguments, others = parser.parse_known_args(argv)
    if arguments.command == "train":
        return train_with_adaptive_margin(others)
    annotations = json.loads(arguments.annotations.read_text())
    swap_captions(annotations, arguments.fraction, arguments.seed)
    arguments.out.write_text(json.dumps(annotations))
    return 0


if __name__ == "__main__":
    sys.exit(main())
