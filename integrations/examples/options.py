"""The command line of the examples."""

import argparse
from collections.abc import Callable, Sequence

from torch import Tensor

from vl_plugins.functional import goal_loss, triplet_hn_loss, triplet_sh_loss, unified_loss, vlc_loss

__all__ = ["LOSSES", "parse_arguments"]

# Functions of the similarities, of which pairs are positive, and of which are negative.
LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "goal": goal_loss,
    "triplet_hn": triplet_hn_loss,
    "triplet_sh": triplet_sh_loss,
    "unified": unified_loss,
    "vlc": vlc_loss,
}


def parse_arguments(argv: Sequence[str], description: str, steps: int) -> argparse.Namespace:
    """Return ``loss``, ``steps`` and ``seed`` of a command line; ``steps`` is the default."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--loss", choices=LOSSES, default="unified", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=steps, help="training steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of data and weights (default: %(default)s)")
    return parser.parse_args(argv)
