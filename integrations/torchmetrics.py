"""Recalls of image-text retrieval as a metric of torchmetrics, such as for Lightning."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from vl_plugins.retrieval import retrieval_metrics, retrieval_ranks

__all__ = ["CrossModalRecall"]

STATES = ("images", "captions", "image_ids", "caption_image_ids")


class CrossModalRecall(Metric):
    """Recall@1, 5 and 10 by cosine, image to text and text to image, with several captions per image, and RSUM.

    The embeddings of all batches and processes are kept and ranked exactly; ties count against the model.

    Args:
        kwargs: of ``torchmetrics.Metric``.
    """

    full_state_update = False

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        for name in STATES:
            self.add_state(name, [], dist_reduce_fx="cat")

    def update(
        self, images: Tensor, captions: Tensor, image_ids: Tensor, caption_image_ids: Tensor | None = None
    ) -> None:
        """Add the embeddings (B, D) of images and (C, D) of captions.

        Args:
            images, captions: embeddings.
            image_ids: (B,) integer ids in the whole job; an image that comes again counts once.
            caption_image_ids: (C,); by default captions k i to k i + k - 1 are those of image i.
        """
        if caption_image_ids is None:
            caption_image_ids = image_ids.repeat_interleave(len(captions) // max(1, len(images)))
        for name, value in zip(STATES, (images, captions, image_ids, caption_image_ids), strict=True):
            getattr(self, name).append(value.detach())

    def compute(self) -> dict[str, Tensor]:
        """Return recalls as fractions under open_clip's names, such as ``image_to_text_R@1``, and ``rsum``, [0, 600].

        Raises:
            ValueError: an image without captions, or a caption without an image.
        """
        images, captions, image_ids, caption_image_ids = (dim_zero_cat(getattr(self, name)) for name in STATES)
        ids, index = image_ids.unique(return_inverse=True)
        images = torch.empty_like(images[: len(ids)]).index_put((index,), images)
        image_of_caption = (caption_image_ids[:, None] == ids).nonzero()[:, 1]
        ranks = retrieval_ranks(normalize(images.float()), normalize(captions.float()), image_of_caption)
        metrics = retrieval_metrics(ranks)
        chosen = [name for name in metrics if "_R@" in name or name == "rsum"]
        return {name: torch.tensor(metrics[name], device=images.device) for name in chosen}
