"""Operations and functions of a call, and how often it waits for the device."""

import sys
import warnings
from pathlib import Path

import pytest
import torch

import vl_plugins
from tests.helpers.operations import NEWEST, count
from tests.helpers.processes import in_processes
from vl_plugins import create_loss

# The most operations of a call by labels, by places, and by labels with ids.
LOSSES = [
    ("unified", 69, 59, 89),
    ("vlc", 66, 56, 86),
    ("triplet_hn", 63, 54, 83),
    ("goal", 74, 65, 94),
    ("smooth_chamfer", 252, 245, 267),
    ("siglip", 70, 63, 85),
    ("triplet_sh", 78, 71, 93),
]
WAITS = {"labels": 1, "places": 0, "ids": 2}


@NEWEST
@pytest.mark.parametrize("by", WAITS)
@pytest.mark.parametrize(("name", "by_labels", "by_places", "by_ids"), LOSSES)
def test_few_operations_and_waits(name, by_labels, by_places, by_ids, by):
    operations, waits = count(create_loss(name), (16, 3, 32) if name == "smooth_chamfer" else (64, 32), by)
    assert operations <= {"labels": by_labels, "places": by_places, "ids": by_ids}[by]
    assert waits == WAITS[by]


@NEWEST
def test_few_operations_of_the_terms_of_sets():
    plain, both = (
        create_loss("smooth_chamfer", **options) for options in ({"mmd_weight": 0, "diversity_weight": 0}, {})
    )
    assert count(both, (16, 3, 32))[0] - count(plain, (16, 3, 32))[0] <= 100


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name, *_ in LOSSES])
def test_one_wait_for_a_gpu(name):
    """``nonzero`` finds the pairs of equal labels; its size is known to the device alone."""
    loss, labels = create_loss(name).cuda(), torch.arange(64, device="cuda")
    shape = (64, 3, 32) if name == "smooth_chamfer" else (64, 32)
    sides = [torch.randn(*shape, device="cuda", requires_grad=True) for _ in range(2)]

    def call():
        loss(sides[0], labels, ref_emb=sides[1], ref_labels=labels.clone()).backward()

    call()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([warning for warning in caught if "synchroniz" in str(warning.message)]) == 1


def files_and_functions(call):
    """How many files and functions of this package a call passes, and how many calls of functions it makes."""
    package, functions, calls = Path(vl_plugins.__file__).parent, set(), 0

    def count_call(frame, event, _):
        nonlocal calls
        if event == "call" and frame.f_code.co_filename.startswith(str(package)):
            calls += 1
            functions.add((frame.f_code.co_filename, frame.f_code.co_firstlineno))

    call()  # imports
    sys.setprofile(count_call)
    try:
        call()
    finally:
        sys.setprofile(None)
    return len({file for file, _ in functions}), len(functions), calls


def path_of_unified(rank=0, gathers=False):
    """Of a call by labels, which differ between processes, with its gradients."""
    loss, labels = create_loss("unified", gather_across_devices=gathers), torch.arange(8) + 100 * rank + 1
    images, texts = (torch.randn(8, 16, requires_grad=True) for _ in range(2))
    return files_and_functions(lambda: loss(images, labels, ref_emb=texts, ref_labels=labels.clone()).backward())


@NEWEST  # until torch 2.3, whether autocast is on takes a function of this package
def test_few_files_and_functions_on_the_way_of_a_call():
    files, functions, calls = path_of_unified()
    assert files <= 6
    assert functions <= 35
    for _, _, calls_of_process in in_processes(path_of_unified, 2, True):
        assert calls_of_process <= 2 * calls
