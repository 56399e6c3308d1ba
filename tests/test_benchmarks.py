import contextlib
import csv
import io
import os
import platform
import sys
import time
import types

import pytest
import torch
from torch.nn.functional import cross_entropy, logsigmoid, normalize

from tests.memory import extra_bytes
from tests.reference.sets import EXP_AND_POOL
from vl_plugins.benchmarks import contestants, measurement
from vl_plugins.benchmarks.contestants import FORMULAS, Contestant, Setting, Skipped, make_contestants, make_inputs
from vl_plugins.benchmarks.machine import describe_machine
from vl_plugins.benchmarks.measurement import (
    Measurement,
    Result,
    check_against_formula,
    copy_rate,
    measure,
    ratio,
    run_benchmark,
    seconds,
    time_rounds,
)
from vl_plugins.benchmarks.memory import peak_bytes
from vl_plugins.benchmarks.names import BACKENDS, DEFAULT_BACKEND, LOSSES, PEERS, SETS
from vl_plugins.benchmarks.plot import _draw, plot_result
from vl_plugins.benchmarks.tables import COLUMNS, csv_table, markdown_tables, text_tables
from vl_plugins.kernels import BACKENDS as KERNEL_BACKENDS
from vl_plugins.utils.errors import UserError

CPU = torch.device("cpu")
SMALL = Setting(32, 16, "float32", CPU)
SMALL_SETS = Setting(12, 16, "float32", CPU, elements=3)
ON_CPU = [name for name, peer in PEERS.items() if not peer.needs_cuda and "compiled" not in name]


@pytest.fixture(autouse=True)
def little_to_copy(monkeypatch):
    monkeypatch.setattr(measurement, "COPIED_BYTES", 2**16)


def no_memory(setting):
    return 0.0


# Memory


def test_a_known_allocation_is_counted():
    def function():
        first = torch.ones(1000)
        second = torch.ones(2000)
        del first
        third = torch.ones(500)
        return second, third

    assert extra_bytes(function) == peak_bytes(function, CPU) == 4 * 3000
    assert extra_bytes(function, kept=4 * 2500) == 4 * 500


def test_nothing_allocated_is_an_error():
    with pytest.raises(RuntimeError, match="saw no allocation"):
        extra_bytes(lambda: None)


def test_the_profiler_is_silent_and_errors_are_not(capfd):
    assert peak_bytes(lambda: torch.ones(10), CPU) == 40
    assert capfd.readouterr().err == ""
    with pytest.raises(ZeroDivisionError):
        peak_bytes(lambda: 1 / 0, CPU)
    os.write(2, b"written afterwards")
    assert "written afterwards" in capfd.readouterr().err


def test_gradients_that_were_there_before_are_not_counted_as_there():
    """Otherwise what overwrites them would look as if it needed none."""
    inputs = make_inputs(SMALL, seed=0)
    (contestant,), _ = make_contestants([], [], ["clip"], SMALL)
    peaks = [measure([contestant], inputs, SMALL, rounds=1, rate=1.0)[0][0].peak_bytes for _ in range(2)]
    assert peaks[0] == peaks[1] > 2 * inputs.x.nbytes


# Time


def test_one_thread_is_timed_by_the_processor_and_two_by_the_wall():
    def sleep():
        time.sleep(0.1)

    assert torch.get_num_threads() == 1
    assert seconds(sleep, CPU) < 0.05
    try:
        torch.set_num_threads(2)
        assert seconds(sleep, CPU) >= 0.1
    finally:
        torch.set_num_threads(1)


def test_rounds_alternate_and_preparation_is_not_timed(monkeypatch):
    log = []

    def timed(run, device):
        log.append("start")
        run()
        log.append("stop")
        return float(len(log))

    def named(name):
        def prepare():
            log.append(f"prepare {name}")
            return lambda: log.append(name)

        return prepare

    monkeypatch.setattr(measurement, "seconds", timed)
    taken = time_rounds({name: named(name) for name in "abc"}, rounds=3, device=CPU)
    runs = [entry for entry in log if len(entry) == 1]
    assert "".join(runs) == "abccbaabc"
    assert log[:4] == ["prepare a", "start", "a", "stop"]
    assert taken == {"a": (4.0, 24.0, 28.0), "b": (8.0, 20.0, 32.0), "c": (12.0, 16.0, 36.0)}


