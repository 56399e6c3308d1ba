"""What the launcher uses of open_clip's trainer, and how it replaces functions of it.

``open_clip_train.main`` has no plugin point. It imports the functions that it calls by name, so these names are
replaced in that module while ``main(argv)`` runs. Their parameters are checked first: training with another loss than
the one asked for would be worse than not starting.
"""

import contextlib
import importlib
import inspect
import io
import re
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from types import ModuleType
from typing import Any, ClassVar

from vl_plugins.errors import UserError, require

__all__ = [
    "OpenCLIP3",
    "OpenCLIP4",
    "data_parallel_on_cpu",
    "default_options",
    "installed_host",
    "parse_args",
    "parser_help",
    "replaced",
]

OLDEST, TOO_NEW = (3, 3), (5, 0)
TO_INSTALL = "install open_clip_torch 3.3, a later 3.x or 4.x: pip install 'open_clip_torch[training]>=3.3,<5'"


class OpenCLIP3:
    """open_clip 3.x: the loss is a function of features, and a batch is a pair."""

    main_functions: ClassVar[dict[str, tuple[str, ...]]] = {
        "create_model_and_transforms": ("model_name",),
        "parse_args": ("args",),
        "create_loss": ("args",),
        "get_data": ("args", "preprocess_fns", "epoch", "tokenizer"),
        "evaluate": ("model", "data", "epoch", "args", "tb_writer", "tokenizer"),
        "get_latest_checkpoint": ("path", "remote"),
    }
    """Functions of ``open_clip_train.main`` that the launcher replaces, with the parameters that it relies on."""

    not_with_heads: tuple[str, ...] = ("distill_model", "torchscript", "trace", "use_bnb_linear")
    """Options of open_clip that a model with heads does not support."""

    def with_loss(self, make_loss: Callable[[Namespace], Any]) -> dict[str, Callable]:
        """Return the replacement, by name in ``open_clip_train.main``, that trains with what ``make_loss`` returns."""
        return {"create_loss": make_loss}

    def batch(self, images: Any, texts: Any) -> Any:
        """Return a batch as the trainer takes it."""
        return images, texts

    def evaluated_model(self, model: Any) -> Any:
        """Return the model in what the trainer evaluates."""
        return getattr(model, "module", model)

    def evaluates_together(self, args: Namespace) -> bool:
        """Return whether the model runs only in all processes at once."""
        return False

    def other_data(self, options: Namespace) -> str | None:
        """Return the option or model whose data are not images and captions, or None."""
        return None


class OpenCLIP4(OpenCLIP3):
    """open_clip 4.x: model and loss are one task, made before the data, and a batch is a mapping."""

    main_functions: ClassVar[dict[str, tuple[str, ...]]] = {
        **{name: parameters for name, parameters in OpenCLIP3.main_functions.items() if name != "create_loss"},
        "create_task": ("args", "model", "dist_model", "naflex_data_config"),
        "evaluate": ("task", "data", "epoch", "args", "tb_writer", "tokenizer"),
    }

    # A full checkpoint under FSDP takes every entry of the state for a tensor, but one of a model with heads is a dict;
    # and the loss would find the parameters of a learned similarity sharded.
    not_with_heads = ("distill_model", "use_bnb_linear", "fsdp")

    # Entries in the configurations of models that train on something else.
    other_models = ("audio_cfg", "audio_naflex_cfg", "genlap_cfg", "genlip_cfg", "multimodal_cfg")

    def with_loss(self, make_loss: Callable[[Namespace], Any]) -> dict[str, Callable]:
        def create_task(args: Namespace, model: Any, **options: Any) -> Any:
            import torch

            loss = make_loss(args)
            if args.torchcompile:
                # Compiled with the task, it would be compiled again at each step, whose number it reads.
                loss.forward = torch.compiler.disable(loss.forward)
            return importlib.import_module("open_clip.task").CLIPTask(model, loss=loss)

        return {"create_task": create_task}

    def batch(self, images: Any, texts: Any) -> Any:
        return {"image": images, "text": texts}

    def evaluated_model(self, model: Any) -> Any:
        return model.get_trainable_module()

    def evaluates_together(self, args: Namespace) -> bool:
        return args.fsdp and args.distributed

    def other_data(self, options: Namespace) -> str | None:
        if options.use_naflex:
            return "--use-naflex"
        if options.dataset_type.endswith("-audio"):
            return f"--dataset-type {options.dataset_type}"
        if ":" in options.model:  # its configuration is not here
            return None
        config = importlib.import_module("open_clip").get_model_config(options.model) or {}
        return f"--model {options.model}" if any(entry in config for entry in self.other_models) else None


