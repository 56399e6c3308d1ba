"""The similarity against plain loops, and that the example learns what it claims to."""

import pytest
import torch
from torch.nn import functional

from vl_plugins.integrations.examples.cross_attention import PADDING, CrossAttention, main


def similarity_by_loops(model, regions, words):
    """Of one picture (R, W) and one caption (L,)."""
    places = [functional.normalize(model.regions(region), dim=0) for region in regions]
    vectors = [functional.normalize(model.words.weight[word], dim=0) for word in words if word != PADDING]
    relevance = torch.tensor([[max(float(word @ place), 0.0) for place in places] for word in vectors])
    for column in range(len(places)):
        relevance[:, column] /= max(float(relevance[:, column].norm()), 1e-12)
    total = 0.0
    for row, word in zip(relevance, vectors, strict=True):
        exponentials = [torch.exp(model.temperature * value) for value in row]
        attended = sum(weight * place for weight, place in zip(exponentials, places, strict=True)) / sum(exponentials)
        total += float(attended @ word / (attended.norm() * word.norm()))
    return total / len(vectors)


def test_similarity_is_that_of_plain_loops():
    torch.manual_seed(0)
    model = CrossAttention(region_width=5, vocabulary_size=9, dim=4, temperature=3.0)
    regions, words = torch.randn(3, 4, 5), torch.tensor([[1, 2, 3], [4, 8, 0], [7, 0, 0], [2, 2, 5]])
    with torch.no_grad():
        similarities = model(regions, words)
        expected = [[similarity_by_loops(model, picture, caption) for caption in words] for picture in regions]
    torch.testing.assert_close(similarities, torch.tensor(expected))
    longer = torch.cat([words, torch.zeros(4, 2, dtype=torch.long)], dim=1)
    torch.testing.assert_close(model(regions, longer), similarities, msg="padding counts")


@pytest.mark.parametrize("loss", ["unified", "goal"])
def test_it_learns(loss, capsys):
    metrics = main(loss, 25)
    for recall in ("image_to_text_R@1", "text_to_image_R@1"):
        assert metrics["before"][recall] < 0.05
        assert metrics["after"][recall] > 0.15
    assert capsys.readouterr().out.splitlines()[2].startswith("after ")