def scripted(monkeypatch, times):
    """Let the clock say these seconds, in turn, of everything that it times."""
    given = iter(times)

    def timed(run, device):
        run()
        return next(given)

    monkeypatch.setattr(measurement, "seconds", timed)


def test_the_copy_rate_counts_reading_and_writing(monkeypatch):
    scripted(monkeypatch, [4.0, 1.0, 2.0, 8.0, 2.0])
    assert copy_rate(CPU) == 2 * 2**16 / 2.0


def test_shares_and_ratios_by_hand(monkeypatch):
    loss, hardest = (
        Contestant(formula, lambda inputs, f=formula: FORMULAS[f].value(inputs.x, inputs.y), no_memory, formula)
        for formula in ("vlc", "triplet_hn")
    )
    products = contestants.three_products(SMALL)
    # Rounds: loss, hardest, products; then backwards.
    scripted(monkeypatch, [8.0, 2.0, 3.0, 6.0, 10.0, 4.0])
    found, skipped = measure([loss, hardest, products], make_inputs(SMALL, seed=0), SMALL, rounds=2, rate=64.0)
    assert skipped == []
    of_loss, of_hardest, of_products = found
    assert [each.seconds for each in found] == [(8.0, 4.0), (2.0, 10.0), (3.0, 6.0)]
    assert [each.median for each in found] == [6.0, 6.0, 4.5]
    # Three products take 4.5 s: a contrastive loss needs three of them, one of hardest negatives one.
    assert of_loss.product_share == pytest.approx(4.5 / 6)
    assert of_hardest.product_share == pytest.approx(1.5 / 6)
    assert of_products.product_share == 1
    # Two embeddings are read, two gradients written, 32 x 16 float32 each.
    assert of_loss.copy_share == pytest.approx(4 * 32 * 16 * 4 / 64 / 6)
    assert of_products.copy_share is None
    compared = ratio(of_loss, of_hardest)
    assert compared[:3] == (pytest.approx((8 / 2 + 4 / 10) / 2), 4 / 10, 8 / 2)
    assert compared.memory == of_loss.peak_bytes / of_hardest.peak_bytes


def test_shares_of_sets(monkeypatch):
    (similarity,), _ = make_contestants([SETS], [DEFAULT_BACKEND], [], SMALL_SETS)
    scripted(monkeypatch, [5.0])
    ((found,), _) = measure([similarity], make_inputs(SMALL_SETS, seed=0), SMALL_SETS, rounds=1, rate=2.0)
    # Embeddings and their gradients, similarities and theirs.
    assert found.copy_share == pytest.approx((4 * 12 * 3 * 16 + 2 * 12 * 12) * 4 / 2 / 5)
    assert found.product_share is None  # without a contestant to measure the rate


def test_a_gpu_is_timed_by_its_events_and_asked_for_its_peak(monkeypatch):
    """With stand-ins for what torch has, in the order in which they must be called."""
    log = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            log.append("record")

        def synchronize(self):
            log.append("wait")

        def elapsed_time(self, end):
            assert end is not self
            return 250.0  # milliseconds

    def logged(name, value=None):
        return lambda device: log.append(name) or value

    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    for name, value in (
        ("synchronize", None),
        ("reset_peak_memory_stats", None),
        ("memory_allocated", 1000),
        ("max_memory_allocated", 5000),
    ):
        monkeypatch.setattr(torch.cuda, name, logged(name, value))
    gpu = torch.device("cuda")
    assert seconds(lambda: log.append("run"), gpu) == 0.25
    assert log == ["record", "run", "record", "wait"]
    log.clear()
    assert peak_bytes(lambda: log.append("run"), gpu) == 4000
    assert log.index("memory_allocated") < log.index("reset_peak_memory_stats") < log.index("run")
    assert log[log.index("run") + 1 :] == ["synchronize", "max_memory_allocated"]
    assert measurement.clock_name(gpu, threads=1) == "GPU time"