def installed_host() -> OpenCLIP3:
    """Return the adapter of the installed version.

    Raises:
        MissingExtraError: open_clip or its training dependencies are not installed.
        UserError: the version is not supported, or its functions have other parameters.
    """
    require("open_clip", extra="open-clip")
    require("webdataset", extra="open-clip")
    installed = tuple(map(int, re.findall(r"\d+", version("open_clip_torch"))[:2]))
    if not OLDEST <= installed < TOO_NEW:
        raise _unsupported("it has not been tried")
    main = importlib.import_module("open_clip_train.main")
    host = OpenCLIP4() if hasattr(main, "create_task") else OpenCLIP3()
    for name, expected in host.main_functions.items():
        function = getattr(main, name, None)
        found = () if function is None else tuple(inspect.signature(function).parameters)
        if found[: len(expected)] != expected:
            what = "does not exist" if function is None else f"takes ({', '.join(found)})"
            raise _unsupported(f"open_clip_train.main.{name} {what}, expected ({', '.join(expected)})")
    return host


def _unsupported(difference: str) -> UserError:
    return UserError(f"open_clip_torch {version('open_clip_torch')} is not supported: {difference}; {TO_INSTALL}")


@contextlib.contextmanager
def replaced(module: ModuleType, **functions: Any) -> Iterator[None]:
    """Replace functions of a module by name; on leaving, put back what was there."""
    originals = {name: getattr(module, name) for name in functions}
    vars(module).update(functions)
    try:
        yield
    finally:
        vars(module).update(originals)


@contextlib.contextmanager
def data_parallel_on_cpu() -> Iterator[None]:
    """Let ``DistributedDataParallel(model, device_ids=[device])``, as open_clip writes it, accept the CPU as device."""
    import torch

    class DistributedDataParallel(torch.nn.parallel.DistributedDataParallel):
        def __init__(self, module, device_ids=None, **options):
            if device_ids is not None and all(torch.device(device).type == "cpu" for device in device_ids):
                device_ids = None
            super().__init__(module, device_ids=device_ids, **options)

    with replaced(torch.nn.parallel, DistributedDataParallel=DistributedDataParallel):
        yield


def parse_args(argv: Sequence[str]) -> Namespace:
    """Return the options of open_clip on a command line.

    Raises:
        UserError: a flag or value that open_clip's parser rejects.
    """
    params = require("open_clip_train.params", extra="open-clip")
    stderr = io.StringIO()
    try:
        with contextlib.redirect_stderr(stderr):
            return params.parse_args(list(argv))
    except SystemExit as error:
        # The last line of argparse's usage is "PROGRAM: error: MESSAGE".
        raise UserError(stderr.getvalue().splitlines()[-1].partition(": error: ")[2]) from error
    except ValueError as error:
        raise UserError(str(error)) from error


def default_options() -> dict[str, Any]:
    """Return the options of open_clip with their defaults."""
    return vars(parse_args([]))


def parser_help() -> str:
    """Return open_clip's help without its usage line and ``--help``."""
    params = require("open_clip_train.params", extra="open-clip")
    stdout = io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.suppress(SystemExit):
        params.parse_args(["--help"])
    _, _, options = stdout.getvalue().partition("\noptions:\n")
    _, _, options = options.partition("\n")
    return options
