"""That the benchmarks measure what they say, and compare only what computes the same."""

import re
import subprocess
import sys
import time
from importlib.metadata import distributions
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import cross_entropy, logsigmoid, normalize

from benchmarks import gpu, gpu_rows, gpu_tests, losses
from benchmarks.gpu_losses import LossBenchmark, Measurement, Results, Size, format_cell, markdown_table, missing_lines
from benchmarks.gpu_rows import Row
from benchmarks.measurement import extra_bytes, print_table, time_rounds
from benchmarks.metadata import write_metadata
from vl_plugins import create_loss, engine


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
    from benchmarks import data  # needs webdataset, which `make gpu` does without

    data.main("--scale 0.002 --rounds 1".split())
    printed = capsys.readouterr().out
    for peer in ("open_clip", "ShardWriter"):
        assert re.search(rf"^{peer} .* 1\.000  1\.000  1\.000$", printed, re.MULTILINE)
    with pytest.raises(ValueError, match=r"^read 3 of 4 images$"):
        data.read([(torch.zeros(2), None), (torch.zeros(1), None)], 4)


@pytest.mark.slow
def test_memory_of_an_image(capsys):
    from benchmarks import data  # needs webdataset, which `make gpu` does without

    data.main("--growth --scale 0.004".split())
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:4]]
    assert [row[0] for row in rows] == ["128", "200", "2,000"]
    assert 60 < float(rows[-1][-1]) < 100


TESTS = {
    "test_run.py": """
import pytest

@pytest.mark.gpu
def test_passes(): pass

@pytest.mark.gpu
@pytest.mark.skip(reason="too cold")
def test_skipped(): pass

def test_without_the_mark(): raise ValueError
""",
    "test_import.py": """
import pytest, no_such_package

@pytest.mark.gpu
def test_passes(): pass
""",
    "test_failure.py": """
import pytest

@pytest.mark.gpu
def test_fails(): assert 1 == 2
""",
    "test_others.py": "raise ValueError",
}


@pytest.fixture
def marked_tests(tmp_path):
    """A folder with tests that pass and fail, and a module that lacks an import."""
    for name, content in TESTS.items():
        (tmp_path / name).write_text(content)
    return tmp_path