# What is compared


def test_names_are_those_of_the_losses_and_backends():
    assert (DEFAULT_BACKEND, *KERNEL_BACKENDS) == BACKENDS
    assert set(LOSSES) <= set(FORMULAS)
    assert set(contestants._PEERS) == set(PEERS)


def test_inputs_are_unit_leaves_of_the_seed():
    for setting in (SMALL, SMALL_SETS, Setting(8, 4, "bfloat16", CPU)):
        x, y, labels, upstream = make_inputs(setting, seed=3)
        assert x.shape == y.shape
        assert x.shape == (setting.batch_size, *([3] if setting.elements else []), setting.dimension)
        assert x.is_leaf
        assert x.requires_grad
        torch.testing.assert_close(x.float().norm(dim=-1), torch.ones(x.shape[:-1]), atol=1e-2, rtol=0)
        assert not torch.equal(x, y)
        assert torch.equal(x, make_inputs(setting, seed=3).x)
        assert not torch.equal(x, make_inputs(setting, seed=4).x)
        assert len(labels.unique()) == len(x)
        assert (upstream is None) == (setting.elements is None)


def test_each_run_gets_new_labels_and_no_gradients():
    """Labels that are known from the last step would spare ours the search for pairs, which trainings do not have."""
    inputs = make_inputs(SMALL, seed=0)
    inputs.x.grad = inputs.y.grad = torch.ones_like(inputs.x)
    fresh = inputs.fresh()
    assert fresh.x.grad is fresh.y.grad is None
    assert fresh.x is inputs.x
    assert fresh.labels is not inputs.labels
    assert torch.equal(fresh.labels, inputs.labels)


def has_eye(dtype):
    try:
        torch.eye(1, dtype=dtype)
    except RuntimeError:  # torch 2.2 has none of bfloat16
        return False
    return True


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("elements", [None, 3])
def test_all_that_runs_here_computes_its_formula(dtype, elements):
    setting = Setting(24, 16, dtype, CPU, elements)
    found, skipped = make_contestants(LOSSES, [DEFAULT_BACKEND, "tiled"], ON_CPU, setting)
    assert skipped == []
    assert len(found) == (13 if elements is None else 4)
    inputs = make_inputs(setting, seed=0)
    for contestant in found:
        # The host's, which makes a unit matrix of the type of the embeddings.
        if contestant.name != "siglip" or has_eye(inputs.x.dtype):
            check_against_formula(contestant, inputs)


@pytest.mark.parametrize("seed", [0, 1])
def test_triplets_that_are_right_count_in_the_mean(seed):
    """Of few items in few dimensions some are; the default reducer of the library leaves them out."""
    setting = Setting(6, 3, "float32", CPU)
    inputs = make_inputs(setting, seed)
    similarities = inputs.x @ inputs.y.T
    hardest = (similarities - 2 * torch.eye(6)).amax(dim=1)
    assert (0.2 + hardest < similarities.diagonal()).any()
    for contestant in make_contestants(["triplet_hn"], [DEFAULT_BACKEND], ["triplet-margin"], setting)[0]:
        check_against_formula(contestant, inputs)


def test_backends_are_those_asked_for(monkeypatch):
    asked = []
    create_loss = contestants.create_loss
    monkeypatch.setattr(
        contestants,
        "create_loss",
        lambda name, **options: asked.append((name, options)) or create_loss(name, **options),
    )
    found, _ = make_contestants(["vlc", "goal"], [DEFAULT_BACKEND, "tiled"], [], SMALL)
    assert asked == [(name, {"backend": backend}) for name in ("vlc", "goal") for backend in (None, "tiled")]
    assert [each.name for each in found] == ["vlc", "vlc (tiled)", "goal", "goal (tiled)"]


