"""Which backend a loss takes, and that its value does not depend on it; see also ``tests/kernels``."""

import pytest
import torch
from pytorch_metric_learning import distances

from tests.helpers.loops import call_with, calls, check_call, make_loss
from vl_plugins.distances import SmoothChamferSimilarity
from vl_plugins.functional import Polynomial
from vl_plugins.kernels import comparison
from vl_plugins.losses import GOALLoss, TripletHNLoss, TripletSHLoss, UnifiedLoss, VLCLoss

WITH_KERNELS = pytest.mark.parametrize("name", ["goal", "triplet_hn", "unified", "vlc"])


@WITH_KERNELS
def test_backends_compute_the_loss(name, monkeypatch):
    monkeypatch.setattr(comparison, "CPU_BLOCK", 12)  # several blocks
    monkeypatch.setattr(comparison, "LEAST_ROWS", 1)
    for backend in ("dense", "tiled"):
        for dtype in (torch.float64, torch.float32):
            for sets in (1, 2):
                what = f"{backend}, {sets} set(s)"
                check_call(name, call_with(sets, dtype), loss=make_loss(name, backend=backend), what=what)
        # All negatives, by all similarities.
        if hasattr(make_loss(name), "warmup_steps"):
            found = [make_loss(name, backend=each, warmup_steps=1)(**call_with(2)) for each in (None, backend)]
            torch.testing.assert_close(*found)


@WITH_KERNELS
def test_choice_is_logged_once(name, caplog):
    comparison.log_choice.cache_clear()
    caplog.set_level("INFO", logger="vl_plugins")
    for backend in (None, None, "dense"):
        make_loss(name, backend=backend)(**call_with(2))
    (record,) = caplog.records
    assert record.getMessage().endswith(": backend dense on cpu")


class HalfCosine(distances.CosineSimilarity):
    def compute_mat(self, query_emb, ref_emb):
        return super().compute_mat(query_emb, ref_emb) / 2


NO_KERNEL = "is neither CosineSimilarity nor DotProductSimilarity"
PROBLEMS = {
    "real distance": (TripletHNLoss(distance=distances.LpDistance()), f"LpDistance {NO_KERNEL}"),
    "subclass": (VLCLoss(distance=HalfCosine()), f"HalfCosine {NO_KERNEL}"),
    "sets": (GOALLoss(distance=SmoothChamferSimilarity()), f"SmoothChamferSimilarity {NO_KERNEL}"),
    "power": (VLCLoss(distance=distances.CosineSimilarity(power=2)), "the distance has p=2 and power=2, not 2 and 1"),
    "norm": (VLCLoss(distance=distances.CosineSimilarity(p=1)), "the distance has p=1 and power=1, not 2 and 1"),
    "statistics": (
        VLCLoss(distance=distances.CosineSimilarity(collect_stats=True)),
        "the distance collects statistics",
    ),
    "relative": (UnifiedLoss(relative=[0, 1]), "relative similarities are a row of candidates for each pair"),
    "margin": (UnifiedLoss(margin=lambda *_: 0.1), "the margin is a function of all similarities"),
    "weights": (UnifiedLoss(weights=Polynomial([1.0])), "similarities are weighted"),
    "triplet_sh": (TripletSHLoss(), "TripletSHLoss needs all similarities"),
}


@pytest.mark.parametrize("case", PROBLEMS)
def test_what_needs_all_similarities_takes_no_backend(case):
    loss, problem = PROBLEMS[case]
    assert loss.kernel_problem() == problem
    assert loss(**call_with(2)).isfinite()
    loss.backend = "tiled"
    with pytest.raises(ValueError, match=f"^backend 'tiled' cannot be used, because {problem}: leave it out$"):
        loss(**call_with(2))


@WITH_KERNELS
def test_an_indices_tuple_takes_no_backend(name):
    assert make_loss(name).kernel_problem() is None
    for what, call in calls():
        if "indices_tuple" in call:
            with pytest.raises(ValueError, match="'dense' cannot be used, because pairs are given as an indices_tuple"):
                make_loss(name, backend="dense")(**call)
            assert make_loss(name)(**call).isfinite(), what


@pytest.mark.parametrize("name", ["unified", "triplet_sh"])
def test_unknown_backends(name):
    with pytest.raises(ValueError, match=r"unknown backend 'tilde' \(did you mean 'tiled'\?\); known: dense, t"):
        make_loss(name, backend="tilde")


def test_the_backend_of_smooth_chamfer_is_that_of_its_similarity():
    loss = make_loss("smooth_chamfer", backend="tiled")
    assert (loss.distance.backend, loss.base.backend) == ("tiled", None)
    with pytest.raises(ValueError, match="backend cannot be given with a MILSimilarity as distance"):
        make_loss("smooth_chamfer", backend="tiled", distance="mil")
