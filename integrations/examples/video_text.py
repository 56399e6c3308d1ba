"""Text to video with several experts, trained by its similarity matrix alone; 20 captions of a video are 20 positives.

Models such as MMT (Gabeur et al. 2020) and CE (Liu et al. 2019) see a video through several experts: appearance,
motion, sound, speech. The similarity of a caption and a video is a sum of cosines, one for each expert, weighted by how
much the caption speaks of what that expert sees. That is no cosine of two embeddings, but the losses of
:mod:`vl_plugins.functional` need no more than the matrix of all similarities::

    similarities = model(experts, words)                                   # (videos, captions)
    positive_mask = torch.arange(len(similarities))[:, None] == video_of_caption
    loss = unified_loss(similarities, positive_mask, ~positive_mask, margin=0.2, scale=50)

MSR-VTT has 20 captions for each video. With one of them in a batch the rest is unused; with all of them in a batch and
the diagonal as the only positive, 19 right answers would be pushed away. The mask above makes them 20 positives, and
evaluation with ``video_of_caption`` ranks each caption by itself and each video by its best caption.

Here the model is a small one of this kind, with the gated embeddings of CE, and the data are made up: a video shows an
object and an action, and half of them have a sound; captions name one to three of these among words that say nothing.
It takes some seconds::

    python -m vl_plugins.integrations.examples.video_text --loss unified --steps 100
"""

import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from vl_plugins.integrations.examples.options import LOSSES, parse_arguments
from vl_plugins.retrieval import format_metrics_table, retrieval_metrics, similarity_ranks

__all__ = ["ExpertMixture", "GatedEmbedding", "Videos", "main", "make_videos"]

EXPERTS = {"appearance": 40, "motion": 24, "sound": 16}  # widths of their features
KINDS, FRAMES, NOISE = 16, 8, 0.5  # objects, actions, sounds
CAPTIONS, WORDS, FILLERS = 20, 6, 10
VOCABULARY_SIZE = len(EXPERTS) * KINDS + FILLERS
TRAIN, TEST, BATCH_SIZE, STEPS = 192, 64, 32, 100


class GatedEmbedding(nn.Module):
    """A projection of which each number is let through or not, according to all of them."""

    def __init__(self, width: int, dim: int):
        super().__init__()
        self.projection = nn.Linear(width, dim)
        self.gate = nn.Linear(dim, dim)

    def forward(self, features: Tensor) -> Tensor:
        """Return (B, D), L2-normalised, of features (B, W)."""
        projected = self.projection(features)
        return functional.normalize(projected * self.gate(projected).sigmoid(), dim=-1)


class ExpertMixture(nn.Module):
    """Similarity of videos and captions: cosines of the experts, weighted by the caption.

    Args:
        widths: of the features of each expert, by its name.
        vocabulary_size: number of words.
        dim: of the space in which an expert and the caption are compared.
    """

    def __init__(self, widths: Mapping[str, int], vocabulary_size: int, dim: int = 32):
        super().__init__()
        self.words = nn.GRU(dim, dim, batch_first=True)
        self.word_vectors = nn.Embedding(vocabulary_size, dim)
        self.video_gates = nn.ModuleDict({expert: GatedEmbedding(width, dim) for expert, width in widths.items()})
        self.caption_gates = nn.ModuleDict({expert: GatedEmbedding(dim, dim) for expert in widths})
        self.weights = nn.Linear(dim, len(widths))

    def forward(self, experts: Mapping[str, Tensor], words: Tensor) -> Tensor:
        """Return similarities (B, C) in [-1, 1].

        Args:
            experts: features (B, T, W) of T frames, by the expert's name; all zeros where it has nothing to say.
            words: (C, L) word ids.
        """
        captions = self.words(self.word_vectors(words))[0].mean(dim=1)
        cosines, is_there = [], []
        for expert, features in experts.items():
            is_there.append((features != 0).any(dim=2).any(dim=1))
            videos = self.video_gates[expert](features.mean(dim=1))
            cosines.append(videos @ self.caption_gates[expert](captions).T)
        # The weight of an expert that is not there goes to the others.
        missing = ~torch.stack(is_there, dim=1)[:, None, :]
        weights = self.weights(captions)[None, :, :].masked_fill(missing, -torch.inf).softmax(dim=2)
        return (weights * torch.stack(cosines, dim=2)).sum(dim=2)