@pytest.mark.parametrize(
    ("peer", "reference"),
    [
        ("lp-pooling", EXP_AND_POOL["LP pooling"]),
        ("average-pooling", EXP_AND_POOL["average pooling"]),
        ("reshape-and-sum", EXP_AND_POOL["reshape and sum"]),
    ],
)
def test_formulations_of_sets_are_those_of_the_reference(peer, reference):
    (contestant,), _ = make_contestants([], [], [peer], SMALL_SETS)
    inputs = make_inputs(SMALL_SETS, seed=0)
    assert torch.equal(contestant.run(inputs), reference(inputs.x, inputs.y))
    assert extra_bytes(lambda: contestant.run(inputs)) == extra_bytes(lambda: reference(inputs.x, inputs.y))


def test_bare_products_are_the_three_of_a_loss():
    inputs = make_inputs(SMALL, seed=0)
    x, y = (side.detach() for side in inputs[:2])
    for given, expected in zip(contestants.three_products(SMALL).run(inputs), (x @ y.T @ y, y @ x.T @ x), strict=True):
        torch.testing.assert_close(given, expected)


def fake_memeff():
    class MemoryEfficientCLIPLoss:
        def __init__(self, temperature=0.07, normalized_inputs=False, stable=True, tau_plus=0.0, label_smoothing=0.0):
            self.scale, self.normalized, self.stable = 1 / temperature, normalized_inputs, stable

        def __call__(self, x, y, tau_plus=None):
            assert self.normalized
            logits, labels = self.scale * x @ y.T, torch.arange(len(x))
            loss = (cross_entropy(logits, labels) + cross_entropy(logits.T, labels)) / 2
            # Its default has the gradient of another scale.
            return loss + (7 * (loss - loss.detach()) if self.stable else 0)

    return {"MemoryEfficientCLIPLoss": MemoryEfficientCLIPLoss}


def fake_inf_cl():
    def cal_flash_loss(q, k, labels=None, scale=None, head_dim=256):
        q, k = (side.view(len(side), -1, head_dim).flatten(1) for side in (q, k))
        return cross_entropy(scale * q @ k.T, torch.arange(len(q)), reduction="none")

    return {"cal_flash_loss": cal_flash_loss}


def fake_siglip_kernel():
    def fused_siglip_loss(img_features, txt_features, log_temperature, bias, use_fp8=False, backend="auto"):
        logits = img_features @ txt_features.T * log_temperature.exp() + bias
        return -logsigmoid((2 * torch.eye(len(logits)) - 1) * logits).sum() / len(logits)

    return {"fused_siglip_loss": fused_siglip_loss}


@pytest.mark.parametrize(
    ("peer", "fake"), [("memeff", fake_memeff), ("inf-cl", fake_inf_cl), ("siglip-kernel", fake_siglip_kernel)]
)
def test_losses_of_gpus_are_called_by_their_signatures(peer, fake, monkeypatch):
    """With stand-ins of the same signatures, in plain torch."""
    module = types.ModuleType(PEERS[peer].module)
    vars(module).update(fake())
    monkeypatch.setitem(sys.modules, module.__name__, module)
    setting = Setting(24, 48, "float32", CPU)  # 48: no multiple of 32
    (contestant,) = [contestants._PEERS[peer](setting)]
    check_against_formula(contestant, make_inputs(setting, seed=0))


