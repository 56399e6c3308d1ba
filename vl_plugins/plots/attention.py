"""Where the slots of a set prediction module look in a picture, and which caption is nearest to what each one makes.

As Figures 4 and A2 of Kim et al. 2023, Improving Cross-Modal Retrieval with Set of Diverse Embeddings.
"""

import io
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, normalize

from vl_plugins.data.captions import normalize_caption
from vl_plugins.data.contact_sheet import FALLBACK_FONTS
from vl_plugins.data.reader import EvaluationPipeline, evaluation_pipeline
from vl_plugins.data.shard_files import EXTENSIONS, expand_shards, read_samples
from vl_plugins.data.shard_scanner import ScannedSample
from vl_plugins.plots.figures import COLOURS, new_figure, picture_file, write_figure
from vl_plugins.utils.checks import positive
from vl_plugins.utils.errors import UserError, unknown_name
from vl_plugins.utils.optional import require

__all__ = ["AttendedImage", "attended_images", "plot_attention"]

MOST_IMAGES = 60
MOST_LINES = 8  # of a caption

COLOUR_MAP = "inferno"  # its lightness grows evenly, for every kind of colour vision, and in grey
OPACITY = 0.55
GREY = (0.2, 0.9)  # of black and of white in the picture under the attention

OF_THIS_IMAGE = ("✓", COLOURS[0], "caption of this image")
OF_ANOTHER_IMAGE = ("✗", COLOURS[1], "caption of another image")

# Inches.
MARGIN, GAP, ROW_GAP = 0.15, 0.12, 0.2
WIDEST_PANEL, NARROWEST_PANEL, ALL_PANELS = 1.9, 1.4, 14.0
HEADING, CAPTION_GAP, LEGEND = 0.28, 0.06, 0.3
BAR, BAR_LABELS = 0.12, 0.6
# Of a panel; a higher picture is made narrower.
MOST_HEIGHT = 1.5

POINT = 1 / 72  # of an inch
FONT_SIZE, LINE = 8.0, 1.25


class AttendedImage(NamedTuple):
    """A picture, and the attention and nearest caption of each of its K slots.

    Args:
        image: (H, W, 3), [0, 1], an array or a tensor.
        attention: (K, h, w), >= 0, of the slots to the places of the picture, from its upper left.
        captions: K texts, of each slot's element the nearest caption.
        matches: K booleans, whether that is a caption of this image.
    """

    image: Any
    attention: Any
    captions: Sequence[str]
    matches: Sequence[bool]


def plot_attention(
    items: Sequence[AttendedImage], out: str | os.PathLike[str], *, largest: float | None = None
) -> None:
    """Draw a row for each picture: itself, and dimmed under the attention of each slot, with the nearest caption below.

    The same attention has the same colour everywhere, which shows how the slots compete for a place. Captions of the
    picture itself are blue after a check mark, those of others red after a cross.

    Args:
        items: 1 to 60, with the same number of slots.
        out: the picture, by its suffix ``.png``, ``.pdf`` or ``.svg``; its folder is created.
        largest: the attention of the last colour, > 0. By default 1 for attention that sums to 1 over the slots at
            every place, and for any other the largest that there is.

    Raises:
        UserError: no or too many items, another suffix, or a picture that cannot be written.
        ValueError: an item of wrong shapes or values, or ``largest`` out of its range.
        MissingExtraError: matplotlib is not installed.
    """
    if not 1 <= len(items) <= MOST_IMAGES:
        raise UserError(f"the picture shows 1 to {MOST_IMAGES} images, got {len(items)}")
    out = picture_file(out)
    items = [_checked(item, len(items[0].captions)) for item in items]
    if largest is None:
        compete = all(bool(((item.attention.sum(dim=0) - 1).abs() < 0.01).all()) for item in items)
        largest = 1.0 if compete else max(item.attention.max().item() for item in items) or 1.0
    write_figure(_draw_attention(items, positive("largest", largest)), out)