def test_rehearsal_of_make_gpu(marked_tests, capsys):
    """On the CPU with tiny batches: tests, tables of two dimensions, and a reason for each dash."""
    flags = "--device cpu --batch-sizes 6x16 4 --dimension 8 --rounds 1 --compiler eager --tests".split()
    assert gpu.main([*flags, str(marked_tests)]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith(f"CPU, a rehearsal; torch {torch.__version__}, ")
    folder = marked_tests.name
    assert "1 passed, 1 failed." in printed
    assert f"Failed:\n\n- {folder}.test_failure::test_fails\n" in printed
    assert f"\n- {folder}.test_import: no_such_package is not installed (1)\n" in printed
    assert f"\n- {folder}.test_run: too cold (1)\n" in printed
    assert "\nNot measured: siglip-kernel (runs on GPUs only), inf-cl (runs on GPUs only).\n" in printed
    assert re.findall("^### (D = .*)\n\n.*B = (.*) ", printed, re.MULTILINE) == [("D = 8", "4"), ("D = 16", "6")]
    _, *tables = re.split(r"^\|.* B = [46] \|\n", printed, flags=re.MULTILINE)
    assert len(tables) == 4
    labels = [row.label for row in [*gpu_rows.open_clip_rows("eager"), *gpu_rows.own_rows()]]
    dashes = []
    if '"eye" not implemented for' in printed:  # SigLipLoss in bfloat16 on a CPU, before torch 2.3
        dashes = [label for label in labels if "SigLipLoss" in label]
    for table in tables:
        rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
        assert [label for label, _ in rows] == labels
        assert [cell == "–" for _, cell in rows] == [label in dashes for label in labels]


def test_rows_of_our_losses():
    rows = {row.label: row for row in gpu_rows.own_rows()}
    calls = "by place", "by place, compiled", "by labels"
    for name in ("`unified`", "`unified`, products float32", "`vlc`"):
        assert [rows[f"{name}, {call}"].is_compiled for call in calls] == [False, True, False]
    for name in ("`siglip`", "`triplet_hn`", "`triplet_sh`", "`goal`", "`smooth_chamfer`, sets of 4"):
        assert {f"{name}, by place", f"{name}, by labels"} < set(rows)
    images, texts, labels = unit(6, 8), unit(6, 8, seed=1), torch.arange(6)
    by_place, by_labels = (rows[f"`vlc`, {call}"].loss(images, texts, labels) for call in ("by place", "by labels"))
    torch.testing.assert_close(by_place, by_labels)


@pytest.mark.parametrize(("is_compiled", "compile_from"), [(True, 0), (False, sys.maxsize)])
def test_blocks_are_compiled_in_some_rows_only(is_compiled, compile_from, monkeypatch):
    monkeypatch.setattr(engine, "COMPILE_FROM", 7)
    monkeypatch.setattr(engine, "COMPILE_AFTER", 8)
    settings = []

    def record(*_):
        settings.append((engine.COMPILE_FROM, engine.COMPILE_AFTER))

    def loss(images, texts, labels):
        record()
        value = images.sum()
        value.register_hook(record)
        return value

    def failing_loss(images, texts, labels):
        raise RuntimeError("out of memory")

    leaves = [torch.ones(2, 2, requires_grad=True) for _ in range(2)]
    Row("a loss", loss, is_compiled=is_compiled).run(*leaves, torch.arange(2))
    assert settings == [(compile_from, 0)] * 2  # forward and backward
    with pytest.raises(RuntimeError, match="out of memory"):
        Row("a loss", failing_loss, is_compiled=is_compiled).run(*leaves, torch.arange(2))
    assert (engine.COMPILE_FROM, engine.COMPILE_AFTER) == (7, 8)


def siglip_of_a_package(img_features, txt_features, log_temperature, bias, use_fp8=False, backend="auto"):
    """With the call of siglip-kernel 0.1.2."""
    logits = log_temperature.exp() * img_features @ txt_features.T + bias
    signs = 2 * torch.eye(len(logits)) - 1
    return -logsigmoid(signs * logits).sum() / len(logits)


def contrastive_loss_of_a_package(q, k, labels=None, scale=None, head_dim=256):
    """With the call of inf-cl 1.2.1, which takes the mean over its first argument only."""
    assert not scale.requires_grad  # it would be added up over processes
    return cross_entropy(scale * q @ k.T, torch.arange(len(q)))


def test_packages_for_gpus_compute_what_open_clip_does():
    images, texts, labels = unit(6, 8), unit(6, 8, seed=1), torch.arange(6)
    siglip_kernel = SimpleNamespace(fused_siglip_loss=siglip_of_a_package)
    inf_cl = SimpleNamespace(cal_inf_loss=contrastive_loss_of_a_package)
    for peer, loss in (
        ("siglip", gpu_rows.siglip_kernel_loss(siglip_kernel, "cpu")),
        ("clip", gpu_rows.inf_cl_loss(inf_cl, "cpu")),
    ):
        torch.testing.assert_close(loss(images, texts, labels), losses.PEERS[peer]()(images, texts, labels))


def test_packages_for_gpus_that_cannot_be_imported(monkeypatch, tmp_path):
    peers = [peer._replace(loss=lambda module, device: module) for peer in gpu_rows.PEERS_ON_GPUS]
    monkeypatch.setattr(gpu_rows, "PEERS_ON_GPUS", peers)
    (tmp_path / "siglip_kernel.py").write_text("raise RuntimeError('Found no NVIDIA driver')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "siglip_kernel", raising=False)
    monkeypatch.setitem(sys.modules, "inf_cl", None)
    reasons = {"siglip-kernel": "RuntimeError when it is imported", "inf-cl": "inf_cl is not installed"}
    assert gpu_rows.peer_rows("cuda") == ([], reasons)
    for module in ("siglip_kernel", "inf_cl"):
        monkeypatch.setitem(sys.modules, module, SimpleNamespace())
    rows, reasons = gpu_rows.peer_rows("cuda")
    assert [row.label for row in rows] == ["siglip-kernel's `fused_siglip_loss`", "inf-cl's `cal_inf_loss`"]
    assert not reasons


def test_batch_sizes_with_dimensions(capsys):
    assert gpu.sizes_of(["1024", "256", "4096x768"], 512) == [(256, 512), (1024, 512), (4096, 768)]
    assert gpu.main(["--device", "cpu", "--batch-sizes", "1k"]) == 2
    assert "'1k' is neither a number" in capsys.readouterr().err


def test_commit_of_a_checkout(tmp_path):
    assert gpu.commit_of(tmp_path) == ""
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run([*git, "init", "--quiet"], cwd=tmp_path, check=True)
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "--message", "a"], cwd=tmp_path, check=True)
    assert re.fullmatch("[0-9a-f]{7,}", gpu.commit_of(tmp_path))


