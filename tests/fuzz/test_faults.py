"""Commands meet a full disk, a broken one, or a signal at one of their writes, and then run again to the same end."""

import shutil
import signal
import subprocess
from errno import EIO, ENOSPC

import pytest
import torch

from tests.fuzz.forked import LAUNCH, OURS, TRAIN_TOWERS, forked
from tests.helpers.open_clip_training import assert_equal_nested

# A fault is an errno, or the negative number of a signal.
LIBRARY = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static int fails(int file) {
    static long number;
    struct stat status;
    const char *at = getenv("FAULT_AT"), *restarts = getenv("TORCHELASTIC_RESTART_COUNT");
    if (!at || (restarts && atol(restarts)) || file < 3) return 0;
    if (fstat(file, &status) || !S_ISREG(status.st_mode) || ++number < atol(at)) return 0;
    int fault = atoi(getenv("FAULT"));
    if (number > atol(at) && fault < 0) return 0;
    if (fault < 0) { kill(getpid(), -fault); return 0; }
    errno = fault;
    return 1;
}
#define WRITE(name, parameters, arguments) ssize_t name parameters { \
    return fails(file) ? -1 : ((ssize_t (*) parameters) dlsym(RTLD_NEXT, #name)) arguments; }
WRITE(write, (int file, const void *data, size_t size), (file, data, size))
WRITE(writev, (int file, const struct iovec *data, int count), (file, data, count))
WRITE(pwrite64, (int file, const void *data, size_t size, off_t place), (file, data, size, place))
"""
COMMANDS = {
    "shards": (OURS, "shards coco --annotations karpathy.json --images scenes --samples-per-shard 2 --out out"),
    "encode": (OURS, "encode logs/new shards/new/toy-train-000000.tar out/new.npz --workers 0 --device cpu"),
    "report": (OURS, "evaluate --features features/set.npz --report out/report.html"),
    "plot": (OURS, "plot training runs/pictures --out out/training.png"),
    "open_clip": (LAUNCH, "--config open_clip.yaml --logs out --name run --epochs 2 --resume latest"),
    "towers": (TRAIN_TOWERS, "--config pml.yaml --device cpu --out out --resume --set training.epochs=2"),
}
RESULTS = ("*.tar", "*.jsonl", "*.npz", "*.html", "*.png", "*.pt", "sizes.json")
FAULTS = {"full": ENOSPC, "broken": EIO, "SIGTERM": -signal.SIGTERM, "SIGINT": -signal.SIGINT}
STATUSES = {ENOSPC: 2, EIO: 2, -signal.SIGTERM: -signal.SIGTERM, -signal.SIGINT: 130}


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    file = tmp_path_factory.mktemp("library") / "faults.so"
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(file), "-ldl"]
    subprocess.run(command, input=LIBRARY, text=True, check=True)
    return str(file)


@pytest.fixture(scope="module")
def run_with_faults(library):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LD_PRELOAD", library)
        with forked("spawn") as run:
            yield run


def contents(folder):
    """Return the results in a folder by name: tensors of checkpoints, and bytes of other files."""
    files = {file for pattern in RESULTS for file in folder.rglob(pattern) if ".partial" not in str(file)}
    read = {True: lambda file: torch.load(file, weights_only=True), False: lambda file: file.read_bytes()}
    return {str(file.relative_to(folder)): read[file.suffix == ".pt"](file) for file in sorted(files)}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", COMMANDS)
def test_nothing_half_written_and_the_same_end(name, fault, whole, run_with_faults, tmp_path):
    (module, command), fault = COMMANDS[name], FAULTS[fault]
    folder = shutil.copytree(whole, tmp_path / "files")
    assert run_with_faults(folder, module, command).status == 0
    expected = contents(folder / "out")
    assert expected
    statuses = set()
    for write in (1, 3, 8, 30, 100):
        shutil.rmtree(folder / "out")
        finished = run_with_faults(folder, module, command, FAULT=str(int(fault)), FAULT_AT=str(write))
        print(write, finished)
        statuses.add(finished.status)
        found = contents(folder / "out")  # which can be read, and is that of the end but for `latest.pt` and such
        if name == "towers" and finished.status:
            found = {}
        assert_equal_nested(found, {file: expected[file] for file in (found if finished.status else expected)})
        finished = run_with_faults(folder, module, command)
        assert finished.status == 0, finished
        assert_equal_nested(contents(folder / "out"), expected)
    assert statuses <= {0, STATUSES[fault]}  # 0 without so many writes, or after one to a log
    assert STATUSES[fault] in statuses
