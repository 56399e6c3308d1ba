"""Where the slots of a set prediction module look in a picture, and which caption is nearest to what each one makes.

As Figures 4 and A2 of Kim et al. 2023, Improving Cross-Modal Retrieval with Set of Diverse Embeddings.
"""

import math
import os
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import interpolate, normalize

from vl_plugins.data import Collection, normalize_caption
from vl_plugins.data.samples import decode
from vl_plugins.errors import UserError, require, unknown_name
from vl_plugins.plots.figures import COLORS, new_figure, write_figure

__all__ = ["AttendedImage", "attended_images", "plot_attention"]

CAPTIONS_PER_BATCH = 256
PANEL = 1.9  # inches
FONT_SIZE = 8
MARKS = {True: ("✓", COLORS[0], "caption of this image"), False: ("✗", COLORS[1], "caption of another image")}


class AttendedImage(NamedTuple):
    """A picture, and the attention and nearest caption of each of its K slots.

    Args:
        image: (H, W, 3), [0, 1].
        attention: (K, h, w), >= 0, of the slots to the places of the picture, from its upper left.
        captions: K texts, the nearest caption of each slot's element.
        matches: K booleans, whether that is a caption of this image.
    """

    image: Tensor
    attention: Tensor
    captions: Sequence[str]
    matches: Sequence[bool]


def plot_attention(items: Sequence[AttendedImage], out: str | os.PathLike[str]) -> None:
    """Draw a row for each picture: itself, and dimmed under the attention of each slot, with the nearest caption below.

    The same attention has the same color everywhere, which shows how the slots compete for a place. Captions of the
    picture itself are blue after a check mark, those of others red after a cross.

    Args:
        items: at least one, on the CPU, all with the same number of slots.
        out: ``.png``, ``.pdf`` or ``.svg``; its folder is created.
    """
    headings = ["image", *(f"slot {number}" for number, _ in enumerate(items[0].captions, 1))]
    figure = new_figure(len(headings) * (PANEL + 0.1) + 0.7, len(items) * (PANEL + 0.6) + 0.6)
    rows = figure.subplots(len(items), len(headings), squeeze=False)
    for axes, heading in zip(rows[0], headings, strict=True):
        axes.set_title(heading, fontsize=FONT_SIZE + 1)
    for axes in rows.flat:
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
    largest = max(item.attention.max().item() for item in items) or 1.0
    for item, (picture, *panels) in zip(items, rows, strict=True):
        picture.imshow(item.image.numpy())
        gray = 0.2 + 0.7 * item.image @ item.image.new_tensor([0.299, 0.587, 0.114])
        maps = interpolate(item.attention[None], item.image.shape[:2], mode="bilinear", align_corners=False)[0]
        for axes, attention, caption, match in zip(panels, maps, item.captions, item.matches, strict=True):
            axes.imshow(gray.numpy(), cmap="gray", vmin=0, vmax=1)
            # The lightness of inferno grows evenly, for every kind of color vision, and in gray.
            shown = axes.imshow(attention.numpy(), cmap="inferno", vmin=0, vmax=largest, alpha=0.55)
            sign, color, _ = MARKS[match]
            text = textwrap.fill(f"{sign} {caption}", 26, max_lines=6, placeholder=" …")
            axes.set_xlabel(text, color=color, fontsize=FONT_SIZE, parse_math=False)  # dollar signs are no formulas
    figure.colorbar(shown, ax=rows, fraction=0.02, aspect=40, label="attention")
    for (sign, color, meaning), place in zip(MARKS.values(), (0.25, 0.6), strict=True):
        figure.text(place, 0, f"{sign} {meaning}", color=color, fontsize=FONT_SIZE, va="bottom")
    figure.get_layout_engine().set(rect=(0, 0.25 / figure.get_figheight(), 1, 1 - 0.25 / figure.get_figheight()))
    write_figure(figure, out)


