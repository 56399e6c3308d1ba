"""Configuration of a training: the content of a YAML file, checked by OmegaConf."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vl_plugins.data.sampler import parse_captions_per_image
from vl_plugins.data.samples import INPUTS
from vl_plugins.errors import UserError, first_line, one_of, require
from vl_plugins.integrations.config_files import find_config, read_yaml
from vl_plugins.registry import check_registered

__all__ = [
    "MODEL_PARTS",
    "REMOVED_DATA_KEYS",
    "Config",
    "DataConfig",
    "StageConfig",
    "TowerConfig",
    "parse_config",
    "read_config",
    "split_specification",
]

MODEL_PARTS = ("image_trunk", "image_embedder", "image_head", "text_trunk", "text_embedder", "text_head")
"""Keys of ``trainer.models``: parts that can be frozen, each with its optimizer."""

REMOVED_DATA_KEYS = {
    "same_group": "images of a group are positives of each other",
    "shuffle_buffer": "all images of an epoch are shuffled together",
    "num_samples": "an epoch has all images of the shards",
}
"""Keys of ``data`` in version 0.2 alone, and what holds without them."""

TRAINERS = ("CrossModalTrainer", "MetricLossOnly")

# A name, or {"name": NAME, OPTION: VALUE, ...}; OmegaConf has no such type.
Specification = Any


def split_specification(kind: str, specification: Specification) -> tuple[str, dict[str, Any]]:
    """Return name and options; raise ``UserError`` for what is neither a name nor a mapping with one."""
    if isinstance(specification, str):
        return specification, {}
    if not isinstance(specification, Mapping) or not isinstance(specification.get("name"), str):
        raise UserError(
            f"{kind} must be a name or a mapping such as {{name: NAME, option: value}}, got {specification!r}"
        )
    return specification["name"], {key: value for key, value in specification.items() if key != "name"}


@dataclass
class DataConfig:
    """Which shards are read, and how.

    Args:
        train: shards to train on, as for :func:`vl_plugins.data.expand_shards`.
        val: shards to evaluate on after each epoch.
        inputs: ``"images"``, or ``"features"``: the ``.npy`` member of each sample instead of its picture.
        captions_per_image: ``"random"``, ``"first"``, ``"all"`` or a number.
        batch_size: images in a batch of each process; the loss compares those of all processes.
        workers: loader processes of each process.
        allow_duplicate_captions: whether a batch may have equal captions of different images.
        on_read_error: ``"skip"`` repeats another image of the batch in place of one that cannot be read, ``"raise"``
            stops at it.
    """

    train: str | None = None
    val: str | None = None
    inputs: str = "images"
    captions_per_image: str | int = "random"
    batch_size: int = 128
    workers: int = 4
    allow_duplicate_captions: bool = False
    on_read_error: str = "skip"

    def __post_init__(self):
        one_of("inputs", self.inputs, INPUTS)
        parse_captions_per_image(self.captions_per_image)
        _at_least(self, batch_size=1, workers=0)


@dataclass
class TowerConfig:
    """What makes embeddings of images, or of texts.

    Args:
        trunk: an encoder of :mod:`vl_plugins.encoders`.
        pooling: how local features become one, see :class:`vl_plugins.encoders.Embedder`.
        projection: from features to the width of the embeddings, see there.
        vocabulary: for a trunk of words: options of :meth:`vl_plugins.encoders.vocabulary.Vocabulary.from_captions`.
    """

    trunk: Specification
    pooling: str = "own"
    projection: str = "linear"
    vocabulary: dict[str, Any] = field(default_factory=dict)


@dataclass
class StageConfig:
    """A stage of the training.

    Args:
        epochs: how many.
        freeze: parts of the model that are not trained, of ``MODEL_PARTS``.
        freeze_batchnorm: whether the trunks keep their batch statistics.
        optimizer: a class of :mod:`torch.optim`.
        lr_scale: factor of the learning rate by part, of ``MODEL_PARTS`` or ``"metric_loss"``.
        lr_scheduler: a class of :mod:`torch.optim.lr_scheduler`. Its option ``by`` is when it steps: after each
            ``"epoch"``, after each ``"iteration"``, or at a ``"plateau"`` of RSUM. None keeps the learning rate.
        clip_grad_norm: largest norm of the gradient of all parameters of the model together.
    """

    epochs: int = 1
    freeze: list[str] = field(default_factory=list)
    freeze_batchnorm: bool = False
    optimizer: Specification = "Adam"
    lr_scale: dict[str, float] = field(default_factory=dict)
    lr_scheduler: Specification = None
    clip_grad_norm: float | None = None

    def __post_init__(self):
        _at_least(self, epochs=1, clip_grad_norm=0)
        for part in self.freeze:
            one_of("part of the model to freeze", part, MODEL_PARTS)
        for part in self.lr_scale:
            one_of("part of the model in lr_scale", part, (*MODEL_PARTS, "metric_loss"))


@dataclass
class Config:
    """A whole training.

    Args:
        image: tower of images.
        text: tower of texts.
        data: what is read.
        dim: width of the embeddings.
        head: ``{"name": "set", ...}`` with options of :class:`vl_plugins.modules.SetPrediction` for embedding sets.
        loss: see :func:`vl_plugins.registry.create`, also for miner, reducer and distance.
        miner: chooses pairs, in both directions.
        reducer: of the loss.
        distance: of the loss, and of sets at evaluation.
        trainer: ``"CrossModalTrainer"``, or pytorch-metric-learning's ``"MetricLossOnly"`` for one set of images and
            texts.
        training: what the stages have in common.
        stages: in their order, each with what it changes of ``training``; one stage by default.
        seed: of weights, order, captions and augmentations.
        log_every: training losses are logged every so many steps.
    """

    image: TowerConfig
    text: TowerConfig
    data: DataConfig = field(default_factory=DataConfig)
    dim: int = 1024
    head: Specification = None
    loss: Specification = "unified"
    miner: Specification = None
    reducer: Specification = None
    distance: Specification = None
    trainer: str = "CrossModalTrainer"
    training: StageConfig = field(default_factory=StageConfig)
    stages: list[StageConfig] = field(default_factory=list)
    seed: int = 0
    log_every: int = 50

    def __post_init__(self):
        _at_least(self, dim=1, seed=0, log_every=1)
        one_of("trainer", self.trainer, TRAINERS)
        if self.head is not None:
            one_of("head", split_specification("head", self.head)[0], ("set",))

    @property
    def epochs(self) -> int:
        """Number of epochs of all stages."""
        return sum(stage.epochs for stage in self.stages)


def read_config(path: str | Path, overrides: Mapping[str, Any] | None = None) -> Config:
    """Read a YAML file.

    Args:
        path: of the file, or the name of one of ``configs/pytorch_metric_learning``.
        overrides: as for :func:`parse_config`.

    Raises:
        UserError: there is no such file, it is not YAML, or :func:`parse_config` raises it.
    """
    path = find_config(path, "pytorch_metric_learning")
    content = read_yaml(path, extra="pml")
    omegaconf = require("omegaconf", extra="pml").OmegaConf
    with _short_errors(f"{path}: "):
        if isinstance(content, Mapping):  # `read_yaml` has checked it; OmegaConf also reads 1e-4 as a number
            content = omegaconf.to_container(omegaconf.load(path))
            check_registered(content.get("loss"))
        return parse_config(content, overrides)


def parse_config(content: Any, overrides: Mapping[str, Any] | None = None) -> Config:
    """Check plain data, as YAML, JSON or a program give it.

    Args:
        content: a mapping with the fields of :class:`Config`; ``dataclasses.asdict`` makes it of a ``Config`` again.
        overrides: values by dotted path, such as ``{"data.batch_size": 64, "stages.0.epochs": 1}``; a number is a place
            in a list.

    Raises:
        UserError: a key is missing or unknown, or a value is not what it should be; the message names it.
    """
    omegaconf = require("omegaconf", extra="pml").OmegaConf
    overrides = overrides or {}
    if not isinstance(content, Mapping):
        raise UserError(f"the configuration must be a mapping of names to values, got {content!r:.80}")
    # OmegaConf would resolve them, for example from the environment, and files and checkpoints may be untrusted.
    interpolation = re.search(r"\$\{[^}]*\}?", repr((content, overrides)))
    if interpolation:
        raise UserError(f"{interpolation[0]} is an interpolation, which is not supported: give the value itself")
    with _short_errors():
        tree = omegaconf.create(dict(content))
    for path, value in overrides.items():
        with _short_errors(f"{path}: "):
            _override(tree, path, value)
    content = omegaconf.to_container(tree)
    for key, now in REMOVED_DATA_KEYS.items():
        if isinstance(content.get("data"), dict) and key in content["data"]:
            raise UserError(f"data.{key}: delete this key of version 0.2; now {now}")
    training, stages = content.get("training") or {}, content.get("stages", [{}])
    if not isinstance(stages, list) or not stages or not all(isinstance(part, dict) for part in (training, *stages)):
        raise UserError("training must be a mapping, and stages a list of mappings such as [{epochs: 10}]")
    stages = [_section(StageConfig, f"stages.{number}: ", training | stage) for number, stage in enumerate(stages)]
    return _section(Config, "", {**content, "stages": stages})


def _override(tree: Any, path: str, value: Any) -> None:
    omegaconf = require("omegaconf", extra="pml").OmegaConf
    keys = path.split(".")
    for parent in (".".join(keys[:length]) for length in range(1, len(keys))):
        name = omegaconf.select(tree, parent)
        if isinstance(name, str):  # as in `loss: unified`, to which loss.scale=60 adds
            omegaconf.update(tree, parent, {"name": name})
    omegaconf.update(tree, path, value, merge=False)


def _section(section: type, prefix: str, content: Mapping[str, Any]) -> Any:
    omegaconf = require("omegaconf", extra="pml").OmegaConf
    with _short_errors(prefix):
        return omegaconf.to_object(omegaconf.merge(omegaconf.structured(section), content))


@contextmanager
def _short_errors(prefix: str = "") -> Iterator[None]:
    """Make a ``UserError`` of one line of OmegaConf's errors, which have several."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{prefix}{error}") from error
    except (require("omegaconf", extra="pml").errors.OmegaConfBaseException, TypeError) as error:
        key = getattr(error, "full_key", None)
        raise UserError(f"{prefix}{key + ': ' if key else ''}{first_line(error)}") from error


def _at_least(section: Any, **least: int) -> None:
    for name, value in least.items():
        given = getattr(section, name)
        if given is not None and not given >= value:
            raise UserError(f"{name} must be at least {value}, got {given}")
