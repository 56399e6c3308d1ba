"""Few rows in which every two values of different factors meet."""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

__all__ = ["covering_rows"]


def covering_rows(
    factors: Mapping[str, Sequence[Any]], is_possible: Callable[[dict[str, Any]], bool]
) -> list[dict[str, Any]]:
    """Return rows with a value of each factor, so that every possible pair of values is in one of them.

    Each row begins with a pair that no row has, and takes for each further factor the value with the most new pairs.

    Args:
        factors: their values.
        is_possible: whether the values of some factors go together.
    """
    missing = []
    for first, second in combinations(factors, 2):
        for value in factors[first]:
            for other in factors[second]:
                if is_possible({first: value, second: other}):
                    missing.append({first: value, second: other})
    rows = []
    while missing:
        row = dict(missing[0])
        for factor, values in factors.items():
            if factor not in row:
                possible = [value for value in values if is_possible({**row, factor: value})]
                row[factor] = max(possible, key=lambda value: _new_pairs({**row, factor: value}, factor, missing))
        missing = [pair for pair in missing if not pair.items() <= row.items()]
        rows.append(row)
    return rows


def _new_pairs(row: dict[str, Any], factor: str, missing: list[dict[str, Any]]) -> int:
    """Return how many missing pairs a row has with one of its factors."""
    return sum(factor in pair and pair.items() <= row.items() for pair in missing)
