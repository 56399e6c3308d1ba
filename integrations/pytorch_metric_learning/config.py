"""Configuration of a training: dataclasses that OmegaConf fills from a YAML file and checks."""

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from vl_plugins.data.limits import MAX_IMAGE_PIXELS, check_max_image_pixels
from vl_plugins.errors import MALFORMED_CONTENT, UserError, number, one_of, user_errors
from vl_plugins.integrations.command_lines import find_config, read_yaml
from vl_plugins.registry import check_registered
from vl_plugins.retrieval import retrieval_metrics, retrieval_ranks

__all__ = [
    "Config",
    "DataConfig",
    "StageConfig",
    "TowerConfig",
    "config_errors",
    "parse_config",
    "read_config",
    "split",
]

Component = Any  # a name, or a mapping of name and options; OmegaConf has no type for this union


@dataclass
class DataConfig:
    """Which shards are read, and how; see :class:`vl_plugins.data.CaptionSampler`.

    Args:
        train: data to train on, as for :func:`vl_plugins.data.read_collection`.
        val: data to evaluate on after each epoch.
        inputs: ``"images"``, or ``"features"``: the ``.npy`` member of each sample instead of its picture.
        captions_per_image: ``"random"``, ``"first"``, ``"all"`` or a number.
        batch_size: images in a batch of each process; the loss compares those of all processes.
        chunk_size: images that are encoded at a time, to save memory; see
            :func:`vl_plugins.encoders.encode_in_chunks`. None encodes the whole batch.
        accumulation_steps: with N, a step has N batches. The loss compares all their images at once, and each batch is
            encoded as a chunk, unless there is a ``chunk_size``.
        workers: loader processes of each process.
        caption_lines: ``"yes"``, ``"no"`` or ``"auto"``, see :func:`vl_plugins.data.read_collection`.
        caption_fields: fields of the ``.json`` in other programs' shards, each of which is a caption.
        keep_index: write indexes of other programs' shards, which are scanned at each start otherwise.
        samples_per_epoch: images in an epoch of all processes; by default those of ``train``.
        shuffle_window: shuffle shards, and images within windows of so many; by default all images together.
        prefetch_factor: batches that each loader process reads ahead; by default torch's.
        on_error: ``"skip"`` repeats another image of the batch in place of an unreadable one, ``"raise"`` stops. An
            evaluation always stops.
        max_errors: share of the training images that may be skipped.
        max_image_pixels: pictures of more pixels count as unreadable, and are not decoded; 0 for no limit.
    """

    train: str = "???"
    val: str | None = None
    inputs: str = "images"
    captions_per_image: Any = "random"
    batch_size: int = 128
    chunk_size: int | None = None
    accumulation_steps: int = 1
    workers: int = 4
    caption_lines: str = "auto"
    caption_fields: list[str] = field(default_factory=list)
    keep_index: bool = True
    samples_per_epoch: int | None = None
    shuffle_window: int | None = None
    prefetch_factor: int | None = None
    on_error: str = "skip"
    max_errors: float = 0.01
    max_image_pixels: int = MAX_IMAGE_PIXELS
    on_read_error: str | None = None  # the name of on_error until version 0.3
    allow_duplicate_captions: bool | None = None  # without effect since version 0.4

    @property
    def images_per_step(self) -> int:
        """Images of a training step in each process."""
        return self.batch_size * self.accumulation_steps

    @property
    def images_per_chunk(self) -> int | None:
        """Images that are encoded at a time; None for all of a step."""
        if self.chunk_size is None and self.accumulation_steps > 1:
            return self.batch_size
        return self.chunk_size


