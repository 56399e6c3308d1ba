"""The similarity against plain loops, and that the example learns what it claims to."""

import pytest
import torch

from vl_plugins.integrations.examples.video_text import (
    EXPERTS,
    KINDS,
    VOCABULARY_SIZE,
    ExpertMixture,
    main,
    make_videos,
)


def similarity_by_loops(model, experts, words):
    """Of one video, (T, W) of each expert, and one caption (L,)."""
    states, state = [], None
    for word in words:
        output, state = model.words(model.word_vectors(word)[None, None], state)
        states.append(output[0, 0])
    caption = sum(states) / len(states)
    logits = model.weights(caption)
    total, weights = 0.0, 0.0
    for number, (expert, frames) in enumerate(experts.items()):
        if not frames.any():
            continue
        sides = []
        for module, features in ((model.video_gates, sum(frames) / len(frames)), (model.caption_gates, caption)):
            projected = module[expert].projection(features)
            sides.append(projected / (1 + torch.exp(-module[expert].gate(projected))))
        cosine = sides[0] @ sides[1] / (sides[0].norm() * sides[1].norm())
        total += torch.exp(logits[number]) * cosine
        weights += torch.exp(logits[number])
    return float(total / weights)


def test_similarity_is_that_of_plain_loops():
    torch.manual_seed(0)
    model = ExpertMixture({"appearance": 5, "sound": 3}, vocabulary_size=7, dim=4)
    experts = {"appearance": torch.randn(3, 2, 5), "sound": torch.randn(3, 4, 3)}
    experts["sound"][1] = 0
    words = torch.tensor([[1, 2, 3], [0, 6, 6], [4, 4, 4], [5, 0, 1]])
    with torch.no_grad():
        similarities = model(experts, words)
        expected = [
            [
                similarity_by_loops(model, {name: features[video] for name, features in experts.items()}, caption)
                for caption in words
            ]
            for video in range(3)
        ]
    torch.testing.assert_close(similarities, torch.tensor(expected))


def test_captions_name_what_their_video_shows():
    looks = {expert: torch.randn(KINDS, width) for expert, width in EXPERTS.items()}
    seen = set()
    for videos in make_videos(looks, torch.Generator().manual_seed(0)):
        for number, captions in enumerate(videos.words):
            shown = []
            for kind, (expert, look) in enumerate(looks.items()):
                frames = videos.experts[expert][number]
                nearest = int(torch.cdist(frames.mean(dim=0)[None], look).argmin())
                shown.append(KINDS * kind + nearest if frames.any() else None)
            assert set(captions[captions < VOCABULARY_SIZE - 10].tolist()) <= set(shown)
            assert (captions == shown[0]).any(dim=1).all(), "every caption names the object"
            seen.add((shown[0], shown[1]))
        silent = [not frames.any() for frames in videos.experts["sound"]]
        assert 0.3 < sum(silent) / len(silent) < 0.7
    assert len(seen) == 256, "each object and action once"


@pytest.mark.parametrize("loss", ["unified", "triplet_hn"])
def test_it_learns(loss, capsys):
    metrics = main(["--loss", loss, "--steps", "30"])
    for recall in ("image_to_text_R@1", "text_to_image_R@1"):
        assert metrics["before"][recall] < 5
        assert metrics["after"][recall] > 30
    assert capsys.readouterr().out.splitlines()[2].startswith("after ")


def test_the_seed_decides_everything(capsys):
    tables = []
    for seed in ("1", "1", "2"):
        main(["--steps", "1", "--seed", seed])
        tables.append(capsys.readouterr().out)
    assert tables[0] == tables[1] != tables[2]