class Videos(NamedTuple):
    """Videos with captions.

    Attributes:
        experts: (N, T, W) by the expert's name.
        words: (N, 20, L) word ids.
    """

    experts: dict[str, Tensor]
    words: Tensor


def make_videos(looks: Mapping[str, Tensor], generator: torch.Generator) -> tuple[Videos, Videos]:
    """Make up videos to train on and to test with, of which no two have the same object and action.

    Args:
        looks: for each expert what the things that it knows are like, (kinds, W), frame by frame plus noise.
        generator: of all that is random.
    """
    count = TRAIN + TEST
    pairs = torch.randperm(KINDS * KINDS, generator=generator)[:count]
    sounds = torch.randint(KINDS, (count,), generator=generator)
    kinds = torch.stack([pairs // KINDS, pairs % KINDS, sounds], dim=1)
    is_silent = torch.rand(count, generator=generator) < 0.5

    experts = {}
    for number, (expert, look) in enumerate(looks.items()):
        features = look[kinds[:, number]][:, None].expand(-1, FRAMES, -1)
        experts[expert] = features + NOISE * torch.randn(features.shape, generator=generator)
    experts["sound"][is_silent] = 0

    words = torch.randint(VOCABULARY_SIZE - FILLERS, VOCABULARY_SIZE, (count, CAPTIONS, WORDS), generator=generator)
    names = (kinds + KINDS * torch.arange(len(looks)))[:, None].expand(-1, CAPTIONS, -1)
    is_named = torch.rand(names.shape, generator=generator) < torch.tensor([1.0, 0.8, 0.5])
    is_named[:, :, 2] &= ~is_silent[:, None]
    words[:, :, :3] = torch.where(is_named, names, words[:, :, :3])
    words = words.gather(2, torch.rand(words.shape, generator=generator).argsort(dim=2))

    def part(chosen: slice) -> Videos:
        return Videos({expert: features[chosen] for expert, features in experts.items()}, words[chosen])

    return part(slice(TRAIN)), part(slice(TRAIN, None))


def train(model: nn.Module, videos: Videos, loss: str, steps: int, generator: torch.Generator) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    video_of_caption = torch.arange(BATCH_SIZE).repeat_interleave(CAPTIONS)
    positive_mask = torch.arange(BATCH_SIZE)[:, None] == video_of_caption
    for _ in range(steps):
        batch = torch.randperm(len(videos.words), generator=generator)[:BATCH_SIZE]
        experts = {expert: features[batch] for expert, features in videos.experts.items()}
        similarities = model(experts, videos.words[batch].flatten(0, 1))
        optimizer.zero_grad()
        LOSSES[loss](similarities, positive_mask, ~positive_mask).backward()
        optimizer.step()


@torch.inference_mode()
def evaluate(model: nn.Module, videos: Videos) -> dict[str, float]:
    """Return the metrics of :func:`retrieval_metrics`, in which ``image`` stands for the video."""
    similarities = model(videos.experts, videos.words.flatten(0, 1))
    video_of_caption = torch.arange(len(videos.words)).repeat_interleave(CAPTIONS)
    return retrieval_metrics(similarity_ranks(similarities, video_of_caption))


def main(argv: Sequence[str]) -> dict[str, dict[str, float]]:
    """Train and print the recalls on test videos; return the metrics ``"before"`` and ``"after"``."""
    arguments = parse_arguments(argv, __doc__, STEPS)
    torch.manual_seed(arguments.seed)
    generator = torch.Generator().manual_seed(arguments.seed)
    looks = {expert: torch.randn(KINDS, width, generator=generator) for expert, width in EXPERTS.items()}
    training, test = make_videos(looks, generator)
    model = ExpertMixture(EXPERTS, VOCABULARY_SIZE)
    metrics = {"before": evaluate(model, test)}
    train(model, training, arguments.loss, arguments.steps, generator)
    metrics["after"] = evaluate(model, test)
    print(format_metrics_table(metrics))
    return metrics


if __name__ == "__main__":
    main(sys.argv[1:])