@dataclass
class TowerConfig:
    """An encoder of images, or of texts.

    Args:
        trunk: ``features`` or ``timm`` for images, ``gru`` or ``hugging_face`` for texts, with the options of the class
            in :mod:`vl_plugins.encoders`.
        pooling, projection: see :class:`vl_plugins.encoders.Embedder`.
        vocabulary: for a ``gru``: options of :meth:`vl_plugins.encoders.Vocabulary.from_captions`.
    """

    trunk: Component = "???"
    pooling: str = "own"
    projection: str = "linear"
    vocabulary: dict[str, Any] = field(default_factory=dict)


@dataclass
class StageConfig:
    """A stage of the training, with an optimizer of its own.

    Args:
        epochs: how many.
        freeze: parts that are not trained, such as ``"image_trunk"``.
        freeze_batchnorm: whether the trunks keep their batch statistics.
        optimizer: a class of :mod:`torch.optim`.
        lr_scale: factors of the learning rate by part, or of the ``"loss"``.
        lr_scheduler: a class of :mod:`torch.optim.lr_scheduler`. Its option ``by`` says when it steps: after each
            ``"epoch"`` (default) or ``"iteration"``.
        clip_grad_norm: largest norm of the gradient of both towers; None or 0 for no limit.
    """

    epochs: int = 1
    freeze: list[str] = field(default_factory=list)
    freeze_batchnorm: bool = False
    optimizer: Component = "Adam"
    lr_scale: dict[str, float] = field(default_factory=dict)
    lr_scheduler: Component = None
    clip_grad_norm: float | None = None


@dataclass
class Config:
    """A whole training.

    Args:
        image, text: the towers.
        data: what is read.
        dim: width of the embeddings.
        head: ``{"name": "set", ...}`` with options of :class:`vl_plugins.modules.SetPrediction` for embedding sets.
        loss, miner, reducer, distance: see :func:`vl_plugins.registry.create`. The distance also compares sets at
            evaluation.
        one_set: compare images and texts as one set of embeddings, for losses without ``ref_emb``.
        training: what the stages have in common.
        stages: what each stage changes of ``training``; none for a single stage.
        seed: of weights, order, captions, augmentations and dropout.
        log_every: training losses are logged every so many steps.
        validate_first: evaluate a new run before its first step, too, as epoch 0.
        best_metric: metric of :func:`vl_plugins.retrieval.retrieval_metrics` by which ``best.pt`` is chosen among the
            epochs: the highest, but the lowest rank or ``hardest_negative_similarity``.
    """

    image: TowerConfig = field(default_factory=TowerConfig)
    text: TowerConfig = field(default_factory=TowerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    dim: int = 1024
    head: Component = None
    loss: Component = "unified"
    miner: Component = None
    reducer: Component = None
    distance: Component = None
    one_set: bool = False
    training: StageConfig = field(default_factory=StageConfig)
    stages: list[StageConfig] = field(default_factory=list)
    seed: int = 0
    log_every: int = 50
    validate_first: bool = False
    best_metric: str = "rsum"

    @property
    def schedule(self) -> list[StageConfig]:
        """All stages, at least one."""
        return self.stages or [self.training]

    @property
    def stage_keys(self) -> list[str]:
        """The key of each stage in the file, for messages of errors."""
        return [f"stages.{number}" for number in range(len(self.stages))] or ["training"]


def read_config(path: str | Path, overrides: Mapping[str, Any] | None = None) -> Config:
    """Read a YAML file, or one of ``configs/pytorch_metric_learning`` by its name; see :func:`parse_config`.

    Raises:
        UserError: it is not YAML, or :func:`parse_config` raises it.
        OSError: there is no such file.
    """
    file = find_config(path, "pytorch_metric_learning")
    read_yaml(file)  # raises an error for more than a configuration, which OmegaConf would copy
    return parse_config(OmegaConf.to_container(OmegaConf.load(file), resolve=False), overrides)


def parse_config(content: Any, overrides: Mapping[str, Any] | None = None) -> Config:
    """Check plain data, as YAML, JSON or a program give it; ``dataclasses.asdict`` makes it of a ``Config`` again.

    Args:
        content: a mapping with the fields of :class:`Config`. Values may refer to others, as in
            ``{"T_max": "${training.epochs}"}``, but not to the environment.
        overrides: values by dotted path, such as ``{"data.batch_size": 64, "stages.0.epochs": 1}``.

    Raises:
        UserError: a key is missing or unknown, or a value has the wrong type or is out of its range; the message names
            it. Or the loss is ``module:Class``, and not one of the ``overrides``.
    """
    overrides = overrides or {}
    try:
        tree = OmegaConf.create(dict(content))
        for path, value in overrides.items():
            OmegaConf.update(tree, path, value, merge=False)
        # Resolvers such as ${oc.env:NAME} would send what is in the environment to an address in an untrusted file.
        resolver = re.search(r'"[^"]*(\$\{[^"]*:[^"]*)"', json.dumps(OmegaConf.to_container(tree), default=str))
        if resolver is not None:
            raise UserError(
                f"{resolver[1]}: only references to other values, such as ${{training.epochs}}, are supported"
            )
        tree.stages = [OmegaConf.merge(tree.get("training") or {}, stage) for stage in tree.get("stages") or []]
        config: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), tree))
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        if error.full_key:
            reason = f"{error.full_key}: {reason}"
        raise UserError(reason) from error
    check_max_image_pixels(config.data.max_image_pixels)
    if not {"loss", "loss.name"} & overrides.keys():
        check_registered(config.loss)
    _check_ranges(config)
    return config


