"""The command line ``python -m vl_plugins.integrations.open_clip``."""

from collections.abc import Sequence

from vl_plugins.errors import exit_status
from vl_plugins.integrations.open_clip.flags import parse_args
from vl_plugins.registry import check_options

__all__ = ["main"]


def main(argv: Sequence[str]) -> int:
    """Train or evaluate; return 0, or after one line on standard error 2 when the input is wrong, 130 after Ctrl-C."""
    return exit_status("vl_plugins", lambda: _main(argv), "interrupted; use --resume to continue")


def _main(argv: Sequence[str]) -> int:
    args = parse_args(argv)
    if args.loss is not None:
        check_options("loss", args.loss, args.loss_kwargs)
    # After the errors of flags, because it imports torch, which takes seconds.
    from vl_plugins.integrations.open_clip.train import train

    return train(args)
