import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vl_plugins.kernels import equal_label_pairs
from vl_plugins.kernels.comparison import EmbeddingPair, PairLabels

triton = pytest.importorskip("triton")

from vl_plugins.kernels import triton_hardest_negatives, triton_log_sum_exp, triton_sets, triton_tiles  # noqa: E402

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
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
        target = triton.backends.compiler.GPUTarget("cuda", capability, 32)
        device = SimpleNamespace(  # that there need not be
            get_current_target=lambda: target,
            get_current_device=lambda: capability,
            get_current_stream=lambda device: 0,
        )
        monkeypatch.setattr(triton.runtime.driver, "_active", device)
        monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", compile_only)
        # It would look for the indices that no kernel has written.
        monkeypatch.setattr(
            triton_hardest_negatives, "_first_largest", lambda values, index: (values[0], index[0].long())
        )
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
        return kernels

    return compile_for


def launch_on_vectors(dtype, *, width, symmetric=True, normalize=True):
    labels = torch.arange(5)
    labels = PairLabels(labels, labels, *equal_label_pairs(labels, labels), same_set=False)
    vectors = torch.ones(5, width, dtype=dtype)
    pair = EmbeddingPair.prepare(vectors, vectors, normalize=normalize, keep_half=True)
    triton_hardest_negatives.search(pair, labels, symmetric=symmetric)
    sums = triton_log_sum_exp.log_sum_exps(pair, 20.0, labels, symmetric=symmetric)
    upstream = sums.row_lse, sums.column_lse, sums.positive_similarities
    triton_log_sum_exp.gradients(pair, 20.0, labels, sums, *upstream, (True, True))


def launch_on_sets(dtype, *, width, elements=(4, 4), normalize=True):
    x, y = (torch.ones(5, count, width, dtype=dtype) for count in elements)
    upstream = triton_sets.similarities(x, y, None, None, 16.0, normalize)
    triton_sets.gradients(x, y, None, None, 16.0, normalize, upstream, (True, True))


TYPES = [(torch.float16, "ieee"), (torch.bfloat16, "ieee"), (torch.float32, "ieee"), (torch.float32, "tf32")]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "precision"), TYPES, ids=str)
@pytest.mark.parametrize("capability", [80, 90])
def test_all_kernels_compile_without_spills(compiled, monkeypatch, capability, dtype, precision):
    monkeypatch.setattr(triton_tiles, "_precision", lambda: precision)
    kernels = compiled(capability)
    for width, options, elements in ((768, {}, (4, 4)), (64, {"normalize": False}, (7, 1)), (77, {}, (16, 16))):
        launch_on_vectors(dtype, width=width, symmetric=width != 64, **options)
        launch_on_sets(dtype, width=width, elements=elements, **options)
    names = {"_search_tiles", "_sum_tiles", "_write_gradients", "_pool_tile", "_derive_tile"}
    assert {name for name, *_ in kernels} == names
    product = {80: "mma.sync", 90: "wgmma"}[capability]
    for name, shared, numbers, code in kernels:
        # Registers that do not suffice are spilled to the stack.
        assert numbers["STACK"] == numbers["LOCAL"] == 0, (name, numbers)
        assert 0 < numbers["REG"] <= 255
        assert shared <= SHARED_BYTES[capability], name
        assert ("fma.rn.f32" if (dtype, precision) == (torch.float32, "ieee") else product) in code, name
