"""The command line ``python -m vl_plugins.integrations.open_clip``."""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from vl_plugins.errors import UserError, exit_status, one_of
from vl_plugins.integrations.open_clip.flags import flag, parse_args
from vl_plugins.registry import list_losses

__all__ = ["main"]


def main(argv: Sequence[str]) -> int:
    """Train or evaluate; return 0, or after one line on standard error 2 when the input is wrong, 130 after Ctrl-C."""
    return exit_status("vl_plugins", lambda: _main(argv), "interrupted; use --resume to continue")


def _main(argv: Sequence[str]) -> int:
    args = parse_args(argv)
    _check(args)
    # After the checks, because it imports torch, which takes seconds.
    from vl_plugins.integrations.open_clip.training import train

    return train(args)


def _check(args: Namespace) -> None:
    """Raise ``UserError`` for misspelled losses and missing files."""
    if args.loss is not None and not args.loss[:1].isupper() and ":" not in args.loss:
        one_of("loss", args.loss, list_losses())
    for option in ("pretrained", "resume"):
        value = getattr(args, option)
        if value is None or ":" in value:  # a URL
            continue
        path = Path(value)
        if (path.suffix or len(path.parts) > 1) and not path.exists():  # else a tag, or latest
            raise UserError(f"{flag(option)} {value}: no such file")
