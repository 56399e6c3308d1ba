"""``vl-plugins bench``: time and memory of losses beside those of others."""

import argparse
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vl_plugins.benchmarks.names import BACKENDS, DEFAULT_BACKEND, LOSSES, PEERS, SETS
from vl_plugins.utils.errors import UserError, check_name, first_line

if TYPE_CHECKING:
    import torch

    from vl_plugins.benchmarks.measurement import Setting

__all__ = ["register", "run"]

DTYPES = ("float32", "bfloat16", "float16")
DEFAULT_LOSSES = ("unified", "triplet_hn")
DEFAULT_PEERS = (
    "three-products",
    "clip",
    "siglip",
    "triplet-margin",
    "lp-pooling",
    "average-pooling",
    "reshape-and-sum",
)

DESCRIPTION = f"""\
Measure losses, forward and backward, on random unit vectors of B images and B texts: how long they
take and how much memory they need, beside losses of other packages. {SETS}
compares all pairs of B and B sets of --elements vectors.

What computes the same formula has to give the same value and gradients first, otherwise nothing is
measured. In each round everything runs once, in turn, after one round to warm up. Ratios are of the
same round, so that what disturbs the machine for a while disturbs both."""


def _epilog() -> str:
    width = max(map(len, PEERS)) + 2
    peers = "\n".join(f"  {name:{width}}{peer.summary}" for name, peer in PEERS.items())
    return f"""\
peers (those that are not installed, or cannot run here, are named and skipped):
{peers}

columns:
  ms, least, most   of the rounds; on the CPU time of the processor with one thread, otherwise
                    wall time; on a GPU its own time
  MB                the most that was allocated at once, beyond the embeddings; gradients included
  products          which part of the time the matrix products alone would take that no such loss
                    can do without, at the rate measured on the same embeddings
  copies            the same for reading the embeddings and writing the gradients once

examples:
  vl-plugins bench
  vl-plugins bench --losses unified --backends dense tiled --peers clip three-products \\
      --batch-sizes 1024 4096 --rounds 7 --csv bench.csv --markdown bench.md --plot bench.png
  vl-plugins bench --losses {SETS} --batch-sizes 1024 --dimensions 1024
  vl-plugins bench --device cuda --dtypes bfloat16 --peers all --batch-sizes 4096 16384 65536"""


