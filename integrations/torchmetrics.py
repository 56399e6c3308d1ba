"""Recalls of image-text retrieval as a metric of torchmetrics, such as for Lightning."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat
from torchmetrics.utilities.distributed import gather_all_tensors

from vl_plugins.retrieval import retrieval_metrics, retrieval_ranks

__all__ = ["CrossModalRecall"]

STATES = ("images", "captions", "image_ids", "caption_image_ids", "caption_ids")  # a list of batches each
# Of unit vectors. Half precision moves an embedding by some 0.02 from one batch to another.
LARGEST_DIFFERENCE = 0.05


class CrossModalRecall(Metric):
    """Recall@1, 5 and 10 by cosine, image to text and text to image, with several captions per image, and RSUM.

    The embeddings of all batches and processes are kept, as float32, and ranked exactly; ties count against the model.
    Samples may come again, as ``DistributedSampler`` repeats some so that all processes have equally many: each image
    and each caption counts once, with its first embedding. A process may have no samples.

    Args:
        kwargs: of ``torchmetrics.Metric``.
    """

    full_state_update = False
    images: list[Tensor]
    captions: list[Tensor]
    image_ids: list[Tensor]
    caption_image_ids: list[Tensor]
    caption_ids: list[Tensor]

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        for name in STATES:
            self.add_state(name, [], dist_reduce_fx="cat")

    def update(
        self,
        images: Tensor,
        captions: Tensor,
        image_ids: Tensor,
        caption_image_ids: Tensor | None = None,
        caption_ids: Tensor | None = None,
    ) -> None:
        """Add the embeddings (B, D) of images and (C, D) of captions.

        Without ``caption_ids`` each row of images must come with all captions of its image, as many for each. If the
        captions of an image are spread over several rows or batches, or their numbers differ, give their ids.

        Args:
            images, captions: embeddings.
            image_ids: (B,) integer ids, unique in the whole job.
            caption_image_ids: (C,) the image of each caption; by default captions k i to k i + k - 1 are those of image
                i, with k = C / B.
            caption_ids: (C,) integers that tell the captions of an image apart, such as COCO's annotation ids or the
                numbers of the captions in their images; by default the numbers 0 to k - 1 in their rows.

        Raises:
            ValueError: ``caption_image_ids`` without ``caption_ids``, or numbers of rows that do not fit.
        """
        if caption_image_ids is not None and caption_ids is None:
            raise ValueError("caption_image_ids needs caption_ids, by which captions that come again count once")
        per_image = len(captions) // max(1, len(images))
        if caption_image_ids is None:
            caption_image_ids = image_ids.repeat_interleave(per_image)
        if caption_ids is None:
            caption_ids = torch.arange(per_image).repeat(len(images))
        if len(images) != len(image_ids) or not len(captions) == len(caption_image_ids) == len(caption_ids):
            raise ValueError(
                f"expected an id of each image and an image and an id of each caption; got {len(images)} images, "
                f"{len(image_ids)} image_ids, {len(captions)} captions, {len(caption_image_ids)} caption_image_ids "
                f"and {len(caption_ids)} caption_ids"
            )
        self.images.append(images.detach().float())  # processes send each other embeddings of one type
        self.captions.append(captions.detach().float())
        self.image_ids.append(image_ids.to(images.device, torch.int64))
        self.caption_image_ids.append(caption_image_ids.to(images.device, torch.int64))
        self.caption_ids.append(caption_ids.to(images.device, torch.int64))

    def compute(self) -> dict[str, Tensor]:
        """Return recalls as fractions under open_clip's names, such as ``image_to_text_R@1``, and ``rsum``, [0, 600].

        Raises:
            ValueError: no images; an image without captions, or a caption without an image; or an image or a caption
                that comes again with another embedding, so that its id is not unique.
        """
        if len(self.image_ids) == 0 or len(dim_zero_cat(self.image_ids)) == 0:
            raise ValueError("there are no images: call update before compute")
        image_keys = dim_zero_cat(self.image_ids)[:, None]
        caption_keys = torch.stack([dim_zero_cat(self.caption_image_ids), dim_zero_cat(self.caption_ids)], dim=1)
        image_keys, images = _first_of_each(image_keys, dim_zero_cat(self.images))
        caption_keys, captions = _first_of_each(caption_keys, dim_zero_cat(self.captions))
        image_of_caption = _positions(caption_keys[:, 0].contiguous(), image_keys[:, 0].contiguous())
        metrics = retrieval_metrics(retrieval_ranks(images, captions, image_of_caption, normalize=False))
        chosen = [name for name in metrics if "_R@" in name or name == "rsum"]
        return {name: torch.tensor(metrics[name], device=images.device) for name in chosen}

    def _sync_dist(self, dist_sync_fn: Callable = gather_all_tensors, process_group: Any = None) -> None:
        """Join the states of all processes.

        A process without samples joins with empty states of the same types and shapes as those of the others. The base
        class would send float32 of one dimension for all of them, or nothing.
        """
        width, device = 0, self.device
        if len(self.images) > 0:
            width, device = self.images[0].shape[1], self.images[0].device
        widths = dist_sync_fn(torch.tensor([width], device=device), group=process_group or self.process_group)
        width = int(max(widths))
        for name in STATES:
            if len(getattr(self, name)) == 0:
                is_ids = name.endswith("_ids")
                empty = torch.empty(0, dtype=torch.int64) if is_ids else torch.empty(0, width)
                setattr(self, name, [empty.to(device)])
        super()._sync_dist(dist_sync_fn, process_group)


def _first_of_each(keys: Tensor, embeddings: Tensor) -> tuple[Tensor, Tensor]:
    """Return the unique keys of N rows, (U, k) in ascending order, and the first embedding of each, normalized.

    Args:
        keys: (N, k), the id of an image, or those of a caption's image and of the caption.
        embeddings: (N, D).

    Raises:
        ValueError: a later embedding of the same key differs from the first.
    """
    embeddings = normalize(embeddings.float())
    unique_keys, key_of_row = keys.unique(dim=0, return_inverse=True)
    rows = torch.arange(len(keys), device=keys.device)
    first_rows = rows.new_full((len(unique_keys),), len(keys)).scatter_reduce(0, key_of_row, rows, "amin")
    differences = torch.linalg.vector_norm(embeddings - embeddings[first_rows[key_of_row]], dim=1)
    differing_rows = (differences > LARGEST_DIFFERENCE).nonzero()  # not NaN, for which ranking raises an error
    if len(differing_rows):
        image, *caption = keys[differing_rows[0, 0]].tolist()
        name = f"caption {caption[0]} of image {image}" if caption else f"image {image}"
        raise ValueError(
            f"{name} comes again with another embedding: image_ids must be unique in the whole job, and caption_ids in "
            "their image; give caption_ids if the captions of an image are spread over several rows"
        )
    return unique_keys, embeddings[first_rows]


def _positions(ids: Tensor, sorted_ids: Tensor) -> Tensor:
    """Return where each id of a caption's image stands among those of the images."""
    positions = torch.searchsorted(sorted_ids, ids).clamp(max=len(sorted_ids) - 1)
    absent = sorted_ids[positions] != ids
    if absent.any():
        raise ValueError(f"there are captions of image {int(ids[absent][0])}, but no such image")
    return positions
