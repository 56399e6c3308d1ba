"""That the benchmarks measure what they say, and compare only what computes the same."""

import re
import time
from functools import partial

import pytest
import torch
from torch.nn.functional import normalize

from benchmarks import data, losses, ranks, sets
from benchmarks.measurement import check, clock, extra_bytes, print_table, ratios, time_rounds
from vl_plugins.distances import smooth_chamfer_similarity


def unit(*shape, seed=0):
    return normalize(torch.randn(shape, generator=torch.Generator().manual_seed(seed)), dim=-1)


def test_a_known_allocation_is_counted():
    def function():
        first = torch.ones(1000)
        second = torch.ones(2000)
        del first
        third = torch.ones(500)
        return second, third

    assert extra_bytes(function) == 4 * 3000
    assert extra_bytes(function, kept=4 * 2500) == 4 * 500
    with pytest.raises(RuntimeError, match="saw no allocation"):
        extra_bytes(lambda: None)


def test_one_thread_is_timed_by_the_processor_and_two_by_the_wall():
    try:
        for threads, expected in ((1, time.process_time), (2, time.perf_counter)):
            torch.set_num_threads(threads)
            assert clock() is expected
    finally:
        torch.set_num_threads(1)


def test_rounds_alternate_after_one_to_warm_up():
    log = []
    now = 0.0

    def function(name, duration):
        def run():
            nonlocal now
            log.append(name)
            now += duration * (1 + log.count(name))

        return run

    def clean_up():
        nonlocal now
        log.append("-")
        now += 1000

    functions = {"a": function("a", 1.0), "b": function("b", 10.0)}
    seconds = time_rounds(functions, rounds=2, clock=lambda: now, clean_up=clean_up)
    assert "".join(log) == "b-a-a-b-b-a-"
    assert seconds == {"a": [3.0, 4.0], "b": [30.0, 40.0]}


def test_table_by_hand(capsys):
    seconds = {"ours": [0.001, 0.002, 0.004], "peer": [0.002, 0.002, 0.002]}
    assert ratios(seconds["ours"], seconds["peer"]) == (1.0, 0.5, 2.0)
    print_table("title", seconds, "peer", memory={"ours": 1_000_000, "peer": 4_000_000})
    assert capsys.readouterr().out.splitlines()[:3] == [
        "title   ms  ratio to peer  least   most    MB   ratio",
        "ours   2.0          1.000  0.500  2.000  1.00  0.2500",
        "peer   2.0          1.000  1.000  1.000  4.00  1.0000",
    ]


def test_gradients_from_before_do_not_hide_what_a_step_allocates():
    images, texts = (unit(32, 16, seed=seed).requires_grad_() for seed in (0, 1))
    contestants = {"clip": losses.PEERS["clip"]()}
    found = [losses.measure(contestants, images, texts, rounds=1)[1]["clip"] for _ in range(2)]
    assert found[0] == found[1] > 2 * images.nbytes


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name.endswith("-compiled") else name
        for name in losses.PEERS
        if name != "three-products"
    ],
)
def test_peers_compute_their_formulas(name):
    check_peer(name, unit(24, 16, seed=0), unit(24, 16, seed=1))


def test_triplets_without_a_loss_count_in_the_mean():
    images = unit(12, 8)
    texts = normalize(images + 0.7 * unit(12, 8, seed=1))
    similarities = images @ texts.T
    hardest = (similarities - 2 * torch.eye(12)).amax(dim=1)
    without = losses.MARGIN + hardest < similarities.diagonal()
    assert 0 < without.sum() < 12
    check_peer("triplet-margin", images, texts)


def check_peer(name, images, texts):
    loss, formula = losses.PEERS[name]()
    check(name, partial(loss, labels=torch.arange(len(images))), formula, images, texts)