def register(subparsers: argparse._SubParsersAction) -> None:
    """Add the ``bench`` subcommand."""
    parser = subparsers.add_parser(
        "bench",
        help="time and memory of losses, beside those of other packages",
        description=DESCRIPTION,
        epilog=_epilog(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    what = parser.add_argument_group("what to compare")
    what.add_argument(
        "--losses",
        nargs="+",
        metavar="NAME",
        default=DEFAULT_LOSSES,
        help=f"{', '.join(LOSSES)} (default: {' '.join(DEFAULT_LOSSES)})",
    )
    what.add_argument(
        "--backends",
        nargs="+",
        metavar="NAME",
        default=(DEFAULT_BACKEND,),
        help=f"implementations of these: {', '.join(BACKENDS)}; default is what the loss chooses by itself "
        "(default: default)",
    )
    what.add_argument(
        "--peers",
        nargs="*",
        metavar="NAME",
        help="what to compare them with, see below; or all (default: what is fast enough and runs everywhere)",
    )
    where = parser.add_argument_group("on what")
    where.add_argument(
        "--batch-sizes", nargs="+", type=int, metavar="B", default=(512, 1024, 2048), help="(default: 512 1024 2048)"
    )
    where.add_argument("--dimensions", nargs="+", type=int, metavar="D", default=(512,), help="(default: 512)")
    where.add_argument(
        "--dtypes",
        nargs="+",
        metavar="TYPE",
        default=("float32",),
        help=f"of the embeddings: {', '.join(DTYPES)} (default: float32)",
    )
    where.add_argument(
        "--elements", type=int, metavar="K", default=4, help="vectors of each set (default: %(default)s)"
    )
    how = parser.add_argument_group("how")
    how.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ... (default: %(default)s)")
    how.add_argument("--threads", type=int, metavar="N", default=1, help="of the processor (default: %(default)s)")
    how.add_argument("--rounds", type=int, metavar="N", default=5, help="measured ones (default: %(default)s)")
    how.add_argument("--seed", type=int, metavar="N", default=0, help="of the embeddings (default: %(default)s)")
    how.add_argument(
        "--memory-limit",
        type=float,
        metavar="GB",
        help="skip what would need more, by an estimate (default: half of what is free)",
    )
    out = parser.add_argument_group("what to write, beside the table")
    out.add_argument("--csv", type=Path, metavar="FILE", help="all numbers, not rounded; a line for each comparison")
    out.add_argument("--markdown", type=Path, metavar="FILE", help="the table")
    out.add_argument(
        "--plot", type=Path, metavar="FILE", help="time and memory over the batch size, a .png, .pdf or .svg"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print and write; what is being measured goes to standard error."""
    losses, backends, peers = _check(arguments)
    if arguments.plot is not None:
        from vl_plugins.plots.figures import picture_file

        picture_file(arguments.plot)

    # Here, because every command imports this module and most need no torch.
    import torch

    from vl_plugins.benchmarks.measurement import run_benchmark
    from vl_plugins.benchmarks.tables import csv_table, markdown_tables, text_tables
    from vl_plugins.data.storage import write_file

    device = _device(arguments.device)
    threads = torch.get_num_threads()
    torch.set_num_threads(arguments.threads)
    try:
        result = run_benchmark(
            losses,
            peers,
            backends,
            _settings(arguments, losses, device),
            rounds=arguments.rounds,
            seed=arguments.seed,
            memory_limit=None if arguments.memory_limit is None else 1e9 * arguments.memory_limit,
            progress=_say,
        )
    finally:
        torch.set_num_threads(threads)
    # Whatever becomes of the files.
    print(text_tables(result))
    for file, table in ((arguments.csv, csv_table), (arguments.markdown, markdown_tables)):
        if file is not None:
            write_file(file, table(result).encode())
    if arguments.plot is not None:
        from vl_plugins.benchmarks.plot import plot_result

        plot_result(result, arguments.plot)
    return 0


def _check(arguments: argparse.Namespace) -> tuple[list[str], list[str], list[str]]:
    """Return losses, backends and peers; raise ``UserError`` for what no run could serve."""
    losses = _names("loss", arguments.losses, LOSSES)
    backends = _names("backend", arguments.backends, BACKENDS)
    _names("dtype", arguments.dtypes, DTYPES)
    kinds = {loss == SETS for loss in losses}
    if arguments.peers is None:
        peers = [name for name, peer in PEERS.items() if peer.of_sets in kinds and name in DEFAULT_PEERS]
    elif arguments.peers == ["all"]:
        peers = [name for name, peer in PEERS.items() if peer.of_sets in kinds]
    else:
        peers = _names("peer", arguments.peers, PEERS)
    for peer in peers:
        if PEERS[peer].of_sets not in kinds and peer != "three-products":
            missing = f"--losses {SETS}" if PEERS[peer].of_sets else f"a loss other than {SETS}"
            raise UserError(f"--peers {peer} needs something to compare it with: add {missing}")
    for option in ("batch_sizes", "dimensions", "elements", "threads", "rounds"):
        given = getattr(arguments, option)
        least = 2 if option == "batch_sizes" else 1
        for value in given if isinstance(given, Sequence) else [given]:
            if value < least:
                raise UserError(f"--{option.replace('_', '-')} must be at least {least}, got {value}")
    limit = arguments.memory_limit
    if limit is not None and not limit > 0:  # NaN is not
        raise UserError(f"--memory-limit must be a number of GB above 0, got {limit:g}")
    for file in (arguments.csv, arguments.markdown, arguments.plot):
        if file is not None and file.is_dir():
            raise UserError(f"cannot write {file}: it is a folder")
    return losses, backends, peers


def _names(kind: str, given: Sequence[str], known: Collection[str]) -> list[str]:
    """Return the names, each once."""
    return list(dict.fromkeys(check_name(kind, name, known) for name in given))


def _device(name: str) -> "torch.device":
    import torch

    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda"):
            raise RuntimeError("cpu and cuda can be measured")
        torch.empty(0, device=device)
    except (AssertionError, RuntimeError) as error:
        raise UserError(f"--device {name}: {first_line(error)}") from error
    return device


def _settings(arguments: argparse.Namespace, losses: Sequence[str], device: "torch.device") -> "list[Setting]":
    from vl_plugins.benchmarks.contestants import Setting

    kinds = [None] if any(loss != SETS for loss in losses) else []
    kinds += [arguments.elements] if SETS in losses else []
    return [
        Setting(batch_size, dimension, dtype, device, elements)
        for elements in kinds
        for dtype in dict.fromkeys(arguments.dtypes)
        for dimension in dict.fromkeys(arguments.dimensions)
        for batch_size in sorted(set(arguments.batch_sizes))
    ]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