def test_what_cannot_run_is_named(monkeypatch):
    everything = [name for name in PEERS if "compiled" not in name]
    found, skipped = make_contestants([], [], everything, SMALL)
    assert [each.name for each in found] == ["three-products", "clip", "siglip", "ntxent", "triplet-margin"]
    assert skipped == [Skipped(name, "needs a CUDA GPU") for name in ("memeff", "inf-cl", "siglip-kernel")]

    on_gpu = Setting(32, 20, "float32", torch.device("cuda"))
    for module in ("open_clip", "memeff", "siglip_kernel"):
        monkeypatch.setitem(sys.modules, module, None)
    broken = types.ModuleType("inf_cl")
    broken.__spec__ = types.SimpleNamespace()
    monkeypatch.setitem(sys.modules, "inf_cl", broken)
    _, skipped = make_contestants([], [], ["clip", "memeff", "inf-cl", "siglip-kernel"], on_gpu)
    assert [each.name for each in skipped] == ["clip", "memeff", "inf-cl", "siglip-kernel"]
    assert skipped[0].reason == "open_clip is not installed; install it with: pip install 'vl_plugins[bench]'"
    assert skipped[1].reason.startswith("memeff is not installed")
    assert skipped[2].reason == "needs a dimension that is a multiple of 16, got 20"
    _, (skipped,) = make_contestants([], [], ["inf-cl"], Setting(32, 32, "float32", torch.device("cuda")))
    assert skipped.reason.startswith("ImportError: cannot import name 'cal_flash_loss'")


# Checks


def vlc_with(change):
    return Contestant("other", lambda inputs: change(FORMULAS["vlc"].value(inputs.x, inputs.y)), no_memory, "vlc", 2.0)


def doubled_gradient(loss):
    return 2 * loss + 2 * (loss - loss.detach())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda loss: loss,
            r"^other is not 2 x vlc: [\d.]+ and [\d.]+ \(relative difference 5.0e-01, rounding: 1e-04\)$",
        ),
        (lambda loss: 2.001 * loss, r"^other is not 2 x vlc"),
        (lambda loss: 2 * loss * float("nan"), r"^other is not 2 x vlc: nan"),
        (doubled_gradient, r"^the gradient of other is not that of 2 x vlc \(relative difference 1.0e\+00"),
    ],
)
def test_another_loss_or_gradient_stops(change, message):
    inputs = make_inputs(SMALL, seed=0)
    check_against_formula(vlc_with(lambda loss: 2 * loss), inputs)
    with pytest.raises(UserError, match=message):
        measure([vlc_with(change)], inputs, SMALL, rounds=1, rate=1.0)


def test_gradients_along_the_vectors_do_not_count():
    """As of those that normalise what they get already."""

    def run(inputs):
        return FORMULAS["vlc"].value(normalize(inputs.x), normalize(inputs.y))

    check_against_formula(Contestant("other", run, no_memory, "vlc"), make_inputs(SMALL, seed=0))


def test_a_disagreement_on_many_items_only_stops(monkeypatch):
    monkeypatch.setattr(measurement, "CHECKED", 8)

    def run(inputs):
        return 0.5 * FORMULAS["vlc"].value(inputs.x, inputs.y) * (1.01 if len(inputs.x) > 8 else 1)

    (ours,), _ = make_contestants(["vlc"], ["dense"], [], SMALL)
    other = Contestant("other", run, no_memory, "vlc", 0.5)
    with pytest.raises(UserError, match=r"^other and vlc \(dense\) disagree: .* \(relative difference 1.0e-02"):
        measure([ours, other], make_inputs(SMALL, seed=0), SMALL, rounds=1, rate=1.0)


def test_others_that_fail_are_left_out_and_ours_that_fail_are_not():
    def fail(inputs):
        raise RuntimeError("no compiler\nand more")

    def refuse(inputs):
        raise ValueError("this backend needs a GPU")

    (good,), _ = make_contestants(["vlc"], ["dense"], [], SMALL)
    failing = Contestant("failing", fail, no_memory, "siglip", peer="failing")
    refusing = Contestant("refusing", refuse, no_memory, "vlc")
    inputs = make_inputs(SMALL, seed=0)
    (only,), skipped = measure([failing, good, refusing], inputs, SMALL, rounds=1, rate=1.0)
    assert only.name == good.name
    assert skipped == [Skipped("failing", "RuntimeError: no compiler"), Skipped("refusing", "this backend needs a GPU")]
    with pytest.raises(RuntimeError, match="no compiler"):
        measure([Contestant("mine", fail, no_memory, "vlc")], inputs, SMALL, rounds=1, rate=1.0)


