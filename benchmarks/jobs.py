"""Commands of this package in processes of their own, several at a time, that skip most imports.

Each process is a fork of a server that has imported the packages, so a short training is not dominated by imports.
"""

import contextlib
import os
import runpy
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any

from vl_plugins.errors import UserError

__all__ = ["Jobs", "processor_seconds", "run_command", "run_once"]

IMPORTED = [
    "torch",
    "open_clip_train.main",
    "scipy.stats",
    "transformers",
    "accelerate",
    "vl_plugins.cli",
    "vl_plugins.commands.encode",
    "vl_plugins.integrations.encoding",
    "vl_plugins.integrations.open_clip.train",
    "vl_plugins.integrations.pytorch_metric_learning.run",
    "vl_plugins.retrieval.protocols",
]


class Jobs:
    """Function calls in processes, at most ``at_once`` at a time.

    A call whose process fails ends in a :class:`UserError` with the end of its log; the other calls go on to their end.
    """

    def __init__(self, at_once: int):
        # Two processes on two cores disturb each other less than two threads each, and sums keep their order.
        os.environ["OMP_NUM_THREADS"] = "1"
        self.context = get_context("forkserver")
        self.context.set_forkserver_preload(IMPORTED)
        self.at_once = at_once
        self.running: dict[Any, tuple[Any, Any, Path]] = {}

    @property
    def is_full(self) -> bool:
        return len(self.running) >= self.at_once

    def start(self, name: Any, log: Path, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function in a process, with its output in ``log``."""
        log.parent.mkdir(parents=True, exist_ok=True)
        process = self.context.Process(target=_call, args=(log, function, arguments))
        process.start()
        self.running[process.sentinel] = name, process, log

    def wait(self) -> Any:
        """Wait until a call ends; return its name."""
        sentinel = connection.wait(list(self.running))[0]
        name, process, log = self.running.pop(sentinel)
        process.join()
        if process.exitcode:
            raise UserError(f"{name} failed; {log} ends with:\n{log.read_text()[-1500:]}")
        return name

    def stop(self) -> None:
        """End all calls that are running."""
        for _, process, _ in self.running.values():
            process.terminate()
            process.join()
        self.running.clear()


def _call(log: Path, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    with log.open("a", buffering=1) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            function(*arguments)
        except UserError as error:  # the log says it already
            sys.exit(str(error))


def run_command(command: str) -> None:
    """Run ``vl-plugins ...`` or ``python -m MODULE ...`` in this process.

    Raises:
        UserError: its exit status is not 0.
    """
    program, *words = shlex.split(command)
    if program == "python":
        _, module, *words = words
    else:
        module = "vl_plugins.cli"
    status: Any = None
    with _command_line(module, words):
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as exit_:
            status = exit_.code
    if status:
        raise UserError(f"exit status {status} of: {command}")


@contextlib.contextmanager
def _command_line(module: str, words: list[str]) -> Iterator[None]:
    before, sys.argv = sys.argv, [module, *words]
    try:
        yield
    finally:
        sys.argv = before


def run_once(command: str, folder: Path) -> None:
    """Run a command unless ``folder`` says that it has been run; what an interrupted one left is deleted."""
    done = folder / "done"
    if done.exists() and done.read_text() == command:
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    run_command(command)
    done.write_text(command)


def processor_seconds() -> float:
    """Return the processor time of this process and of its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
