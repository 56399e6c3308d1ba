"""What a study asks for, its runs and their commands, and the results that are there."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from benchmarks.outcomes import Outcome
from vl_plugins.errors import UserError

__all__ = ["Cell", "Results", "Run", "Study", "Trainer"]

FIRST_RATES = 3


class Run(NamedTuple):
    """One training of a study."""

    regime: str
    method: str
    rate: str
    seed: int

    @property
    def path(self) -> Path:
        return Path(self.regime) / self.method / f"lr{self.rate}-seed{self.seed}"


@dataclass(frozen=True)
class Cell:
    """Methods that are compared in a regime.

    Attributes:
        regime: its name.
        baseline: the method that the others are compared with.
        methods: the others.
        seeds: how many trainings of each method at its best rate.
    """

    regime: str
    baseline: str
    methods: list[str]
    seeds: int = 3

    @property
    def all_methods(self) -> list[str]:
        return [self.baseline, *self.methods]


@dataclass
class Trainer:
    """A training command with the flags of its methods."""

    train: str
    encode: str
    methods: dict[str, Any]


@dataclass
class Study:
    """What a study's file says.

    Attributes:
        data: what is trained on, in words.
        prepare: commands that write data and the checkpoints to start from.
        rates: all learning rates that may be tried, from the lowest to the highest.
        trainers: by name.
        regimes: by name, with the keys that may stand in {} in commands; ``trainer``, ``epochs`` and ``first_rate``
            are needed.
        cells: what is compared, the most urgent first.
        tuning_seed: the seed whose RSUM on validation decides on the rate.
        samples: by name, runs (regime, method, seed) at their best rate, which somebody may repeat to see whether the
            results hold elsewhere.
    """

    data: str
    prepare: list[str]
    rates: list[str]
    trainers: dict[str, Trainer]
    regimes: dict[str, dict[str, Any]]
    cells: list[Cell]
    tuning_seed: int = 0
    samples: dict[str, list[tuple[str, str, int]]] = field(default_factory=dict)

    @classmethod
    def read(cls, file: Path) -> "Study":
        """Read a YAML file."""
        content = yaml.safe_load(file.read_text())
        content["trainers"] = {name: Trainer(**trainer) for name, trainer in content["trainers"].items()}
        content["cells"] = [Cell(**cell) for cell in content["cells"]]
        study = cls(**content)
        for cell in study.cells:
            for method in cell.all_methods:
                if method not in study.trainer_of(cell.regime).methods:
                    raise UserError(f"{file}: the method {method} of regime {cell.regime} has no flags")
        return study

    def trainer_of(self, regime: str) -> Trainer:
        return self.trainers[self.regimes[regime]["trainer"]]

    def epochs(self, regime: str, method: str) -> int:
        """Return how long a method is trained: the epochs of its regime times its own ``length``."""
        return round(self.regimes[regime]["epochs"] * self._options(regime, method).get("length", 1))

    def train_command(self, run: Run, work: Path) -> str:
        keys = self.regimes[run.regime] | run._asdict() | {"lr": run.rate, "work": work, "folder": work / run.path}
        keys["epochs"] = self.epochs(run.regime, run.method)
        # Twice, because flags of the regime and of the method have keys too.
        keys["method_flags"] = self._options(run.regime, run.method)["flags"].format(**keys)
        keys["flags"] = str(keys.get("flags", "")).format(**keys)
        return self.trainer_of(run.regime).train.format(**keys)

    def encode_command(self, run: Run, work: Path, split: str) -> str:
        folder = work / run.path
        keys = self.regimes[run.regime] | {"work": work, "folder": folder, "split": split}
        return self.trainer_of(run.regime).encode.format(**keys, features=folder / f"{split}.safetensors")

    def _options(self, regime: str, method: str) -> dict[str, Any]:
        flags = self.trainer_of(regime).methods[method]
        return flags if isinstance(flags, dict) else {"flags": flags}


class Results:
    """The outcomes of a study: those of the files in a folder."""

    def __init__(self, study: Study, folder: Path):
        self.study, self.folder = study, folder
        self._outcomes: dict[Run, Outcome] = {}

    def kept_command(self, run: Run) -> str:
        """Return the training command as it is kept, without the name of a folder of this machine."""
        return self.study.train_command(run, Path("WORK"))

    def file(self, run: Run) -> Path:
        return self.folder / run.path.with_suffix(".npz")

    def has(self, run: Run) -> bool:
        return run in self._outcomes or self.file(run).is_file()

    def outcome(self, run: Run) -> Outcome:
        """Return what a run gave.

        Raises:
            UserError: its file was made by another command.
        """
        if run not in self._outcomes:
            file = self.file(run)
            outcome = Outcome.load(file)
            command = self.kept_command(run)
            if outcome.command != command:
                raise UserError(
                    f"{file} was made by another command: delete it to train again, or restore it\n"
                    f"  the file: {outcome.command}\n  the study: {command}"
                )
            self._outcomes[run] = outcome
        return self._outcomes[run]

    def hours(self, regimes: Collection[str] | None = None, methods: Collection[str] | None = None) -> float:
        """Return the processor time of all runs, with their evaluation, or of those of some regimes and methods."""
        seconds = 0.0
        for run in self.all_runs():
            if (regimes is None or run.regime in regimes) and (methods is None or run.method in methods):
                seconds += self.outcome(run).all_seconds
        return seconds / 3600

    def missing(self, cell: Cell, method: str) -> list[Run]:
        """Return the runs that a method needs next: at rates to choose from, or of the seeds at the best one."""
        tuning = self._tuning_runs(cell.regime, method, self._tried_rates(cell.regime, method))
        missing = [run for run in tuning if not self.has(run)]
        if missing:
            return missing
        return [run for run in self.runs(cell, method) if not self.has(run)]

    def rate(self, regime: str, method: str) -> str:
        """Return the learning rate with the highest RSUM on validation."""
        return self._best_rate(regime, method, self._tried_rates(regime, method))

    def is_at_edge(self, regime: str, method: str) -> bool:
        """Whether the best learning rate is the lowest or highest of all that may be tried."""
        return self.rate(regime, method) in (self.study.rates[0], self.study.rates[-1])

    def runs(self, cell: Cell, method: str) -> list[Run]:
        """Return the runs of a method at its best rate."""
        rate = self.rate(cell.regime, method)
        return [Run(cell.regime, method, rate, seed) for seed in range(cell.seeds)]

    def is_complete(self, cell: Cell, method: str) -> bool:
        return not self.missing(cell, method)

    def outcomes(self, cell: Cell, method: str) -> list[Outcome]:
        return [self.outcome(run) for run in self.runs(cell, method)]

    def seed_outcomes(self, regime: str, method: str) -> list[Outcome]:
        """Return the outcomes of all seeds of a method at its best rate.

        None before all of them are there, and of a regime that the study does not have.
        """
        if regime not in self.study.regimes:
            return []
        for cell in self.study.cells:
            if cell.regime == regime and method in cell.all_methods:
                return self.outcomes(cell, method) if self.is_complete(cell, method) else []
        raise UserError(f"no cell of the study has the method {method} in the regime {regime}")

    def all_runs(self) -> Iterator[Run]:
        """Yield all runs that the study asks for and that are there."""
        seen = set()
        for cell in self.study.cells:
            for method in cell.all_methods:
                runs = self._tuning_runs(cell.regime, method, self._tried_rates(cell.regime, method))
                if all(map(self.has, runs)):
                    runs += self.runs(cell, method)
                for run in runs:
                    if run not in seen and self.has(run):
                        seen.add(run)
                        yield run

    def _tried_rates(self, regime: str, method: str) -> list[str]:
        """Return the rates to try, from the lowest to the highest, as far as results say."""
        rates = self.study.rates
        first = rates.index(self.study.regimes[regime]["first_rate"])
        last = first + FIRST_RATES - 1
        while True:
            tried = rates[first : last + 1]
            if not all(map(self.has, self._tuning_runs(regime, method, tried))):
                return tried
            best = self._best_rate(regime, method, tried)
            if best == tried[0] and first > 0:
                first -= 1
            elif best == tried[-1] and last < len(rates) - 1:
                last += 1
            else:
                return tried

    def _tuning_runs(self, regime: str, method: str, rates: list[str]) -> list[Run]:
        return [Run(regime, method, rate, self.study.tuning_seed) for rate in rates]

    def _best_rate(self, regime: str, method: str, rates: list[str]) -> str:
        runs = self._tuning_runs(regime, method, rates)
        return max(runs, key=lambda run: self.outcome(run).val["rsum"]).rate