def _check_ranges(config: Config) -> None:
    values = [
        ("data.batch_size", config.data.batch_size, 1),
        ("data.chunk_size", config.data.chunk_size, 1),
        ("data.accumulation_steps", config.data.accumulation_steps, 1),
        ("data.workers", config.data.workers, 0),
        ("data.samples_per_epoch", config.data.samples_per_epoch, 1),
        ("data.shuffle_window", config.data.shuffle_window, 1),
        ("data.prefetch_factor", config.data.prefetch_factor, 1),
        ("dim", config.dim, 1),
        ("seed", config.seed, 0),
        ("log_every", config.log_every, 1),
    ]
    for key, stage in zip(config.stage_keys, config.schedule, strict=True):
        values.append((f"{key}.epochs", stage.epochs, 0))
    for key, value, least in values:
        if value is not None:
            with config_errors(key):
                number(key, value, least=least, kind=int)
    ranks = retrieval_ranks(torch.eye(1), torch.eye(1), torch.arange(1))  # any: only the names of metrics matter
    with config_errors("best_metric"):
        one_of("metric", config.best_metric, retrieval_metrics(ranks))
    if config.validate_first and not config.data.val:
        raise UserError("validate_first: there is nothing to evaluate; give data.val, or --val-data")
    if config.seed >= 2**32:
        raise UserError(f"seed must be below 2^32, got {config.seed}")


@contextlib.contextmanager
def config_errors(key: str, expected: Sequence[type[Exception]] = MALFORMED_CONTENT) -> Iterator[None]:
    """Raise errors of the block as a :class:`UserError` whose message begins with a key of the configuration.

    Args:
        key: such as ``"training.optimizer"``.
        expected: what wrong values raise, besides the errors of parsers.
    """
    try:
        with user_errors(key, *expected):
            yield
    except UserError as error:
        if str(error).startswith(key):
            raise
        raise UserError(f"{key}: {error}") from error


def split(component: Any) -> tuple[str, dict[str, Any]]:
    """Return name and options of a component.

    >>> split({"name": "Adam", "lr": 1e-3})
    ('Adam', {'lr': 0.001})
    """
    if isinstance(component, str):
        return component, {}
    if not isinstance(component, Mapping) or not isinstance(component.get("name"), str):
        raise UserError(f"expected a name or a mapping such as {{name: NAME, option: value}}, got {component!r}")
    return component["name"], {key: value for key, value in component.items() if key != "name"}