# Benchmarks


def test_a_benchmark_measures_all_at_each_setting():
    lines = []
    result = run_benchmark(
        ["unified", SETS],
        ["clip", "three-products", "lp-pooling", "memeff"],
        ["dense", "tiled"],
        [SMALL, Setting(16, 16, "float32", CPU), SMALL_SETS],
        rounds=2,
        progress=lines.append,
    )
    assert result.settings() == (SMALL, Setting(16, 16, "float32", CPU), SMALL_SETS)
    names = [[measurement.name for measurement in result.at(setting)] for setting in result.settings()]
    assert names[0] == names[1] == ["unified (dense)", "unified (tiled)", "clip", "three-products"]
    assert names[2] == [SETS, "lp-pooling", "three-products"]
    assert all(len(each.seconds) == 2 and min(each.seconds) > 0 for each in result.measurements)
    assert [(ours.name, other.name) for ours, other in result.pairs(SMALL)] == [
        (f"unified ({backend})", other) for backend in ("dense", "tiled") for other in ("clip", "three-products")
    ]
    assert [(setting, each.name) for setting, each in result.skipped] == [
        (setting, "memeff") for setting in result.settings()[:2]
    ]
    assert lines[0] == "B 32, D 16, float32: 4 contestants, 2 rounds"
    assert (result.clock, result.rounds, result.machine) == ("processor time", 2, describe_machine(CPU, 1))


def test_bare_products_are_measured_but_not_compared_with_unless_asked_for():
    result = run_benchmark(["vlc"], ["clip"], ["dense"], [SMALL], rounds=1)
    assert [measurement.name for measurement in result.measurements] == ["vlc (dense)", "clip", "three-products"]
    assert [other.name for _, other in result.pairs(SMALL)] == ["clip"]


def test_what_needs_too_much_memory_is_skipped():
    large = Setting(256, 16, "float32", CPU)
    needed = {each.name: each.peak(large) for each in make_contestants(["vlc"], ["dense"], ["ntxent"], large)[0]}
    assert needed["ntxent"] > 3e8 > needed["vlc (dense)"]
    result = run_benchmark(["vlc"], ["ntxent"], ["dense"], [large], rounds=1, memory_limit=3e8)
    assert [measurement.name for measurement in result.measurements] == ["vlc (dense)", "three-products"]
    ((_, skipped),) = result.skipped
    assert skipped == ("ntxent", f"needs about {needed['ntxent'] / 1e9:.3g} GB, more than the limit of 0.3 GB")
    with pytest.raises(UserError, match=r"^nothing to measure \(vlc \(dense\): needs about .* GB, more than"):
        run_benchmark(["vlc"], [], ["dense"], [large], rounds=1, memory_limit=1.0)


def test_the_limit_is_half_of_what_is_free(monkeypatch):
    (dense,), _ = make_contestants(["vlc"], ["dense"], [], SMALL)
    for free, fits in ((2.1, True), (1.9, False)):
        monkeypatch.setattr(measurement, "free_bytes", lambda device, f=free: f * dense.peak(SMALL))
        if fits:
            assert run_benchmark(["vlc"], [], ["dense"], [SMALL], rounds=1).measurements
        else:
            with pytest.raises(UserError, match="nothing to measure"):
                run_benchmark(["vlc"], [], ["dense"], [SMALL], rounds=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "losses", "peers", "largest"),
    [
        (Setting(2048, 32, "float32", CPU), LOSSES, [name for name in ON_CPU if name != "ntxent"], 3),
        (Setting(2048, 32, "bfloat16", CPU), LOSSES, [name for name in ON_CPU if name != "ntxent"], 6),
        (Setting(320, 32, "float32", CPU), [], ["ntxent"], 2.5),
        (Setting(512, 32, "float32", CPU, elements=4), [SETS], ON_CPU, 5),
    ],
)
def test_estimates_of_memory_are_enough_and_not_far_off(setting, losses, peers, largest):
    found, _ = make_contestants(losses, ["dense", "tiled"], peers, setting)
    measured, _ = measure(found, make_inputs(setting, seed=0), setting, rounds=1, rate=1.0)
    estimates = {contestant.name: contestant.peak(setting) for contestant in found}
    assert measured
    for each in measured:
        assert each.peak_bytes <= estimates[each.name], each.name
        # Tiles and the like are a constant.
        assert estimates[each.name] - 2**24 <= largest * each.peak_bytes, each.name