def attended_images(
    model: nn.Module,
    preprocess: Callable[[Any], Tensor],
    tokenizer: Callable[[list[str]], Tensor],
    shards: str | Sequence[str],
    *,
    images: int = 3,
    keys: Sequence[str] = (),
    iteration: int | None = None,
    max_captions: int | None = None,
    batch_size: int = 64,
    device: torch.device | str = "cpu",
) -> list[AttendedImage]:
    """Run a model on some images of shards, and find the captions of all of them nearest to each element.

    The nearest caption is the one with the element that has the largest cosine with the image's; of several with the
    same the first.

    Args:
        model: with a set head, as :func:`vl_plugins.integrations.checkpoints.load_model` returns it with the other two.
        preprocess: from an RGB ``PIL.Image`` to a tensor (3, H, W); its normalisation is left out of the picture.
        tokenizer: from a list of n strings to a tensor (n, L).
        shards: shards, or a pattern for :func:`vl_plugins.data.shard_files.expand_shards`.
        images: how many, the first of the shards, without ``keys``; 1 to 60.
        keys: names of the images, as in the shards or in the source: ``coco-test-00000042``, ``COCO_val2014_42.jpg``.
        iteration: 1 to T, of which the attention is shown; by default the last. The elements are always the last's.
        max_captions: only the first so many captions of each image are compared.
        batch_size: images in a batch, whose captions are encoded together.
        device: where the model is.

    Returns:
        In the order of ``keys``, or of the shards.

    Raises:
        UserError: the model has no set head or no grid of local features, there is no such image, shards cannot be
            read, or a number is out of its range.
    """
    number = len(keys) or images
    if not 1 <= number <= MOST_IMAGES:
        raise UserError(f"the picture shows 1 to {MOST_IMAGES} images, got {number}")
    head = getattr(model, "head", None)
    if head != "set":
        raise UserError(f"the model has no set head{f' but a {head} head' if head else ''}, so no slots to draw")
    # First of all, as it checks numbers and shards.
    batches = evaluation_pipeline(shards, _nothing, list, batch_size, max_captions=max_captions)

    to_pixels, to_inputs = _split_normalisation(preprocess)
    found = _find_images(expand_shards(shards), images, keys)
    if not found:
        raise UserError("the shards hold no images")
    pictures = torch.stack([to_pixels(image) for _, image in found])  # (I, 3, H, W)
    with torch.inference_mode():
        output = model.predict_image_sets(to_inputs(pictures).to(device))
        attention = _maps(output.attention, iteration, model.grid)
        elements = normalize(output.embeddings.float(), dim=-1)
        captions, matches = _nearest_captions(model, tokenizer, batches, elements, [place for place, _ in found])
    pictures = pictures.permute(0, 2, 3, 1).clamp(0, 1)
    return [AttendedImage(*item) for item in zip(pictures, attention, captions, matches, strict=True)]


def _find_images(shards: Sequence[str], number: int, names: Sequence[str]) -> list[tuple[int, Any]]:
    """Return position in the shards and RGB image of those with the names, or of the first ``number``."""
    pillow = require("PIL.Image", extra="data")
    found: dict[Any, tuple[int, Any]] = {}
    known: list[str] = []
    wanted = set(names)
    for position, (place, sample) in enumerate(_samples(shards)):
        if len(found) == (len(wanted) if names else number):
            break
        try:
            own_names = _names(sample)
            hits = wanted.intersection(own_names) - set(found) if names else {position}
            if hits:
                content = next(sample.data[extension] for extension in EXTENSIONS if extension in sample.data)
                found |= dict.fromkeys(hits, (position, pillow.open(io.BytesIO(content)).convert("RGB")))
        # Decoders of damaged files raise nearly anything.
        except Exception as error:
            raise UserError(f"cannot read sample {sample.key} of {place}: {error!r}") from error
        known += own_names
    for name in names:
        if name not in found:
            raise unknown_name("image", name, set(known))
    return [found[name] for name in dict.fromkeys(names)] if names else list(found.values())


def _samples(shards: Sequence[str]) -> Iterator[tuple[str, ScannedSample]]:
    for shard in shards:
        try:
            for sample in read_samples(shard):
                yield shard, sample
        except Exception as error:
            raise UserError(f"cannot read shard {shard}: {error!r}") from error


def _names(sample: ScannedSample) -> list[str]:
    """Return the names that a sample goes by: its key, and the file that it was."""
    metadata = json.loads(sample.data.get("json", b"{}"))
    filename = metadata.get("filename") if isinstance(metadata, dict) else None
    names = [sample.key]
    if isinstance(filename, str):
        names += [filename, PurePosixPath(filename).name]
    return names


def _nothing(image: Any) -> Tensor:
    """Stand in for the transform of images that are not looked at."""
    return torch.empty(0)


def _split_normalisation(preprocess: Callable) -> tuple[Callable, Callable]:
    """Return what makes pixels in [0, 1] of an image, and what makes the model's inputs of those."""
    transforms = require("torchvision.transforms", extra="open-clip")
    if isinstance(preprocess, transforms.Compose) and isinstance(preprocess.transforms[-1], transforms.Normalize):
        return transforms.Compose(preprocess.transforms[:-1]), preprocess.transforms[-1]
    return preprocess, lambda pixels: pixels


def _maps(attention: Tensor, iteration: int | None, grid: tuple[int, int] | None) -> Tensor:
    """Return the attention of an iteration (I, K, h, w) of that of all (I, T, N, K)."""
    _, iterations, inputs, _ = attention.shape
    if iteration is None:
        iteration = iterations
    if not 1 <= iteration <= iterations:
        raise UserError(f"the iteration must be 1 to {iterations}, as many as the model has, got {iteration}")
    if grid is None or math.prod(grid) != inputs:
        raise UserError(f"the {inputs} local features of the image tower are no grid, so there is no map to draw")
    return attention[:, iteration - 1].transpose(1, 2).unflatten(2, grid)


