"""``open_clip_train.params``: the options of 3.x without those that are gone, and those of 4.x that the loop reads."""

import argparse

from open_clip_train.params import get_default_params

from vl_plugins.integrations.open_clip import host

__all__ = ["parse_args"]

OF_3 = host.parser()._actions
GONE = ("help", "horovod", "torchscript", "trace")
NEW_FLAGS = ("--fsdp", "--fsdp-no-reshard-after-forward", "--fsdp-offload-cpu", "--use-naflex", "--force-naflex-vision")


def parse_args(args):
    parser = argparse.ArgumentParser()
    for action in OF_3:
        if action.dest == "dataset_type":
            action.choices = [*dict.fromkeys([*action.choices, "webdataset-audio", "synthetic-audio"])]
        if action.dest not in GONE:
            parser._add_action(action)
    for flag in NEW_FLAGS:
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--length-bucketing", action="store_true")
    parser.add_argument("--image-key", default="jpg;png;jpeg;webp")
    parser.add_argument("--text-key", default="txt")
    parser.add_argument("--json-text-key")
    parser.add_argument("--json-text-key-probs", type=float, nargs="+")
    parser.add_argument("--max-image-pixels", type=int, default=25_000_000)
    parser.add_argument("--fsdp-checkpoint", choices=["full", "sharded"], default="full")
    parser.add_argument("--torchcompile-strategy", choices=["model", "task", "step"], default="task")
    parser.add_argument("--torchcompile-backend")
    parser.add_argument("--torchcompile-mode")
    args = parser.parse_args(args)
    if not args.opt.startswith("timm"):
        for name, value in get_default_params(args.model).items():
            if getattr(args, name) is None:
                setattr(args, name, value)
    return args
