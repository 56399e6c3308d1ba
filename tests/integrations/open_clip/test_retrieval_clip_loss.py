"""``RetrievalClipLoss`` in the place of ``ClipLoss``, and in a changed copy of the installed trainer."""

import importlib.util
import inspect
import os
import shutil
import sys
from pathlib import Path

import open_clip_train
import pytest
import torch
import torch.nn.functional as F
from open_clip.loss import ClipLoss

from tests.helpers.open_clip_training import LAUNCH, TINY, read_checkpoint, run, write_table
from tests.helpers.processes import in_processes
from vl_plugins import create_loss
from vl_plugins.errors import UserError
from vl_plugins.integrations.open_clip.clip_loss import RetrievalClipLoss

ROOT = Path(__file__).parents[3]
# What the guide says to change in a fork of open_clip 3.x.
CHANGE = """
from vl_plugins.integrations.open_clip.clip_loss import RetrievalClipLoss
def create_loss(args):
    return RetrievalClipLoss("unified", rank=args.rank, world_size=args.world_size)
"""


def outputs(rows=6):
    generator = torch.Generator().manual_seed(0)
    images, texts = F.normalize(torch.randn(2, rows, 16, generator=generator, dtype=torch.float64), dim=-1)
    scale = torch.tensor(14.0, dtype=torch.float64)
    return {"image_features": images, "text_features": texts, "logit_scale": scale.requires_grad_()}


def test_it_is_called_as_open_clips_loss():
    given = outputs()
    loss = RetrievalClipLoss("vlc", local_loss=True, gather_with_grad=True, cache_labels=True, rank=0, world_size=1)
    value, expected = loss(**given), 2 * ClipLoss()(**given)
    torch.testing.assert_close(value, expected)
    gradients = [torch.autograd.grad(each, given["logit_scale"]) for each in (value, expected)]
    torch.testing.assert_close(*gradients)
    torch.testing.assert_close(loss(*given.values(), None, True), {"vlc_loss": value}, check_dtype=False)
    accepted = set(inspect.signature(ClipLoss).parameters)
    assert accepted < set(inspect.signature(RetrievalClipLoss).parameters)
    called_with = set(inspect.signature(ClipLoss.forward).parameters)
    assert called_with <= set(inspect.signature(RetrievalClipLoss.__mro__[1].forward).parameters)


def test_equal_texts_are_no_negatives(caplog):
    """Texts are equal by their tokens, however long the padding is."""
    caplog.set_level("INFO")
    given, tokens = outputs(4), torch.tensor([[5, 6, 0], [5, 7, 0], [5, 6, 0], [6, 5, 0]])
    loss = RetrievalClipLoss("unified", margin=0.1, scale=20)
    expected = create_loss("unified", margin=0.1, scale=20)
    sides = given["image_features"], None, None, given["text_features"]
    torch.testing.assert_close(loss(**given, text=tokens), expected(*sides, ref_ids=torch.tensor([0, 1, 0, 2])))
    assert not caplog.records
    for _ in range(2):
        torch.testing.assert_close(loss(**given), expected(*sides))
    assert [record.message for record in caplog.records] == [
        "The loss gets no text=, so equal captions of several images of a batch are negatives"
    ]


def test_a_warm_up_counts_calls():
    given, loss = outputs(), RetrievalClipLoss("triplet_hn", warmup_steps=2)
    values = [loss(**given).item() for _ in range(4)]
    first, then = (RetrievalClipLoss(name)(**given).item() for name in ("triplet_sh", "triplet_hn"))
    assert values == pytest.approx([first, first, then, then])


def test_accumulation_counts_the_gradient_of_the_scale_once():
    given = outputs()
    (expected,) = torch.autograd.grad(2 * ClipLoss()(**given), given["logit_scale"])
    for accum_freq in (1, 2):
        loss = RetrievalClipLoss("vlc", accum_freq=accum_freq)
        for _ in range(2):
            gradients = []
            for _ in range(accum_freq):
                total = loss(**given) + 0 * given["logit_scale"]
                gradients += torch.autograd.grad(total, given["logit_scale"])
            torch.testing.assert_close(sum(gradients), expected)


def test_parameters_are_not_forgotten_in_silence(caplog):
    RetrievalClipLoss("unified", learn_scale=True)
    (record,) = caplog.records
    assert "which open_clip's optimizer does not see: add them to it" in record.message


def test_mistakes():
    with pytest.raises(ValueError, match="use_horovod must be False"):
        RetrievalClipLoss("unified", use_horovod=True)
    with pytest.raises(UserError, match="unknown option temperature"):
        RetrievalClipLoss("unified", temperature=0.07)
    with pytest.raises(ValueError, match="has no process group: call torch"):
        RetrievalClipLoss("unified", world_size=2)(**outputs())


def of_a_process(rank):
    given = {name: value if value.ndim == 0 else value[3 * rank : 3 * rank + 3] for name, value in outputs().items()}
    return RetrievalClipLoss("vlc", rank=rank, world_size=2)(**given).detach()


def test_two_processes():
    """Their mean is the loss of the joined batch."""
    torch.testing.assert_close(sum(in_processes(of_a_process, 2)) / 2, 2 * ClipLoss()(**outputs()).detach())


@pytest.mark.skipif(importlib.util.find_spec("open_clip.task") is not None, reason="of 4.x, which takes a task")
def test_a_fork_of_open_clip(tmp_path, toy_scenes):
    """It trains what the launcher trains."""
    write_table(tmp_path / "train.tsv", toy_scenes, number=12)
    fork = tmp_path / "fork"
    shutil.copytree(Path(open_clip_train.__file__).parent, fork / "open_clip_train")
    main = fork / "open_clip_train/main.py"
    source = main.read_text()
    place = "from open_clip_train.data import get_data\n"
    assert source.count(place) == 1
    main.write_text(source.replace(place, place + CHANGE))
    start = "from vl_plugins.integrations.open_clip.models import register_models; register_models(); "
    code = start + "import sys; from open_clip_train.main import main; main(sys.argv[1:])"
    flags = [*TINY, "--train-data", "train.tsv", "--name"]
    path = os.pathsep.join(map(str, (fork, ROOT)))
    assert run([sys.executable, "-c", code, *flags, "fork"], tmp_path, PYTHONPATH=path).returncode == 0
    assert run([*LAUNCH, *flags, "ours", "--loss", "unified"], tmp_path).returncode == 0
    forked, ours = (read_checkpoint(tmp_path, name=name)["state_dict"] for name in ("fork", "ours"))
    torch.testing.assert_close(dict(forked), dict(ours), rtol=0, atol=1e-6)
    assert "Unified_loss: " in (tmp_path / "logs/fork/out.log").read_text()