def _nearest_captions(
    model: nn.Module, tokenizer: Callable, batches: EvaluationPipeline, elements: Tensor, positions: Sequence[int]
) -> tuple[list[list[str]], list[list[bool]]]:
    """Return the nearest caption of each element, and whether it is one of the image's own.

    Args:
        elements: (I, K, D), L2-normalised.
        positions: of the I images in the shards.
    """
    images, slots, _ = elements.shape
    queries = elements.flatten(0, 1)
    largest = queries.new_full((images * slots,), float("-inf"))
    nearest = [("", -1)] * (images * slots)  # caption and position of its image
    own_captions: dict[int, set[str]] = {position: set() for position in positions}
    total = len(batches) if batches.sizes is not None else None
    # disable=None: no bar where nobody watches, such as in a log file.
    bar = require("tqdm", extra="data").tqdm(batches, total=total, desc="captions", unit="batch", disable=None)
    for _, captions, image_of_caption, batch_positions in bar:
        image_positions = batch_positions[image_of_caption].tolist()
        for caption, position in zip(captions, image_positions, strict=True):
            if position in own_captions:
                own_captions[position].add(normalize_caption(caption))
        sets = model.encode_text(tokenizer(captions).to(queries.device), normalize=True)  # (C, L, D)
        cosines = (sets.float() @ queries.T).amax(dim=1)  # (C, I * K)
        values, indices = cosines.max(dim=0)
        for element in (values > largest).nonzero()[:, 0].tolist():
            caption = indices[element].item()
            largest[element] = values[element]
            nearest[element] = (captions[caption], image_positions[caption])
    if bool((largest == float("-inf")).any()):
        raise UserError("the embeddings of the model are not finite")
    chosen = [nearest[start : start + slots] for start in range(0, len(nearest), slots)]
    return (
        [[caption for caption, _ in of_image] for of_image in chosen],
        [
            # Another image may have the same caption, and have come first.
            [place == position or normalize_caption(caption) in own_captions[position] for caption, place in of_image]
            for position, of_image in zip(positions, chosen, strict=True)
        ],
    )


def _checked(item: AttendedImage, number_of_slots: int) -> AttendedImage:
    """Return an item with CPU tensors of float32, or raise ``ValueError``."""
    image = torch.as_tensor(item.image).detach().float().cpu()
    attention = torch.as_tensor(item.attention).detach().float().cpu()
    if image.ndim != 3 or image.shape[2] != 3 or 0 in image.shape:
        raise ValueError(f"image must have the shape (H, W, 3), got {tuple(image.shape)}")
    if not bool(((image >= 0) & (image <= 1)).all()):
        raise ValueError(f"image must be in [0, 1], got {image.min().item():.4g} to {image.max().item():.4g}")
    if attention.ndim != 3 or len(attention) != number_of_slots or 0 in attention.shape:
        raise ValueError(f"attention must have the shape ({number_of_slots}, h, w), got {tuple(attention.shape)}")
    if not bool((attention.isfinite() & (attention >= 0)).all()):
        raise ValueError(f"attention must be finite and >= 0, got the minimum {attention.min().item():.4g}")
    for name in ("captions", "matches"):
        if len(getattr(item, name)) != number_of_slots:
            raise ValueError(f"{name} must be of {number_of_slots} slots, got {len(getattr(item, name))}")
    return AttendedImage(image, attention, item.captions, item.matches)


