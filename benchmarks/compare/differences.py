"""Differences between the results of two versions."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.compare.recording import ERROR

Results = Mapping[str, Mapping[str, Any]]  # quantities by name, by case


@dataclass
class Group:
    """Cases whose names begin alike.

    Attributes:
        cases: number of cases.
        errors: number of cases that end in an error in the old version.
        largest: largest difference of any quantity, relative to its largest entry or to 1 if that is smaller.
        differences: a line for each case and quantity that differs by more than the tolerance.
    """

    cases: int = 0
    errors: int = 0
    largest: float = 0.0
    differences: list[str] = field(default_factory=list)


def compare(old: Results, new: Results, tolerance: float) -> dict[str, Group]:
    """Return the groups of cases with their differences."""
    groups: dict[str, Group] = {}
    for case in {**old, **new}:
        group = groups.setdefault(case.split("/")[0], Group())
        group.cases += 1
        if case not in new or case not in old:
            version = "old" if case in old else "new"
            group.differences.append(f"{case}: only in the {version} version")
            continue
        group.errors += ERROR in old[case]
        for name in {**old[case], **new[case]}:
            distance, text = difference(old[case].get(name), new[case].get(name), name)
            group.largest = max(group.largest, distance)
            if distance > tolerance:
                group.differences.append(f"{case}, {name}: {text}")
    return groups


def difference(old: Any, new: Any, name: str) -> tuple[float, str]:
    """Return the relative difference of two quantities, infinite where they are no numbers, and a text about it."""
    if isinstance(old, (int, float)) and isinstance(new, (int, float)):
        old, new = torch.tensor(old, dtype=torch.float64), torch.tensor(new, dtype=torch.float64)
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        if old.shape != new.shape or old.dtype != new.dtype:
            shapes = f"{old.dtype} {tuple(old.shape)}, now {new.dtype} {tuple(new.shape)}"
            return math.inf, shapes
        return difference_of_tensors(old, new)
    is_equal = old == new
    if name == ERROR and old is not None and new is not None:  # messages may change
        is_equal = old.split(":")[0] == new.split(":")[0]
    if is_equal:
        return 0.0, ""
    return math.inf, f"{shorten(old)}, now {shorten(new)}"


def difference_of_tensors(old: Tensor, new: Tensor) -> tuple[float, str]:
    """Return the largest difference of two entries, relative to the largest entry of the old tensor or to 1."""
    old, new = old.double(), new.double()
    is_equal = (old == new) | (old.isnan() & new.isnan())
    if is_equal.all():
        return 0.0, ""
    distances = (old - new).abs()[~is_equal].nan_to_num(nan=math.inf, posinf=math.inf)
    absolute = distances.max().item()
    finite = old[old.isfinite()].abs()
    size = max(1.0, finite.max().item()) if finite.numel() else 1.0
    return absolute / size, f"{int((~is_equal).sum())} of {old.numel()} entries, by at most {absolute:.1e}"


def shorten(value: Any) -> str:
    """Return a value for a line of a report."""
    text = "missing" if value is None else repr(value)
    return text if len(text) <= 80 else text[:80] + "..."
