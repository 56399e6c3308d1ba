"""What the case files share: they run cases of the version on ``PYTHONPATH``, and save the results.

A case is a function without arguments that returns its quantities by name: tensors, numbers, texts, or bytes, of which
the hash is saved. Its own name is ``group/case``. A case that raises an error has the error as its only quantity.
"""

import argparse
import fnmatch
import hashlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import vl_plugins

ERROR = "error"


@dataclass
class Recorder:
    """The results of cases.

    Attributes:
        pattern: of the names of the cases that run, as in a shell.
        results: quantities by name, by case.
    """

    pattern: str = "*"
    results: dict[str, dict[str, Any]] = field(default_factory=dict)

    def wants(self, case: str) -> bool:
        return fnmatch.fnmatchcase(case, self.pattern)

    def may_want(self, group: str) -> bool:
        """Return False if the pattern leaves out all cases of a group, whose preparation then is not needed."""
        return fnmatch.fnmatchcase(group, self.pattern.split("/")[0])

    def run(self, case: str, compute: Callable[[], Mapping[str, Any]]) -> None:
        """Run a case, unless the pattern leaves it out."""
        if not self.wants(case):
            return
        if case in self.results:
            raise ValueError(f"two cases have the name {case}")
        try:
            quantities = compute()
        except Exception as error:  # the other version has to raise it too
            quantities = {ERROR: f"{type(error).__name__}: {error}"}
        self.add(case, quantities)

    def add(self, case: str, quantities: Mapping[str, Any]) -> None:
        """Add the quantities of a case, as a file can hold them."""
        self.results[case] = {name: storable(value) for name, value in quantities.items()}


def storable(value: Any) -> Any:
    """Return a tensor as a copy without its graph, and bytes as their hash."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, bytes):
        return hashlib.sha256(value).hexdigest()
    return value


def save_cases(run_cases: Callable[[Recorder, argparse.Namespace], None]) -> None:
    """Run the cases of a file in the current folder, and save them, as the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--tree", type=Path, required=True, help="checkout that vl_plugins has to come from")
    parser.add_argument("--cases", default="*", metavar="PATTERN")
    parser.add_argument("--batches", type=Path, help="file of training batches")
    arguments = parser.parse_args()
    if not Path(vl_plugins.__file__).is_relative_to(arguments.tree):
        sys.exit(f"vl_plugins comes from {vl_plugins.__file__}, not from {arguments.tree}")
    torch.set_num_threads(1)
    recorder = Recorder(arguments.cases)
    run_cases(recorder, arguments)
    torch.save(recorder.results, arguments.out)
