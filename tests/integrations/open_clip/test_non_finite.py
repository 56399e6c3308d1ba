"""A loss that is not finite stops the training, and says where."""

import re

import pytest
import torch

from tests.helpers.open_clip_training import TINY, error_line, small_shard_flags
from vl_plugins.integrations.open_clip.batch_record import BatchRecord
from vl_plugins.integrations.open_clip.launcher import main
from vl_plugins.integrations.open_clip.loss import build_loss
from vl_plugins.integrations.open_clip.non_finite import NonFiniteLossError
from vl_plugins.integrations.open_clip.options import PluginOptions

B, D = 4, 8


@pytest.fixture
def setting():
    """The loss of the launcher at step 103 of a training, and features of finite norm; of step 103 are two batches."""
    generator = torch.Generator().manual_seed(0)
    images, texts = (torch.nn.functional.normalize(torch.randn(n, D, generator=generator)) for n in (B, 3 * B))
    record = BatchRecord(batches_per_step=2)
    record.first_step = 100
    for batch in range(8):
        record.add(batch, torch.arange(2), [f"image-{batch}-{row}" for row in range(2)])
    loss = build_loss(PluginOptions(loss="unified", loss_kwargs={"scale": 5}), record=record)
    return lambda: loss(images, texts, torch.tensor(14.0), output_dict=True), loss, images, texts


def test_the_error_names_step_terms_similarities_and_images(setting, caplog):
    call, _, images, texts = setting
    assert call()["unified_loss"].isfinite()
    texts[7, 0] = torch.nan  # the second of three captions of the third image
    with pytest.raises(NonFiniteLossError) as raised:
        call()
    message = str(raised.value)
    assert message.startswith(
        "step 103: the loss is not finite (unified_loss nan); 1 of 12 text features are not finite; "
    )
    assert message.endswith("; keys of these: image-7-0")
    products = images @ texts[[row for row in range(12) if row != 7]].T
    named = re.search(r"similarities of finite features from (\S+) to (\S+);", message).groups()
    assert [*map(float, named)] == pytest.approx([products.min().item(), products.max().item()], rel=1e-3)
    assert "keys of the batch: image-6-0 image-6-1 image-7-0 image-7-1" in caplog.text


def test_without_features_that_are_not_finite_all_keys_are_named(setting):
    call, loss, images, _ = setting
    loss.loss.scale = torch.nan
    with pytest.raises(NonFiniteLossError, match=r"similarities of .*; keys of the batch: image-6-0, image-6-1, image"):
        call()
    images.fill_(torch.inf)
    with pytest.raises(NonFiniteLossError, match="4 of 4 image features are not finite; no similarity is finite; keys"):
        call()


def test_a_training_that_diverges(tmp_path, toy_shards, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert main([*TINY, *small_shard_flags(toy_shards)[:2], "--loss", "vlc", "--lr", "1e30"]) == 2
    line = error_line(capfd.readouterr().err)
    assert line.startswith("step 1: the loss is not finite (vlc_loss nan); 4 of 4 image features ")
    assert "keys of these: toy-train-" in line
    assert not list((tmp_path / "logs/run/checkpoints").iterdir())
