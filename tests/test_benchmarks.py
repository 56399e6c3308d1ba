"""That the benchmarks measure what they say, and compare only what computes the same."""

import re
import sys
import time
from importlib.metadata import distributions

import pytest
import torch
from torch.nn.functional import normalize

from benchmarks import gpu, gpu_tests, losses
from benchmarks.gpu_losses import LossBenchmark, Row, loss_rows, markdown_table, missing_lines
from benchmarks.measurement import extra_bytes, print_table, time_rounds
from benchmarks.metadata import write_metadata
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
    """On the CPU with tiny batches: tests, tables, and a reason for each dash."""
    flags = "--device cpu --batch-sizes 4 --dimension 8 --rounds 1 --compiler eager --tests".split()
    assert gpu.main([*flags, str(marked_tests)]) == 1
    printed = capsys.readouterr().out
    folder = marked_tests.name
    assert "1 passed, 1 failed." in printed
    assert f"Failed:\n\n- {folder}.test_failure::test_fails\n" in printed
    assert f"\n- {folder}.test_import: no_such_package is not installed (1)\n" in printed
    assert f"\n- {folder}.test_run: too cold (1)\n" in printed
    _, *tables = re.split(r"^\|.* B = 4 \|\n", printed, flags=re.MULTILINE)
    assert len(tables) == 2
    labels = [row.label for row in loss_rows("eager")]
    dashes = []
    if '"eye" not implemented for' in printed:  # SigLipLoss in bfloat16 on a CPU, before torch 2.3
        dashes = [label for label in labels if "SigLipLoss" in label]
    for table in tables:
        rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
        assert [label for label, _ in rows] == labels
        assert [cell == "–" for _, cell in rows] == [label in dashes for label in labels]


def test_too_little_time_for_the_tests(marked_tests):
    report = gpu_tests.run_gpu_tests(marked_tests, seconds=0)
    assert report.failed == ["all tests: not finished within 0 s"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_make_gpu_without_a_gpu(capsys):
    assert gpu.main([]) == 2
    assert "sees no CUDA device" in capsys.readouterr().err


def allocate_too_much(images, texts, labels):
    return torch.empty(10**16)


def test_reasons_of_dashes():
    """No memory, and no time."""
    rows = [Row("large", allocate_too_much), Row("small", losses.PEERS["clip"]())]
    benchmark = LossBenchmark(rows, dimension=8, device="cpu", rounds=1)
    benchmark.measure([4], deadline=time.monotonic() + 600)
    benchmark.measure([8, 16], deadline=time.monotonic())
    out_of_memory, *no_time = missing_lines(benchmark.results)
    assert re.match("large; B = 4: RuntimeError: .*allocate memory", out_of_memory)
    assert no_time == ["large; small; B = 8, 16: no time left"]
    assert markdown_table(benchmark.results, rows, [4, 8], "memory")[2] == "| large | – | – |"


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
