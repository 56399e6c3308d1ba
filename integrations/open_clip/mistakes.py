"""Mistakes that the start of a training shows: one line for each, with the cure.

A line is printed only where its cause is certain, so that a training without one needs no second look.
"""

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

import open_clip
from open_clip.constants import OPENAI_DATASET_MEAN
from torch import Tensor, nn

from vl_plugins.integrations.open_clip.steps import pad_id_of

__all__ = ["mistakes_of_captions", "mistakes_of_images", "mistakes_of_settings"]

FEW_IMAGES = 32
CUT_SHARE = 0.05
# Any pixel of a normalized picture is below this, whatever the usual mean and deviation.
LARGEST_NORMALIZED = 5.0


def mistakes_of_settings(args: Namespace, steps: int, model: nn.Module) -> list[str]:
    """Return the mistakes in flags.

    Args:
        args: the launcher's options.
        steps: of the whole training.
        model: as it is trained.
    """
    lines = []
    if args.warmup > steps and not args.skip_scheduler:
        rate = args.lr * steps / args.warmup
        lines.append(
            f"--warmup {args.warmup} is longer than the training of {steps:,} steps, which ends at a rate of "
            f"{rate:.2g}, below --lr {args.lr:g}: try --warmup {max(1, steps // 10)}"
        )
    images = args.batch_size * args.world_size * args.accum_freq
    if images < FEW_IMAGES and "num_classes" not in args.loss_kwargs:  # a loss of classes compares with all of them
        lines.append(
            f"only {images} images are compared in a step, so that each caption has {images - 1} wrong images at most: "
            "raise --batch-size, or add --accum-freq"
        )
    trained = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not name.startswith(("logit_scale", "logit_bias")):
            trained.append(name)
    if not trained:
        lines.append(
            "no weight of the model is trained, because both towers are locked: remove --lock-image or --lock-text, or "
            "add --head linear"
        )
    elif args.lr == 0:
        lines.append("nothing is trained, because --lr is 0: take 1e-5 to fine-tune, or 5e-4 from scratch")
    return lines


def mistakes_of_captions(texts: Tensor, tokenizer: Any, args: Namespace) -> list[str]:
    """Return the mistakes that the captions of the first batch show.

    Args:
        texts: (B, L) tokens.
        tokenizer: of the model.
        args: the launcher's options.
    """
    length = tokenizer.context_length
    if texts.shape[1] < length:  # 4.x may fill up to the longest of a batch
        return []
    filled = int((texts[:, length - 1] != pad_id_of(tokenizer)).sum())
    if filled <= CUT_SHARE * len(texts):
        return []
    return [
        f"{filled} of the {len(texts)} captions of the first batch fill the context of {length} tokens, and what is "
        "beyond is cut: shorten them, or take a longer --force-context-length; "
        f"`vl-plugins shards info SHARDS --model {args.model}` counts those that are cut"
    ]


def mistakes_of_images(images: Tensor, mean_in_use: Sequence[float], args: Namespace) -> list[str]:
    """Return the mistakes that the pictures of the first batch show.

    Pictures are as they were read, not normalized, if none of their numbers is negative, and they lie in [0, 1] or
    reach far beyond what a normalized picture has. This is a mistake unless the weights are meant for such pictures.

    Args:
        images: (B, 3, H, W).
        mean_in_use: by which the transform normalizes.
        args: the launcher's options.
    """
    if args.dataset_type == "synthetic":  # whose pictures are all equal
        return []
    if len(images) > 1 and bool((images == images[:1]).all()):
        return ["all pictures of the first batch are equal: look at the pictures of --train-data, and at --aug-cfg"]
    mean = expected_mean(args, mean_in_use)
    least, most = images.min().item(), images.max().item()
    is_raw = least >= 0 and (most <= 1 or most > LARGEST_NORMALIZED)
    if is_raw and min(mean) > 0:
        numbers = ", ".join(f"{number:.3f}" for number in mean)
        return [
            f"the pictures of the first batch lie in [{least:.2f}, {most:.2f}], but the weights were trained with a "
            f"mean of {numbers} taken off: remove --image-mean and --image-std"
        ]
    return []


def expected_mean(args: Namespace, mean_in_use: Sequence[float]) -> Sequence[float]:
    """Return the mean with which the weights were trained, or else that in use."""
    if args.pretrained and open_clip.is_pretrained_cfg(args.model, args.pretrained):
        return open_clip.get_pretrained_cfg(args.model, args.pretrained).get("mean", OPENAI_DATASET_MEAN)
    return mean_in_use
