"""Commands in forked processes: a parent has imported torch and the package, so that each takes milliseconds."""

import contextlib
import importlib
import multiprocessing
import os
import resource
import signal
import sys
import traceback
from pathlib import Path
from typing import NamedTuple

import torch

__all__ = ["LAUNCH", "OURS", "TRAIN_TOWERS", "Finished", "forked"]

OURS = "vl_plugins.cli"
LAUNCH = "vl_plugins.integrations.open_clip.launcher"
TRAIN_TOWERS = "vl_plugins.integrations.pytorch_metric_learning.command_line"
MODULES = (OURS, LAUNCH, TRAIN_TOWERS, "vl_plugins.integrations.open_clip.train", "matplotlib.figure")
MODULES += ("vl_plugins.integrations.pytorch_metric_learning.run", "safetensors.torch", "transformers")
SECONDS, MEGABYTES = 60, 1000  # of the processor; and beyond the memory of the parent


class Finished(NamedTuple):
    """Exit status, negative for a signal; standard output and error; and megabytes at most beyond the parent's."""

    status: int
    output: str
    error: str
    megabytes: float


@contextlib.contextmanager
def forked(method="forkserver"):
    """Yield a function ``(folder, module, arguments, **variables) -> Finished`` that runs ``module.main(arguments)``.

    Args:
        method: how the parent is started; ``"spawn"`` takes over the environment of this process as it is now.

    With the variable ``KILL_WORKERS`` all processes that the command forks are killed at once.
    """
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context(method).Process(target=_serve, args=(theirs,))
    process.start()
    theirs.close()  # so that its end is noticed

    def run(folder, module, arguments, **variables):
        ours.send((str(folder), module, arguments.split(), variables))
        status, megabytes = ours.recv()
        texts = (Path(folder, name).read_bytes().decode(errors="replace") for name in ("output", "error"))
        return Finished(status, *texts, megabytes)

    yield run
    ours.send(None)
    process.join()


def _serve(connection):
    multiprocessing.set_start_method("fork", force=True)  # for loaders
    torch.set_num_threads(1)
    for module in MODULES:
        importlib.import_module(module)
    while (case := connection.recv()) is not None:
        before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
        child = os.fork()
        if not child:
            _run(*case)
        status, usage = os.wait4(child, 0)[1:]
        connection.send((os.waitstatus_to_exitcode(status), usage.ru_maxrss / 2**10 - before / 2**20))


def _run(folder, module, arguments, variables):
    status = 1
    try:
        os.chdir(folder)
        os.environ |= variables
        sys.path.insert(0, folder)  # as with `python -m`
        for number, name in enumerate(("/dev/null", "output", "error")):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
        used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_DATA, (used + MEGABYTES * 2**20,) * 2)
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS,) * 2)
        if "KILL_WORKERS" in variables:
            os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGKILL))
        signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it is ignored
        signal.alarm(3 * SECONDS)
        status = importlib.import_module(module).main(arguments)
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status or 0)
