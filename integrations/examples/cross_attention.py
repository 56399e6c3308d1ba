"""Cross-attention between regions and words, trained by its similarity matrix alone.

SCAN, BFAN, SGRAF and the matching head of X-VLM have no embeddings that could be compared: they look at a picture and a
caption together and give one number. Any loss of :mod:`vl_plugins.losses` trains them by ``from_similarities``, which
needs only the matrix of these numbers and which of its pairs belong together. In their training loops three lines
change, after ``pair_loss = create_loss("unified", margin=0.2, scale=50)``::

    similarities = model(regions, words)                                   # (images, captions), as before
    positive_mask = torch.arange(len(similarities))[:, None] == image_of_caption
    loss = pair_loss.from_similarities(similarities, positive_mask, ~positive_mask)

and two at evaluation, where ties count against the model and nothing is sorted::

    ranks = similarity_ranks(similarities, image_of_caption)
    metrics = retrieval_metrics(ranks)

``image_of_caption`` is the index of each caption's image in the batch. A batch may hold one caption of each
image or all five: they are five positives, never false negatives.

Here the model is a small one with the text-to-image attention of SCAN (Lee et al. 2018, section 3.1), and the data are
made up. It takes some seconds::

    python -m vl_plugins.integrations.examples.cross_attention goal 100
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional

from vl_plugins import create_loss
from vl_plugins.integrations.examples import scenes
from vl_plugins.retrieval import format_metrics_table

__all__ = ["CrossAttention", "main"]

PADDING = 0  # the id of no word
TRAIN, TEST, BATCH_SIZE = 512, 64, 32


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
        word_cosines = functional.cosine_similarity(attended, words, dim=3)
        return (word_cosines * is_word).sum(dim=2) / is_word.sum(dim=1)


def train(model: nn.Module, split: scenes.Scenes, loss: str, steps: int) -> None:
    pair_loss, optimizer = create_loss(loss), torch.optim.Adam(model.parameters(), lr=1e-2)
    image_of_caption = torch.arange(BATCH_SIZE).repeat_interleave(scenes.CAPTIONS)
    positive_mask = torch.arange(BATCH_SIZE)[:, None] == image_of_caption
    for _ in range(steps):
        batch = torch.randperm(len(split.regions))[:BATCH_SIZE]
        similarities = model(split.regions[batch], split.words[batch].flatten(0, 1))
        optimizer.zero_grad()
        pair_loss.from_similarities(similarities, positive_mask, ~positive_mask).backward()
        optimizer.step()


@torch.inference_mode()
def evaluate(model: nn.Module, split: scenes.Scenes) -> dict[str, float]:
    return scenes.evaluate(model(split.regions, split.words.flatten(0, 1)))


def main(loss: str = "unified", steps: int = 100) -> dict[str, dict[str, float]]:
    """Train and print the recalls on test scenes; return the metrics ``"before"`` and ``"after"``."""
    torch.manual_seed(0)
    training, test = scenes.make_scenes(TRAIN, seed=1), scenes.make_scenes(TEST, seed=2)
    model = CrossAttention(training.regions.shape[2], vocabulary_size=1 + scenes.THINGS)
    metrics = {"before": evaluate(model, test)}
    train(model, training, loss, steps)
    metrics["after"] = evaluate(model, test)
    print(format_metrics_table(metrics))
    return metrics


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("loss", nargs="?", default="unified", help="its name")
    parser.add_argument("steps", nargs="?", type=int, default=100)
    arguments = parser.parse_args()
    main(arguments.loss, arguments.steps)
