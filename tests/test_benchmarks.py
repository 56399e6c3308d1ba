"""That the benchmarks measure what they say, and compare only what computes the same."""

import re

import pytest
import torch
from torch.nn.functional import normalize

from benchmarks import data, losses
from benchmarks.measurement import extra_bytes, print_table, time_rounds
from vl_plugins import create_loss


def unit(*shape, seed=0):
    return normalize(torch.randn(shape, generator=torch.Generator().manual_seed(seed)), dim=-1)


def test_a_known_allocation_is_counted():
    def function():
        torch.ones(1000).clone()
        return torch.ones(500)

    assert extra_bytes(function) == 4 * 2000
    with pytest.raises(RuntimeError, match="saw no allocation"):
        extra_bytes(lambda: None)


def test_rounds_alternate_after_one_to_warm_up():
    log, now = [], 0.0

    def run(name, duration):
        nonlocal now
        log.append(name)
        now += duration * (1 + log.count(name))

    functions = {"a": lambda: run("a", 1.0), "b": lambda: run("b", 10.0)}
    seconds = time_rounds(functions, rounds=2, clock=lambda: now)
    assert "".join(log) == "baabba"
    assert seconds == {"a": [3.0, 4.0], "b": [30.0, 40.0]}


def test_table_by_hand(capsys):
    seconds = {"ours": [0.001, 0.002, 0.004], "peer": [0.002, 0.002, 0.002]}
    print_table("title", seconds, "peer", memory={"ours": 1_000_000, "peer": 4_000_000})
    assert capsys.readouterr().out.splitlines()[1] == "ours   2.0          1.000  0.500  2.000  1.00  0.2500"


@pytest.mark.parametrize(
    ("peer", "name", "factor", "options"),
    [
        ("clip", "vlc", 0.5, {"scale": losses.SCALE}),
        ("triplet-margin", "triplet_hn", 1, {"margin": losses.MARGIN, "symmetric": False}),
    ],
)
def test_peers_compute_the_same(peer, name, factor, options):
    images = unit(12, 8)
    texts = normalize(images + 0.7 * unit(12, 8, seed=1))  # some triplets have no loss, and count in the mean
    results = []
    for loss, weight in ((losses.PEERS[peer](), 1), (losses.metric_loss(create_loss(name, **options)), factor)):
        leaves = [side.clone().requires_grad_() for side in (images, texts)]
        value = weight * loss(*(normalize(leaf) for leaf in leaves), torch.arange(12))
        results.append([value, *torch.autograd.grad(value, leaves)])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_time_and_memory_of_losses(capsys):
    names = "unified vl_plugins.losses:VLCLoss clip three-products".split()
    flags = f"--losses {' '.join(names[:2])} --peers {' '.join(names[2:])} --dtype bfloat16"
    losses.main(f"{flags} --batch-sizes 32 --dimension 64 --rounds 1".split())
    rows = capsys.readouterr().out.splitlines()
    assert rows[1].startswith("B 32, D 64, bfloat16")
    assert [row.split()[0] for row in rows[2:6]] == names


def test_shards_are_read_and_written(capsys):
    data.main("--scale 0.002 --rounds 1".split())
    printed = capsys.readouterr().out
    for peer in ("open_clip", "ShardWriter"):
        assert re.search(rf"^{peer} .* 1\.000  1\.000  1\.000$", printed, re.MULTILINE)
    with pytest.raises(ValueError, match=r"^read 3 of 4 images$"):
        data.read([(torch.zeros(2), None), (torch.zeros(1), None)], 4)


def test_memory_of_an_image(capsys):
    data.main("--growth --scale 0.004".split())
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:4]]
    assert [row[0] for row in rows] == ["128", "200", "2,000"]
    assert 60 < float(rows[-1][-1]) < 100


@pytest.mark.gpu
def test_on_a_gpu(capsys):
    assert extra_bytes(lambda: torch.ones(1024, device="cuda"), device="cuda") == 4096
    losses.main("--device cuda --backends dense tiled --dtype bfloat16 --batch-sizes 256 --rounds 1".split())
    assert "unified (tiled)" in capsys.readouterr().out
