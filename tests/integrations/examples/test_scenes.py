"""Made-up scenes against a plain reading of their pictures."""

import torch

from vl_plugins.integrations.examples import scenes


def test_captions_name_what_is_in_their_picture(monkeypatch):
    monkeypatch.setattr(scenes, "NOISE", 0.0)
    splits = scenes.make_scenes(40, 20)
    assert [len(split.pictures) for split in splits] == [40, 20]
    patches_of_thing = {}
    for split in splits:
        for things, picture, captions in zip(*(rows.tolist() for rows in split), strict=True):
            assert len(set(things)) == 4
            for caption in captions:
                *words, end = caption
                assert end == scenes.END == scenes.VOCABULARY_SIZE - 1
                assert len(set(words)) == 3
                assert {word - 1 for word in words} <= set(things)
            for number, thing in enumerate(things):
                top, left = 8 * (number // 2), 8 * (number % 2)
                patch = [[row[left : left + 8] for row in channel[top : top + 8]] for channel in picture]
                patches_of_thing.setdefault(thing, []).append(torch.tensor(patch))
    assert len(patches_of_thing) == 30
    for patches in patches_of_thing.values():
        assert all(torch.equal(patch, patches[0]) for patch in patches)


def test_the_seed_decides_everything():
    first, same, other = (scenes.make_scenes(4, seed=seed)[0] for seed in (1, 1, 2))
    assert all(torch.equal(*rows) for rows in zip(first, same, strict=True))
    assert not any(torch.equal(*rows) for rows in zip(first[:2], other[:2], strict=True))
