"""A step of two processes is that of one with the joined batch, for every loss of the launcher and both readers.

The data are a table of exactly one batch, so that the images of the step are known.
"""

import os

import pytest

from tests.helpers.open_clip_training import TINY, read_checkpoint, write_table
from tests.helpers.processes import in_processes
from vl_plugins import list_losses
from vl_plugins.integrations.open_clip import train
from vl_plugins.integrations.open_clip.launcher import main

BATCH = 8
SETS = "--head set --head-kwargs num_slots=2 num_iters=1 hidden_dim=16 --captions-per-image first".split()
CASES = {name: [] for name in list_losses()} | {
    "smooth_chamfer": SETS,
    "unified": ["--loss-kwargs", "learn_scale=True"],
    "NTXentLoss": ["--loss-kwargs", "temperature=0.1"],
    "FastAPLoss": [],
    "ProxyAnchorLoss": [*"--captions-per-image first --loss-kwargs num_classes=8 embedding_size=128".split()],
    "MarginLoss": "--loss-kwargs learn_beta=True --captions-per-image first".split(),
}
CASES["vlc"] = ["--captions-per-image", "first"]
TOLERANCE = {"float64": 1e-10, "float32": 1e-6}


def train_once(rank, folder, name, precision, world_size):
    os.chdir(folder)
    create_model = train._Launch.create_model

    def create(*given, **options):
        model, _, transform = create_model(*given, **options)  # without random crops, which depend on the process
        if precision == "float64":
            model = model.double()  # with the parameters of the loss
        return model, *[lambda image: transform(image).to(model.logit_scale.dtype)] * 2

    train._Launch.create_model = create
    flags = [*TINY, "--train-data", "train.tsv", "--opt", "timm/sgd", "--wd", "0", "--lr", "0.1"]
    flags += ["--batch-size", str(BATCH // world_size), "--name", f"{name}-{precision}-{world_size}"]
    assert main([*flags, "--loss", name, *CASES[name]]) == 0


FAST = ("unified", "siglip")


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in CASES])
def test_two_processes_take_the_step_of_one(tmp_path, toy_scenes, name):
    captions = write_table(tmp_path / "train.tsv", toy_scenes, number=BATCH)
    assert len(set(captions)) == BATCH
    for precision, tolerance in TOLERANCE.items():
        for world_size in (1, 2):
            in_processes(train_once, world_size, tmp_path, name, precision, world_size, joined=False)
        one, two = (read_checkpoint(tmp_path, name=f"{name}-{precision}-{world_size}") for world_size in (1, 2))
        weights = {**one["state_dict"], **one.get("trained_loss", {})}
        of_two = {**two["state_dict"], **two.get("trained_loss", {})}
        assert len(weights) == len(of_two) > 50
        for key, weight in of_two.items():
            difference = (weights[key.removeprefix("module.")] - weight).abs().max()
            assert difference <= tolerance, (precision, key)