@pytest.mark.slow
def test_compiled_losses_run_and_agree():
    result = run_benchmark(["vlc"], ["clip", "clip-compiled", "siglip-compiled"], ["dense"], [SMALL], rounds=1)
    assert [each.name for each in result.measurements][1:4] == ["clip", "clip-compiled", "siglip-compiled"]
    assert result.skipped == ()


# Output


def result_with(*settings):
    measurements = []
    for number, setting in enumerate(settings, start=1):
        for name, ours, times, peak, products, copies in (
            ("vlc", True, (0.002, 0.001, 0.003), 1_500_000, 0.25, 0.0625),
            ("clip", False, (0.004, 0.004, 0.004), 6_000_000, 0.125, 0.03125),
            ("three-products", False, (0.0005, 0.0005, 0.0005), 500_000, 1.0, None),
        ):
            taken = tuple(number * each for each in times)
            measurements.append(Measurement(setting, name, ours, taken, number * peak, products, copies))
    skipped = ((settings[0], Skipped("ntxent", "needs about 9.0 GB")),)
    skipped += tuple((setting, Skipped("memeff", "needs a CUDA GPU")) for setting in settings)
    return Result("A Processor, 1 of 2 cores", "processor time", 3, ("clip",), tuple(measurements), skipped)


TWO = (Setting(1024, 512, "float32", CPU), Setting(2048, 512, "float32", CPU))


def test_text():
    lines = text_tables(result_with(*TWO)).splitlines()
    assert lines[0] == "A Processor, 1 of 2 cores."
    assert "processor time, median of 3 rounds" in lines[1]
    start = lines.index("B 1,024, D 512, float32     ms  least   most     MB  products  copies")
    assert lines[start + 1 : start + 7] == [
        "vlc                       2.00   1.00   3.00   1.50     0.250   0.062",
        "clip                      4.00   4.00   4.00   6.00     0.125   0.031",
        "three-products           0.500  0.500  0.500  0.500     1.000       -",
        "",
        "             time  least   most  memory",
        "vlc / clip  0.500  0.250  0.750   0.250",
    ]
    assert lines[-2:] == [
        "skipped ntxent (B 1,024, D 512, float32): needs about 9.0 GB",
        "skipped memeff: needs a CUDA GPU",
    ]
    assert max(map(len, lines)) <= 100


def test_csv_has_all_numbers():
    rows = list(csv.DictReader(io.StringIO(csv_table(result_with(*TWO)))))
    assert tuple(rows[0]) == COLUMNS
    assert [(row["contestant"], row["peer"], row["batch_size"]) for row in rows] == [
        (name, peer, size)
        for size in ("1024", "2048")
        for name, peer in (("vlc", "clip"), ("clip", ""), ("three-products", ""))
    ]
    assert rows[0] == {
        "machine": "A Processor, 1 of 2 cores",
        "clock": "processor time",
        "rounds": "3",
        "dtype": "float32",
        "batch_size": "1024",
        "dimension": "512",
        "elements": "",
        "contestant": "vlc",
        "milliseconds": "2.0",
        "least_milliseconds": "1.0",
        "most_milliseconds": "3.0",
        "megabytes": "1.5",
        "product_share": "0.25",
        "copy_share": "0.0625",
        "peer": "clip",
        "time_ratio": "0.5",
        "least_time_ratio": "0.25",
        "most_time_ratio": "0.75",
        "memory_ratio": "0.25",
    }
    assert rows[2]["copy_share"] == ""