@torch.inference_mode()
def attended_images(
    model: Any,
    preprocess: Callable[[Any], Tensor],
    tokenizer: Callable[[list[str]], Tensor],
    collection: Collection,
    *,
    images: int = 3,
    keys: Sequence[str] = (),
    device: torch.device | str = "cpu",
) -> list[AttendedImage]:
    """Run a model on some images of shards, and find the captions of all of them nearest to each element.

    The nearest caption has the element with the largest cosine; of several with the same the first.

    Args:
        model: with a set head, as :func:`vl_plugins.integrations.loading.load_model` returns it with the other two.
        preprocess: from an RGB ``PIL.Image`` to a tensor (3, H, W); the picture is shown without its normalization.
        tokenizer: from n texts to a tensor (n, L).
        collection: images and captions.
        images: how many, the first of the shards, without ``keys``.
        keys: of the images in the shards, such as ``coco-test-00000042``, or their image ids.
        device: where the model is.

    Returns:
        In the order of ``keys``, or of the shards.

    Raises:
        UserError: the model has no set head or grid, or there is no such image.
    """
    if getattr(model, "head", None) != "set":
        raise UserError("the model has no set head, so no slots to draw")
    names = [*collection.keys, *map(str, collection.image_ids)]
    if unknown := [key for key in keys if key not in names]:
        raise unknown_name("image", unknown[0], collection.keys)
    indices = [names.index(key) % len(collection) for key in dict.fromkeys(keys)] or [*range(len(collection))][:images]
    files = collection.pictures(indices)
    to_pixels, to_inputs = _split_normalization(preprocess)
    pictures = torch.stack([to_pixels(decode({"jpg": files[index]})) for index in indices])
    output = model.predict_image_sets(to_inputs(pictures).to(device))
    attention = output.attention[:, -1].transpose(1, 2)  # (I, K, N)
    if model.grid is None or math.prod(model.grid) != attention.shape[2]:
        raise UserError("the local features of the image tower are no grid, so there is no map to draw")
    attention = attention.unflatten(2, model.grid).float().cpu()
    nearest = _nearest_captions(model, tokenizer, collection.captions, normalize(output.embeddings.float(), dim=-1))
    items = []
    for index, picture, maps, row in zip(indices, pictures, attention, nearest, strict=True):
        captions = [collection.captions[caption] for caption in row]
        own = [normalize_caption(caption) for caption in collection.records[index].captions]
        matches = [normalize_caption(caption) in own for caption in captions]  # which may be another image's, too
        items.append(AttendedImage(picture.permute(1, 2, 0).clamp(0, 1), maps, captions, matches))
    return items


def _split_normalization(preprocess: Callable) -> tuple[Callable, Callable]:
    """Return what makes pixels in [0, 1] of an image, and what makes the model's inputs of those."""
    transforms = require("torchvision.transforms", extra="open-clip")
    if isinstance(preprocess, transforms.Compose) and isinstance(preprocess.transforms[-1], transforms.Normalize):
        return transforms.Compose(preprocess.transforms[:-1]), preprocess.transforms[-1]
    return preprocess, lambda pixels: pixels


def _nearest_captions(model: Any, tokenizer: Callable, captions: Sequence[str], elements: Tensor) -> list[list[int]]:
    """Return the index of the nearest of C captions for each of the L2-normalized elements (I, K, D)."""
    cosines = []
    for start in range(0, len(captions), CAPTIONS_PER_BATCH):
        tokens = tokenizer(list(captions[start : start + CAPTIONS_PER_BATCH])).to(elements.device)
        sets = model.encode_text(tokens, normalize=True)  # (c, L, D)
        cosines.append((sets.float() @ elements.flatten(0, 1).T).amax(dim=1))  # (c, I * K)
    if not (nearest := torch.cat(cosines).max(dim=0)).values.isfinite().all():
        raise UserError("the embeddings of the model are not finite")
    return nearest.indices.view(elements.shape[:2]).tolist()
