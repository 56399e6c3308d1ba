"""Cross-attention between regions and words, trained by its similarity matrix alone.

SCAN, BFAN, SGRAF and the matching head of X-VLM have no embeddings that could be compared: they look at a picture and a
caption together and give one number. Any loss of :mod:`vl_plugins.functional` trains them, since all it needs is the
matrix of these numbers and which of its pairs belong together. In their training loops three lines change::

    similarities = model(regions, words)                                   # (images, captions), as before
    positive_mask = torch.arange(len(similarities))[:, None] == image_of_caption
    loss = unified_loss(similarities, positive_mask, ~positive_mask, margin=0.2, scale=50)

and two at evaluation, where ties count against the model and nothing is sorted::

    ranks = similarity_ranks(similarities, image_of_caption)
    metrics = retrieval_metrics(ranks)

``image_of_caption`` says for each caption which image of the batch it describes. A batch may hold one caption of each
image or all five: they are five positives, never false negatives. With ``--loss goal`` the same lines train GOAL.

Here the model is a small one with the text-to-image attention of SCAN (Lee et al. 2018, section 3.1), and the data are
made up: pictures are six regions with one of thirty things each, in random features with noise, and five captions each
name three or four of them. It takes some seconds::

    python -m vl_plugins.integrations.examples.cross_attention --loss unified --steps 100
"""

import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from vl_plugins.integrations.examples.options import LOSSES, parse_arguments
from vl_plugins.retrieval import format_metrics_table, retrieval_metrics, similarity_ranks

__all__ = ["CrossAttention", "Scenes", "main", "make_scenes"]

THINGS, REGIONS, REGION_WIDTH, NOISE = 30, 6, 48, 0.3
CAPTIONS, WORDS = 5, 4
PADDING = 0  # the id of no word
TRAIN, TEST, BATCH_SIZE, STEPS = 512, 64, 32, 100


class CrossAttention(nn.Module):
    """Similarity of pictures and captions: of each word with what it attends to, averaged over the words.

    Args:
        region_width: W, of the regions' features.
        vocabulary_size: number of word ids, padding included.
        dim: of the space in which regions and words are compared.
        temperature: how sharply a word attends to the regions that are like it, > 0.
    """

    def __init__(self, region_width: int, vocabulary_size: int, dim: int = 64, temperature: float = 9.0):
        super().__init__()
        self.regions = nn.Linear(region_width, dim)
        self.words = nn.Embedding(vocabulary_size, dim)
        self.temperature = temperature

    def forward(self, regions: Tensor, words: Tensor) -> Tensor:
        """Return similarities (B, C), cosines in [-1, 1], of pictures (B, R, W) and captions (C, L) of word ids."""
        regions = functional.normalize(self.regions(regions), dim=-1)
        is_word = (words != PADDING).float()
        words = functional.normalize(self.words(words), dim=-1)
        cosines = torch.einsum("brd,cld->bclr", regions, words)
        # Regions compete for a word by how much more they are like it than like the other words.
        relevance = functional.normalize(cosines.relu() * is_word[:, :, None], dim=2)
        attention = (self.temperature * relevance).softmax(dim=3)
        attended = torch.einsum("bclr,brd->bcld", attention, regions)
        of_words = functional.cosine_similarity(attended, words, dim=3)
        return (of_words * is_word).sum(dim=2) / is_word.sum(dim=1)


class Scenes(NamedTuple):
    """Pictures with captions.

    Attributes:
        regions: (N, R, W).
        words: (N, 5, L) word ids, padded.
    """

    regions: Tensor
    words: Tensor


def make_scenes(count: int, appearance: Tensor, generator: torch.Generator) -> Scenes:
    """Make up pictures of different things, each as it looks in ``appearance`` (things, W) plus noise."""
    things = torch.rand(count, len(appearance), generator=generator).argsort(dim=1)[:, :REGIONS]
    regions = appearance[things]
    regions = regions + NOISE * torch.randn(regions.shape, generator=generator)
    named = torch.rand(count, CAPTIONS, REGIONS, generator=generator).argsort(dim=2)[:, :, :WORDS]
    words = things[:, None, :].expand(-1, CAPTIONS, -1).gather(2, named) + 1
    is_short = torch.rand(count, CAPTIONS, generator=generator) < 0.5
    words[:, :, -1].masked_fill_(is_short, PADDING)
    return Scenes(regions, words)


def train(model: nn.Module, scenes: Scenes, loss: str, steps: int, generator: torch.Generator) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    image_of_caption = torch.arange(BATCH_SIZE).repeat_interleave(CAPTIONS)
    positive_mask = torch.arange(BATCH_SIZE)[:, None] == image_of_caption
    for _ in range(steps):
        batch = torch.randperm(len(scenes.regions), generator=generator)[:BATCH_SIZE]
        similarities = model(scenes.regions[batch], scenes.words[batch].flatten(0, 1))
        optimizer.zero_grad()
        LOSSES[loss](similarities, positive_mask, ~positive_mask).backward()
        optimizer.step()


@torch.inference_mode()
def evaluate(model: nn.Module, scenes: Scenes) -> dict[str, float]:
    similarities = model(scenes.regions, scenes.words.flatten(0, 1))
    image_of_caption = torch.arange(len(scenes.regions)).repeat_interleave(CAPTIONS)
    return retrieval_metrics(similarity_ranks(similarities, image_of_caption))


def main(argv: Sequence[str]) -> dict[str, dict[str, float]]:
    """Train and print the recalls on test pictures; return the metrics ``"before"`` and ``"after"``."""
    arguments = parse_arguments(argv, __doc__, STEPS)
    torch.manual_seed(arguments.seed)
    generator = torch.Generator().manual_seed(arguments.seed)
    appearance = torch.randn(THINGS, REGION_WIDTH, generator=generator)
    training, test = (make_scenes(count, appearance, generator) for count in (TRAIN, TEST))
    model = CrossAttention(REGION_WIDTH, vocabulary_size=THINGS + 1)
    metrics = {"before": evaluate(model, test)}
    train(model, training, arguments.loss, arguments.steps, generator)
    metrics["after"] = evaluate(model, test)
    print(format_metrics_table(metrics))
    return metrics


if __name__ == "__main__":
    main(sys.argv[1:])