def _draw_attention(items: Sequence[AttendedImage], largest: float) -> Any:
    """Return the ``matplotlib.figure.Figure``."""
    texts = _Captions()
    slots = len(items[0].captions)
    panel = min(WIDEST_PANEL, max(NARROWEST_PANEL, ALL_PANELS / (slots + 1)))
    captions = [
        [
            texts.wrap(f"{_sign(match)[0]} {caption}", panel)
            for caption, match in zip(item.captions, item.matches, strict=True)
        ]
        for item in items
    ]
    heights = [panel * min(MOST_HEIGHT, item.image.shape[0] / item.image.shape[1]) for item in items]
    below = [CAPTION_GAP + texts.line * max(map(len, of_slots)) + ROW_GAP for of_slots in captions]

    width = MARGIN + (slots + 1) * (panel + GAP) + BAR + BAR_LABELS
    height = HEADING + sum(heights) + sum(below) + LEGEND
    figure = new_figure(width, height)
    figure.set_layout_engine("none")  # captions of any length would move the panels

    def add_axes(left: float, top: float, axes_width: float, axes_height: float) -> Any:
        """Add axes at a place in inches from the upper left."""
        return figure.add_axes(
            (left / width, 1 - (top + axes_height) / height, axes_width / width, axes_height / height)
        )

    top = HEADING
    for row, (item, panel_height) in enumerate(zip(items, heights, strict=True)):
        columns = [add_axes(MARGIN + index * (panel + GAP), top, panel, panel_height) for index in range(slots + 1)]
        headings = ["image", *(f"slot {number}" for number in range(1, slots + 1))]
        for axes, heading in zip(columns, headings, strict=True):
            axes.set_axis_off()
            axes.set_anchor("NW")  # above its caption
            if row == 0:
                axes.set_title(heading, fontsize=FONT_SIZE + 1, pad=4)
        columns[0].imshow(item.image.numpy())
        for axes, attention, lines, match in zip(columns[1:], item.attention, captions[row], item.matches, strict=True):
            shown = _draw_attended(axes, item.image, attention, largest)
            _, colour, _ = _sign(match)
            axes.annotate(
                "\n".join(lines),
                (0, 0),
                xycoords="axes fraction",
                xytext=(0, -CAPTION_GAP / POINT),
                textcoords="offset points",
                verticalalignment="top",
                color=colour,
                fontproperties=texts.font,
                linespacing=LINE,
                parse_math=False,  # captions hold dollar signs
            )
        if row == 0:
            bar = add_axes(MARGIN + (slots + 1) * (panel + GAP), top, BAR, panel_height)
            bar.set_facecolor("0.5")  # what the colours lie on there
            figure.colorbar(shown, cax=bar, ticks=[0, largest / 2, largest], format="{x:.2g}")
            bar.tick_params(labelsize=FONT_SIZE)
            bar.set_ylabel("attention", fontsize=FONT_SIZE)
        top += panel_height + below[row]
    for index, (sign, colour, meaning) in enumerate((OF_THIS_IMAGE, OF_ANOTHER_IMAGE)):
        figure.text(
            (MARGIN + index * 1.6) / width,
            MARGIN / height,
            f"{sign} {meaning}",
            color=colour,
            fontproperties=texts.font,
        )
    return figure


def _sign(match: bool) -> tuple[str, str, str]:
    return OF_THIS_IMAGE if match else OF_ANOTHER_IMAGE


def _draw_attended(axes: Any, image: Tensor, attention: Tensor, largest: float) -> Any:
    """Draw the attention of a slot (h, w) over the dimmed picture (H, W, 3); return its ``AxesImage``."""
    darkest, lightest = GREY
    luminance = image @ image.new_tensor([0.299, 0.587, 0.114])
    axes.imshow((darkest + (lightest - darkest) * luminance).numpy(), cmap="gray", vmin=0, vmax=1)
    smooth = interpolate(attention[None, None], image.shape[:2], mode="bicubic", align_corners=False)[0, 0]
    # Between its points, a cubic curve passes beyond them.
    smooth = smooth.clamp(0, attention.max().item())
    return axes.imshow(smooth.numpy(), cmap=COLOUR_MAP, vmin=0, vmax=largest, alpha=OPACITY, interpolation="bilinear")


class _Captions:
    """How long texts are, without drawing them.

    Attributes:
        font: of the captions.
        line: height of a line, in inches.
    """

    def __init__(self):
        manager = require("matplotlib.font_manager", extra="eval")
        installed = set(manager.get_font_names())
        family = ["DejaVu Sans", *(name for name in FALLBACK_FONTS if name in installed)]
        self.font = manager.FontProperties(family=family, size=FONT_SIZE)
        self._measure = require("matplotlib.textpath", extra="eval").text_to_path.get_text_width_height_descent
        self.line = LINE * 1.05 * FONT_SIZE * POINT  # letters are a little higher than the size of their font

    def wrap(self, text: str, width: float) -> list[str]:
        """Return the lines of a text, at most eight; a word that is too long is broken."""
        lines = [""]
        for word in text.split():
            longer = f"{lines[-1]} {word}".lstrip()
            if self._fits(longer, width):
                lines[-1] = longer
                continue
            if lines[-1]:
                lines.append("")
            if len(lines) > MOST_LINES:
                break
            if self._fits(word, width):
                lines[-1] = word
                continue
            for letter in word:
                if not self._fits(lines[-1] + letter, width):
                    lines.append("")
                lines[-1] += letter
        if len(lines) > MOST_LINES:
            last = lines[MOST_LINES - 1]
            while not self._fits(f"{last}…", width):
                last = last[:-1]
            lines = [*lines[: MOST_LINES - 1], f"{last}…"]
        return lines

    def _fits(self, text: str, width: float) -> bool:
        # A little less, as letters on a grid of pixels may be wider.
        return self._measure(text, self.font, ismath=False)[0] * POINT <= 0.97 * width
