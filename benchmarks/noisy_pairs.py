"""Noisy pairs for benchmarks/studies/noise.yaml: captions of other images, and a margin that should cope with them.

    python -m benchmarks.noisy_pairs dataset_toy.json dataset_noisy.json --fraction 0.2
    python -m vl_plugins.integrations.open_clip --loss benchmarks.noisy_pairs:AdaptiveMarginLoss ...

The first command gives a part of the training images, in Karpathy's format, the captions of others.
"""

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

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

    def __init__(self, scale: float = 50.0, **options: Any):
        super().__init__(margin=0.0, scale=scale, **options)

    def pair_loss(self, positive: Tensor, negative: Tensor, pairs: Pairs) -> Tensor:
        similarities = positive.detach()
        certain = similarities.topk(max(1, round(TOP * len(similarities)))).values.mean().clamp(min=1e-6)
        margin = soft_margin((similarities / certain).clamp(0, 1), margin=0.2)
        return super().pair_loss(positive, negative + margin, pairs)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("annotations", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--fraction", type=float, required=True, help="of the training images, [0, 1]")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    annotations = json.loads(arguments.annotations.read_text())
    swap_captions(annotations, arguments.fraction, arguments.seed)
    arguments.out.write_text(json.dumps(annotations))


if __name__ == "__main__":
    main()
