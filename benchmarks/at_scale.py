"""Results of claims at the size of their papers, which somebody has measured with the commands of a claim."""

import json
import math
from pathlib import Path
from typing import Any

from benchmarks.claim import METRICS, Claim, Scale
from benchmarks.study import RESULTS
from benchmarks.study_tables import format_interval
from vl_plugins.data.files import write_file
from vl_plugins.errors import UserError, one_of

__all__ = ["add_at_scale", "results_at_scale", "scale_of"]

AT_SCALE = RESULTS / "at_scale"


def at_scale_file(claim: str, scale: str) -> Path:
    return AT_SCALE / scale / f"{claim}.json"


def add_at_scale(claim: Claim, scale_name: str, file: Path) -> Path:
    """Check what ``vl-plugins evaluate --json`` printed for a claim, and keep it; return where.

    Raises:
        UserError: the file is no such JSON, or of other methods, another baseline, another protocol or other metrics.
    """
    scale = scale_of(claim, scale_name)
    content = read_evaluation(file)
    protocol = scale.protocol
    if content["baseline"] != scale.baseline:
        raise UserError(
            f"{file}: the baseline is {content['baseline']!r}, but the claim compares with {scale.baseline!r}"
        )
    if protocol not in content["differences"]:
        raise UserError(f"{file} has no differences of the protocol {protocol}: evaluate with --protocol {protocol}")
    differences = content["differences"][protocol]
    expected = set(scale.train) - {scale.baseline}
    if set(differences) != expected:
        raise UserError(
            f"{file} compares {', '.join(sorted(differences))}, but the claim is about {', '.join(sorted(expected))}"
        )
    for method, of_method in differences.items():
        for metric in sorted({comparison.metric for comparison in claim.comparisons}):
            check_difference(f"{file}: {method}, {metric}", of_method.get(metric))
    target = at_scale_file(claim.name, scale_name)
    target.parent.mkdir(parents=True, exist_ok=True)
    kept = {"claim": claim.name, "scale": scale_name, "protocol": protocol, "commands": scale.commands()} | content
    write_file(target, f"{json.dumps(kept, indent=1)}\n".encode())
    return target


def read_evaluation(file: Path) -> dict[str, Any]:
    """Read what ``vl-plugins evaluate --json`` printed for several models."""
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read as JSON: {error}") from error
    types = {"results": list, "baseline": str, "differences": dict}
    for key, kind in types.items():
        if not isinstance(content, dict) or not isinstance(content.get(key), kind):
            raise UserError(f"{file} is not what `vl-plugins evaluate --json` prints for several models: no {key}")
    for protocol in content["differences"].values():
        if not isinstance(protocol, dict) or not all(isinstance(of_method, dict) for of_method in protocol.values()):
            raise UserError(f"{file}: differences are not those of protocols and models")
    return content


def check_difference(place: str, difference: Any) -> None:
    """Check an interval that somebody sent."""
    keys = ("value", "baseline", "low", "high", "difference")
    if not isinstance(difference, dict) or not all(is_finite(difference.get(key)) for key in keys):
        raise UserError(f"{place}: expected the numbers {', '.join(keys)}")
    mean = difference["value"] - difference["baseline"]
    if not difference["low"] <= mean <= difference["high"] or abs(mean - difference["difference"]) > 1e-6:
        raise UserError(f"{place}: the difference is not inside its interval, or not that of its two values")


def is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def scale_of(claim: Claim, name: str) -> Scale:
    if not claim.at_scale:
        raise UserError(f"the claim {claim.name} has no configurations of its paper")
    return claim.at_scale[one_of("--scale", name, tuple(claim.at_scale))]


def results_at_scale(claim: Claim, scale_name: str) -> str:
    """Return what somebody measured at the size of the paper; empty if nobody has."""
    file = at_scale_file(claim.name, scale_name)
    if not file.is_file():
        return ""
    content = json.loads(file.read_text())
    lines = [f"At the size of {scale_name} ([JSON](studies/at_scale/{scale_name}/{claim.name}.json)):", ""]
    for method, of_method in content["differences"][content["protocol"]].items():
        for metric in sorted({comparison.metric for comparison in claim.comparisons}):
            difference = of_method[metric]
            interval = format_interval(difference["difference"], difference["low"], difference["high"])
            lines.append(f"- `{method}` against `{content['baseline']}`, {METRICS[metric]}: {interval}")
    return "\n".join(lines)