def test_too_little_time_for_the_tests(marked_tests):
    report = gpu_tests.run_gpu_tests(marked_tests, seconds=0)
    assert report.failed == ["all tests: not finished within 0 s"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_make_gpu_without_a_gpu(capsys):
    assert gpu.main([]) == 2
    assert "sees no CUDA device" in capsys.readouterr().err


def test_cells_by_hand():
    measurement = Measurement(seconds=1.2345, ratio=2.0, ratio_to_compiled=None, bytes=2_500_000)
    assert format_cell(measurement, "time") == "1,234.50 (2.00 / –)"
    assert format_cell(measurement, "memory") == "2.5"


def allocate_too_much(images, texts, labels):
    return torch.empty(10**16)


def test_reasons_of_dashes():
    """No memory, and no time."""
    rows = [Row("large", allocate_too_much), Row("small", losses.PEERS["clip"]())]
    benchmark = LossBenchmark(rows, device="cpu", rounds=1)
    sizes = [Size(4, 8), Size(8, 8), Size(16, 8)]
    benchmark.measure(sizes[:1], deadline=time.monotonic() + 600)
    benchmark.measure(sizes[1:], deadline=time.monotonic())
    out_of_memory, *no_time = missing_lines(benchmark.results, sizes)
    assert re.match("large; B = 4: RuntimeError: .*allocate memory", out_of_memory)
    assert no_time == ["large; small; B = 8, 16: no time left"]
    assert missing_lines(benchmark.results, [Size(4, 16)]) == []
    assert markdown_table(benchmark.results, rows, sizes[:2], "memory")[2] == "| large | – | – |"


def test_a_loss_is_not_called_if_smaller_batches_tell_that_it_takes_too_long():
    calls = []
    rows = [Row("slow", lambda *_: calls.append("slow")), Row("fast", lambda *_: calls.append("fast"))]
    results = Results({("slow", Size(2, 8)): Measurement(60.0, None, None, 0)})
    assert results.expected_seconds("slow", Size(4, 16)) == 60 * 4 * 2
    assert results.expected_seconds("fast", Size(4, 16)) == 0
    benchmark = LossBenchmark(rows, device="cpu", rounds=1, results=results)
    benchmark.call_all(Size(4, 8), deadline=time.monotonic() + 600)
    assert "slow" not in calls
    assert results.missing["slow", "no time left"] == [Size(4, 8)]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="needs tomllib")
def test_metadata_of_a_checkout_that_is_not_installed(tmp_path):
    write_metadata(tmp_path)
    (distribution,) = distributions(path=[str(tmp_path)])
    lines = (gpu_tests.ROOT / "pyproject.toml").read_text().splitlines()
    assert f'version = "{distribution.version}"' in lines
    assert len(distribution.entry_points) >= 6
    for loss in distribution.entry_points:
        assert loss.group == "vl_plugins.losses"
        assert f'{loss.name} = "{loss.value}"' in lines


@pytest.mark.gpu
def test_on_a_gpu(capsys):
    assert extra_bytes(lambda: torch.ones(1024, device="cuda"), device="cuda") == 4096
    losses.main("--device cuda --backends dense tiled --dtype bfloat16 --batch-sizes 256 --rounds 1".split())
    assert "unified (tiled)" in capsys.readouterr().out