def test_products_are_the_three_of_a_loss():
    x, y = unit(8, 4, seed=0), unit(8, 4, seed=1)
    found = losses.PEERS["three-products"]().loss(x, y, torch.arange(8))
    torch.testing.assert_close(found, (x @ y.T @ y, y @ x.T @ x))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda value: 1.001 * value, r"^other: its value differs from that of the formula by 1\.0e-03$"),
        (lambda value: value * float("nan"), "^other: its value differs from that of the formula by nan$"),
        (lambda value: 2 * value - value.detach(), r"^other: its image gradient differs .* by 1\.0e\+00$"),
    ],
)
def test_another_value_or_gradient_is_an_error(change, message):
    _, formula = losses.PEERS["clip"]()
    sides = unit(24, 16, seed=0), unit(24, 16, seed=1)
    # What normalizes has no gradient along the vectors.
    check("other", lambda x, y: formula(normalize(x), normalize(y)), formula, *sides)
    with pytest.raises(ValueError, match=message):
        check("other", lambda x, y: change(formula(x, y)), formula, *sides)


def test_another_similarity_of_sets_is_an_error(monkeypatch):
    monkeypatch.setitem(sets.SIMILARITIES, "other", lambda x, y: smooth_chamfer_similarity(x, y, alpha=15.0))
    with pytest.raises(ValueError, match=r"^other: its value differs"):
        sets.main("--images 8 --captions 9 --dimension 16 --rounds 1".split())


def test_other_ranks_are_an_error(monkeypatch):
    full_argsort = ranks.full_argsort
    monkeypatch.setattr(ranks, "full_argsort", lambda *given: [1 + rank for rank in full_argsort(*given)])
    with pytest.raises(ValueError, match=r"^100.00% of the ranks differ$"):
        ranks.main("--images 50 --dimension 16 --rounds 1".split())


def test_ranks_without_the_sort(monkeypatch, capsys):
    monkeypatch.setattr(ranks, "full_argsort", None)
    ranks.main("--images 50 --dimension 16 --no-sort --negatives 2".split())
    assert capsys.readouterr().out.startswith("50 x 250, negatives: 2: ")


def test_half_precision(capsys):
    losses.main("--losses unified --peers clip --dtype bfloat16 --batch-sizes 32 --dimension 64 --rounds 1".split())
    assert "B 32, D 64, bfloat16" in capsys.readouterr().out


def test_shards_are_read_and_written(capsys):
    data.main("--scale 0.002 --rounds 1".split())
    printed = capsys.readouterr().out
    for peer in ("open_clip", "ShardWriter"):
        assert re.search(rf"^{peer} .* 1\.000  1\.000  1\.000$", printed, re.MULTILINE)
    images, size = re.search(r"([\d,]+) images: .* drawn, ([\d.]+) bytes an image", printed).groups()
    assert images == "4,000"
    assert 60 < float(size) < 100


def test_a_reader_that_leaves_out_images_is_an_error():
    with pytest.raises(ValueError, match=r"^read 3 of 4 images$"):
        data.read([(torch.zeros(2), None), (torch.zeros(1), None)], 4)


@pytest.mark.slow
def test_commands_and_servers(capsys):
    data.main("--growth --remote --scale 0.002".split())
    printed = capsys.readouterr().out.splitlines()
    sizes = [line.split()[0] for line in printed[1:4]]
    peaks = [float(line.split()[place]) for line in printed[1:4] for place in (2, 4)]
    assert sizes == ["128", "128", "1,000"]
    assert min(peaks) > 20
    assert printed[4].startswith("2,000 rows of a table: ")
    rates = [line.split()[-3:] for line in printed[-2:]]
    assert min(int(rate.replace(",", "")) for row in rates for rate in row) > 0


@pytest.mark.gpu
def test_on_a_gpu(capsys):
    assert extra_bytes(lambda: torch.ones(1024, device="cuda"), device="cuda") == 4096
    losses.main("--device cuda --backends dense tiled --dtype bfloat16 --batch-sizes 256 --rounds 1".split())
    assert "unified (tiled)" in capsys.readouterr().out
