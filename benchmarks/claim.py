"""The claims of the papers, as the files of ``benchmarks/claims`` have them."""

from dataclasses import dataclass, field
from pathlib import Path

import yaml

from vl_plugins.errors import one_of

__all__ = ["CLAIMS", "METRICS", "Claim", "Comparison", "Scale", "find_claim", "read_claims"]

CLAIMS = Path("benchmarks/claims")

EXPECTATIONS = ("above", "below", "equal")

# How the page names metrics, with their units.
METRICS = {
    "rsum": "RSUM",
    "image_to_text_R@1": "R@1 i2t",
    "text_to_image_R@1": "R@1 t2i",
    "image_circular_variance": "circular variance of images' sets",
}


@dataclass(frozen=True)
class Comparison:
    """A method against a baseline in a regime of a study.

    Attributes:
        regime, method, baseline: names in the study.
        expected: ``above``, ``below`` or ``equal``, what the claim says about the method.
        metric: what is compared.
        within: for ``equal``, the difference that does not matter.
        baseline_regime: that of the baseline, where it is another one, such as a longer training.
        study: the study that trains the runs, and so the kind of data.
    """

    regime: str
    method: str
    baseline: str
    expected: str = "above"
    metric: str = "rsum"
    within: float = 0.0
    baseline_regime: str = ""
    study: str = "claims"

    def __post_init__(self) -> None:
        one_of("expected", self.expected, EXPECTATIONS)
        one_of("metric", self.metric, tuple(METRICS))

    @property
    def text(self) -> str:
        relation = {"above": ">", "below": "<", "equal": "="}[self.expected]
        where = f" of {self.baseline_regime}" if self.baseline_regime else ""
        return f"`{self.method}` {relation} `{self.baseline}`{where}"

    @property
    def is_of_runs(self) -> bool:
        """Whether the metric is one number of each run, and not of each test image."""
        return self.metric.endswith("_variance")

    @property
    def methods(self) -> tuple[str, str]:
        return self.method, self.baseline

    @property
    def regimes(self) -> tuple[str, str]:
        """Those of the method and of the baseline."""
        return self.regime, self.baseline_regime or self.regime


@dataclass(frozen=True)
class Scale:
    """How to run a claim with the configurations of its paper.

    Attributes:
        protocol: of ``vl-plugins evaluate``.
        shards: the test split.
        checkpoint: the file in a run's folder that is evaluated.
        train: the training command of each method, with {seed} and the run's folder {run}.
        baseline: the method that the others are compared with.
        seeds: how many.
    """

    protocol: str
    shards: str
    checkpoint: str
    train: dict[str, str]
    baseline: str
    seeds: int = 3

    def commands(self) -> list[str]:
        """Return all commands, the evaluation last."""
        commands, checkpoints = [], []
        for method, command in self.train.items():
            for seed in range(self.seeds):
                run = f"runs/{method}-{seed}"
                commands.append(command.format(seed=seed, run=run))
                checkpoints.append(f"{method}={run}/{self.checkpoint}")
        commands.append(
            f"vl-plugins evaluate --checkpoint {' '.join(checkpoints)} --shards '{self.shards}' "
            f"--protocol {self.protocol} --baseline {self.baseline} --json"
        )
        return commands


@dataclass(frozen=True)
class Claim:
    """What a paper claims, and how it is checked.

    Attributes:
        name: that of its file.
        title: in a few words.
        says: the claim, in our words.
        source: the paper, and the place in it.
        comparisons: what has to hold, on each kind of data that has any.
        rule: of a verdict, in words.
        note: what a reader should know about the result.
        at_scale: by the name of the data set, how to run it with the configurations of the paper.
    """

    name: str
    title: str
    says: str
    source: str
    comparisons: list[Comparison]
    rule: str = "all comparisons must be reproduced"
    note: str = ""
    at_scale: dict[str, Scale] = field(default_factory=dict)

    @property
    def studies(self) -> list[str]:
        return list(dict.fromkeys(comparison.study for comparison in self.comparisons))

    def of_study(self, study: str) -> list[Comparison]:
        return [comparison for comparison in self.comparisons if comparison.study == study]

    @classmethod
    def read(cls, file: Path) -> "Claim":
        """Read a YAML file."""
        content = yaml.safe_load(file.read_text())
        content["comparisons"] = [Comparison(**comparison) for comparison in content["comparisons"]]
        content["at_scale"] = {name: Scale(**scale) for name, scale in content.get("at_scale", {}).items()}
        return cls(name=file.stem, **content)


def read_claims() -> list[Claim]:
    return [Claim.read(file) for file in sorted(CLAIMS.glob("*.yaml"))]


def find_claim(name: str) -> Claim:
    claims = {claim.name: claim for claim in read_claims()}
    return claims[one_of("--claim", name, tuple(claims))]