def test_markdown_and_csv_agree():
    result = run_benchmark(["vlc", "unified"], ["clip", "siglip"], ["dense"], [SMALL, SMALL_SETS], rounds=3)
    rows = list(csv.DictReader(io.StringIO(csv_table(result))))
    lines = markdown_tables(result).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    assert lines[0] == result.machine + "."
    assert sum(set(line) <= set("|-:") and "---" in line for line in lines) == 3  # contestants, ratios; of sets no ours
    compared = 0
    for name, *numbers in cells:
        if " / " in name:
            ours, other = name.split(" / ")
            (row,) = [row for row in rows if (row["contestant"], row["peer"]) == (ours, other)]
            names = ("time_ratio", "least_time_ratio", "most_time_ratio", "memory_ratio")
        elif numbers[0] not in ("ms", "time"):
            sets = len([row for row in rows if row["contestant"] == name and row["elements"]]) > 0
            row = next(row for row in rows if row["contestant"] == name)
            if sets:
                continue
            names = (
                "milliseconds",
                "least_milliseconds",
                "most_milliseconds",
                "megabytes",
                "product_share",
                "copy_share",
            )
        else:
            continue
        for number, column in zip(numbers, names, strict=True):
            expected = row[column]
            assert (
                number == "-"
                if expected == ""
                else float(number.replace(",", "")) == pytest.approx(float(expected), rel=6e-3, abs=6e-4)
            ), (name, column)
            compared += 1
    assert compared == 4 * 4 + 4 * 6


def test_plot_has_both_panels():
    pytest.importorskip("matplotlib")
    figure = _draw(result_with(*TWO))
    time_axes, memory_axes = figure.axes
    for axes, name, expected in (
        (time_axes, "time (ms)", {"clip": [4, 8], "vlc": [2, 4], "three-products": [0.5, 1]}),
        (memory_axes, "memory (MB)", {"clip": [6, 12], "vlc": [1.5, 3], "three-products": [0.5, 1]}),
    ):
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
        assert (axes.get_xlabel(), axes.get_ylabel()) == ("batch size B", name)
        drawn = {line.get_label(): line for line in axes.lines}
        assert list(drawn) == list(expected)  # the slowest first, as in the legend
        for label, line in drawn.items():
            assert list(line.get_xdata()) == [1024, 2048]
            assert list(line.get_ydata()) == pytest.approx(expected[label])
            assert line.get_linestyle() == ("-" if label == "vlc" else "--")
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["clip", "vlc", "three-products"]
    assert "A Processor" in figure.texts[0].get_text()
    styles = {(line.get_color(), line.get_marker()) for line in time_axes.lines}
    assert len(styles) == 3


def test_plot_names_what_else_differs():
    pytest.importorskip("matplotlib")
    other = Setting(1024, 512, "bfloat16", CPU)
    labels = [line.get_label() for line in _draw(result_with(TWO[0], other)).axes[0].lines]
    assert "vlc, D 512, float32" in labels
    assert "vlc, D 512, bfloat16" in labels
    assert len(labels) == 6


def test_plot_goes_from_small_to_large():
    pytest.importorskip("matplotlib")
    for line in _draw(result_with(*TWO[::-1])).axes[0].lines:
        assert list(line.get_xdata()) == [1024, 2048]


def test_plot_is_a_png_of_the_stated_size(tmp_path):
    pytest.importorskip("matplotlib")
    pil_image = pytest.importorskip("PIL.Image")
    plot_result(result_with(*TWO), tmp_path / "new" / "bench.png")
    with pil_image.open(tmp_path / "new" / "bench.png") as picture:
        assert (picture.format, picture.size) == ("PNG", (1440, 540))
        # Something dark is drawn in both halves.
        for half in (picture.crop((100, 60, 560, 480)), picture.crop((700, 60, 1150, 480))):
            assert half.convert("L").getextrema()[0] < 160


def test_the_machine_is_named_and_the_host_is_not():
    described = describe_machine(CPU, 1)
    assert "1 of" in described
    assert f"torch {torch.__version__}" in described
    assert platform.node() not in described
