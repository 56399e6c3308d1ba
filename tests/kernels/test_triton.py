import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from vl_plugins.kernels.pairs import equal_label_pairs
from vl_plugins.kernels.vectors import compare

triton = pytest.importorskip("triton")

from vl_plugins.kernels import triton_log_sum_exp, triton_mining, triton_sets, triton_tiles  # noqa: E402

ROOT = Path(__file__).parents[2]
WIDTHS = (0, 1, 5, 16, 17, 40, 64, 500, 512, 768, 1024)

# What one program can have, by compute capability. The least of all later ones is 99 KB, of 8.6.
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024}


@pytest.mark.skipif(triton.__version__.startswith("2."), reason="the kernels are for Triton 3 and later")
def test_interpreted():
    """All kernels on the CPU, by Triton's interpreter, which needs a process of its own."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/kernels/triton_interpreted"]
    # Without plugins it starts in half the time.
    settings = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment = os.environ | settings | {"PYTEST_ADDOPTS": "", "PYTEST_PLUGINS": ""}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stdout + run.stderr
    assert int(re.search(r"(\d+) passed", run.stdout)[1]) > 40


@pytest.mark.parametrize("dtype", triton_tiles.SUPPORTED_TYPES, ids=str)
def test_block_sizes(dtype):
    for width in WIDTHS:
        blocks = triton_tiles.block_sizes(width, dtype)
        # the least of a product, and powers of two
        assert blocks.depth >= 16
        assert all(size & (size - 1) == 0 for size in blocks[:4])
        assert (blocks.rows + blocks.columns) * blocks.depth * dtype.itemsize * blocks.stages <= 99 * 1024
        # accumulators take at most half of the 255 registers of each thread
        assert blocks.rows * blocks.columns / (32 * blocks.warps) <= 127
        if width % 16 == 0:
            assert blocks.depth >= min(width, 32)


@pytest.mark.parametrize("count", [1, 16, 17, 1000])
@pytest.mark.parametrize("bytes_per_row", [1, 2.5, 1000, 10**9])
def test_row_slices(count, bytes_per_row, monkeypatch):
    monkeypatch.setattr(triton_tiles, "WORKSPACE_BYTES", 10**5)
    parts = list(triton_tiles.row_slices(count, bytes_per_row, 16))
    assert [row for part in parts for row in range(part.start, part.stop)] == list(range(count))
    lengths = [part.stop - part.start for part in parts]
    assert all(length == lengths[0] and length % 16 == 0 for length in lengths[:-1])
    assert lengths[0] <= max(16, 10**5 / bytes_per_row)
    if bytes_per_row == 1000 and count == 1000:
        assert lengths == [96] * 10 + [40]  # not 62 parts of the least size


def test_partials_fit_into_the_workspace():
    # the maxima and sums of all rows in all blocks of columns and the other way round
    blocks = triton_tiles.Blocks(128, 64, 32, 8, 2)
    total = 2 * 4 * (4096 * (6400 // 64) + 6400 * (4096 // 128))
    assert 4096 * triton_tiles.partials_bytes(6400, blocks) == total


class Target:
    """A device that there need not be, to compile for."""

    def __init__(self, capability):
        self.capability = capability

    def get_current_target(self):
        return triton.backends.compiler.GPUTarget("cuda", self.capability, 32)

    def get_current_device(self):
        return self.capability

    def get_current_stream(self, device):
        return 0


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """Function that lets all launches only compile, for a compute capability; returns the list of what is compiled."""
    objdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not objdump.is_file():
        pytest.skip("this Triton has no cuobjdump")
    kernels = []
    run = triton.runtime.jit.JITFunction.run

    def compile_only(function, *arguments, grid, warmup, **options):
        kernel = run(function, *arguments, grid=grid, warmup=True, **options)
        file = tmp_path / "kernel.cubin"
        file.write_bytes(kernel.asm["cubin"])
        usage = subprocess.run([objdump, "--dump-resource-usage", file], check=True, capture_output=True, text=True)
        numbers = {name: int(number) for name, number in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage.stdout)}
        kernels.append((kernel.metadata.name, kernel.metadata.shared, numbers, kernel.asm["ptx"]))

    def compile_for(capability):
        monkeypatch.setattr(triton.runtime.driver, "_active", Target(capability))
        monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", compile_only)
        # It would look for the indices that no kernel has written.
        monkeypatch.setattr(triton_mining, "_first_largest", lambda values, index: (values[0], index[0].long()))
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
        return kernels

    return compile_for


def launch_of_vectors(dtype, *, width=512, symmetric=True, normalize=True):
    labels = torch.arange(5)
    x = torch.ones(5, width, dtype=dtype)
    comparison = compare(x, x, labels, labels, equal_label_pairs(labels, labels), normalize=normalize)
    triton_mining.hardest_negatives(comparison, symmetric=symmetric)
    kept = triton_log_sum_exp.log_sum_exps(comparison, 20.0, symmetric=symmetric, keep=False)
    gradients = [torch.zeros(5, width) for _ in range(2)]
    triton_log_sum_exp.log_sum_exp_gradients(
        comparison, 20.0, kept, kept.rows, kept.columns, kept.positives, *gradients
    )


def launch_of_sets(dtype, *, width=512, elements=(4, 4), normalize=True):
    x, y = (torch.ones(5, count, width, dtype=dtype) for count in elements)
    upstream = triton_sets.similarities(x, y, None, None, 16.0, normalize)
    triton_sets.gradients(x, y, None, None, 16.0, normalize, upstream, (True, True))


def check(kernels, capability, names, *, product):
    assert {name for name, *_ in kernels} == names
    for name, shared, numbers, code in kernels:
        # Registers that do not suffice are spilled to the stack.
        assert numbers["STACK"] == numbers["LOCAL"] == 0, (name, numbers)
        assert 0 < numbers["REG"] <= 255
        assert shared <= SHARED_BYTES[capability], name
        assert product in code, name


OF_VECTORS = {"_search_tiles", "_sum_tiles", "_write_gradients"}
OF_SETS = {"_pool_tile", "_derive_tile"}


@pytest.mark.slow
def test_kernels_of_vectors_compile_for_hopper(compiled):
    kernels = compiled(90)
    launch_of_vectors(torch.bfloat16)
    check(kernels, 90, OF_VECTORS, product="wgmma.mma_async.sync.aligned.m64n")


EXACT = (torch.float32, "ieee")
TYPES = [(torch.bfloat16, "ieee"), EXACT, (torch.float32, "tf32")]
VARIANTS = [
    ({"width": 768}, {"width": 768}),
    ({"width": 64, "normalize": False, "symmetric": False}, {"width": 64, "normalize": False, "elements": (7, 1)}),
    ({"width": 77}, {"width": 77, "elements": (3, 5)}),
    ({"width": 5}, {"width": 5, "elements": (16, 16)}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "precision", "options"),
    [(torch.float16, "ieee", VARIANTS[0]), *((*of_type, options) for of_type in TYPES for options in VARIANTS)],
    ids=str,
)
@pytest.mark.parametrize("capability", [80, 90])
def test_all_kernels_compile_without_spills(compiled, monkeypatch, capability, dtype, precision, options):
    monkeypatch.setattr(triton_tiles, "_precision", lambda: precision)
    kernels = compiled(capability)
    of_vectors, of_sets = options
    launch_of_vectors(dtype, **of_vectors)
    launch_of_sets(dtype, **of_sets)
    product = "fma.rn.f32" if (dtype, precision) == EXACT else {80: "mma.sync", 90: "wgmma"}[capability]
    check(kernels, capability, OF_VECTORS | OF_SETS, product=product)
