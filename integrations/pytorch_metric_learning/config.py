"""Configuration of a training: what stands in a YAML file, checked."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vl_plugins.data.batching import SAME_GROUP
from vl_plugins.data.captions import parse_captions_per_image
from vl_plugins.data.shard_files import INPUTS
from vl_plugins.integrations.config_files import find_config, read_yaml
from vl_plugins.integrations.pytorch_metric_learning.builders import Specification, split_specification
from vl_plugins.registry import construct
from vl_plugins.utils.errors import UserError, check_name

__all__ = ["MODEL_PARTS", "Config", "DataConfig", "StageConfig", "TowerConfig", "parse_config", "read_config"]

MODEL_PARTS = ("image_trunk", "image_embedder", "image_head", "text_trunk", "text_embedder", "text_head")
"""Keys of ``trainer.models``: what can be frozen, and has an optimizer of its own."""

TRAINERS = ("CrossModalTrainer", "MetricLossOnly", "TwoStreamMetricLoss")

# YAML 1.1 takes 1e-4 for a string.
SCIENTIFIC = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")


@dataclass(frozen=True)
class DataConfig:
    """Which shards are read, and how.

    Args:
        train: shards to train on, as for :func:`vl_plugins.data.reader.training_pipeline`.
        val: shards to evaluate on after each epoch.
        inputs: ``"images"``, or ``"features"``: the ``.npy`` member of each sample in place of its picture.
        captions_per_image: ``"random"``, ``"first"``, ``"all"`` or a number.
        batch_size: images in a batch.
        workers: loader processes.
        allow_duplicate_captions: whether equal captions of different images may meet in a batch.
        same_group: ``"apart"`` keeps images of one group in different batches, ``"positive"`` takes them for positives
            of each other.
        on_read_error: ``"skip"`` leaves out what cannot be read, ``"raise"`` stops at it.
        shuffle_buffer: samples that each loader process holds to draw the next one from; by default 5,000, or 1,000 of
            features, which are larger.
        num_samples: images of an epoch, for shards without a ``sizes.json`` beside them.
    """

    train: str | None = None
    val: str | None = None
    inputs: str = "images"
    captions_per_image: str | int = "random"
    batch_size: int = 128
    workers: int = 4
    allow_duplicate_captions: bool = False
    same_group: str = "apart"
    on_read_error: str = "skip"
    shuffle_buffer: int | None = None
    num_samples: int | None = None

    def __post_init__(self):
        check_name("inputs", self.inputs, INPUTS)
        check_name("same_group", self.same_group, SAME_GROUP)
        parse_captions_per_image(self.captions_per_image)
        _number("data.batch_size", self.batch_size, int, least=1)
        _number("data.workers", self.workers, int, least=0)
        for name in ("shuffle_buffer", "num_samples"):
            if getattr(self, name) is not None:
                _number(f"data.{name}", getattr(self, name), int, least=1)


@dataclass(frozen=True)
class TowerConfig:
    """What makes embeddings of images, or of texts.

    Args:
        trunk: an encoder of :mod:`vl_plugins.encoders`.
        pooling: how local features become one, see :class:`vl_plugins.encoders.Embedder`.
        projection: how they come to the width of the embeddings, likewise.
        vocabulary: for a trunk that has words: options of :meth:`vl_plugins.data.vocabulary.Vocabulary.from_captions`.
    """

    trunk: Specification
    pooling: str = "own"
    projection: str = "linear"
    vocabulary: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StageConfig:
    """How a stage of the training goes.

    Args:
        epochs: how many.
        freeze: parts of the model that are not trained, of ``MODEL_PARTS``.
        freeze_batchnorm: whether the trunks keep their batch statistics.
        optimizer: a class of :mod:`torch.optim`.
        lr_scale: factor of the learning rate by part, of ``MODEL_PARTS`` or ``"metric_loss"``.
        lr_scheduler: a class of :mod:`torch.optim.lr_scheduler`; its option ``by`` says after what it steps: each
            ``"epoch"``, each ``"iteration"``, or at a ``"plateau"`` of RSUM. None keeps the learning rate.
        clip_grad_norm: largest norm of the gradient of all parameters of the model together.
    """

    epochs: int = 1
    freeze: Sequence[str] = ()
    freeze_batchnorm: bool = False
    optimizer: Specification = "Adam"
    lr_scale: Mapping[str, float] = field(default_factory=dict)
    lr_scheduler: Specification | None = None
    clip_grad_norm: float | None = None

    def __post_init__(self):
        _number("epochs", self.epochs, int, least=1)
        object.__setattr__(self, "freeze", tuple(self.freeze))
        for part in self.freeze:
            check_name("part of the model to freeze", part, MODEL_PARTS)
        for part in self.lr_scale:
            check_name("part of the model in lr_scale", part, (*MODEL_PARTS, "metric_loss"))
            _number(f"lr_scale.{part}", self.lr_scale[part], float, least=0)
        if self.clip_grad_norm is not None:
            _number("clip_grad_norm", self.clip_grad_norm, float, least=0)


@dataclass(frozen=True)
class Config:
    """A whole training.

    Args:
        data: what is read.
        image: tower of images.
        text: tower of texts.
        dim: width of the embeddings.
        head: ``{"name": "set", ...}`` with options of :class:`vl_plugins.modules.SetPrediction` for embedding sets.
        loss: see :func:`build_loss`; so for the next three.
        miner: chooses pairs, in both directions.
        reducer: of the loss.
        distance: of the loss, and of sets at evaluation.
        trainer: ``"CrossModalTrainer"``, or of pytorch-metric-learning ``"TwoStreamMetricLoss"`` (both modalities are
            one stream each) or ``"MetricLossOnly"`` (one set of images and texts).
        training: what the stages have in common.
        stages: one after the other, each with what it changes of ``training``; one stage if left out.
        accuracy: options of pytorch-metric-learning's ``AccuracyCalculator``; False leaves it out.
        seed: of weights, order, captions and augmentations.
        log_every: training losses are logged every so many steps.
    """

    data: DataConfig
    image: TowerConfig
    text: TowerConfig
    dim: int = 1024
    head: Specification | None = None
    loss: Specification = "unified"
    miner: Specification | None = None
    reducer: Specification | None = None
    distance: Specification | None = None
    trainer: str = "CrossModalTrainer"
    training: StageConfig = field(default_factory=StageConfig)
    stages: tuple[StageConfig, ...] = ()
    accuracy: Mapping[str, Any] | bool = True
    seed: int = 0
    log_every: int = 50

    def __post_init__(self):
        _number("dim", self.dim, int, least=1)
        _number("seed", self.seed, int)
        _number("log_every", self.log_every, int, least=1)
        check_name("trainer", self.trainer, TRAINERS)
        if self.head is not None:
            check_name("head", split_specification("head", self.head)[0], ("set",))
        if self.trainer == "TwoStreamMetricLoss" and self.data.captions_per_image not in ("random", "first", 1):
            raise UserError(
                "trainer TwoStreamMetricLoss takes one text for each image, but data.captions_per_image is "
                f"{self.data.captions_per_image!r}; CrossModalTrainer takes any number"
            )

    @property
    def epochs(self) -> int:
        """Number of epochs of all stages."""
        return sum(stage.epochs for stage in self.stages)


def read_config(path: str | Path, changes: Callable[[Any], Mapping[str, Any]] = lambda content: {}) -> Config:
    """Read a YAML file.

    Args:
        path: of the file, or the name of one of ``configs/pytorch_metric_learning``.
        changes: from the content of the file to the ``overrides`` of :func:`parse_config`.

    Raises:
        UserError: there is no such file, it is not YAML, or :func:`parse_config` refuses it.
    """
    path = find_config(path, "pytorch_metric_learning")
    content = read_yaml(path, extra="pml")
    try:
        return parse_config(content, changes(content))
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def parse_config(content: Any, overrides: Mapping[str, Any] | None = None) -> Config:
    """Check plain data, as YAML, JSON or a program give it.

    Args:
        content: a mapping with the fields of :class:`Config`.
        overrides: values by dotted path, such as ``{"data.batch_size": 64, "stages.0.epochs": 1}``; a number is a place
            in a list.

    Raises:
        UserError: a key is missing or unknown, or a value is not what it should be; the message names it.
    """
    content = _plain("the configuration", content)
    for path, value in (overrides or {}).items():
        _override(content, path.split("."), value, path)
    parsed = {key: value for key, value in content.items() if value is not None}
    parsed["data"] = _section(DataConfig, "data", parsed.get("data", {}))
    for tower in ("image", "text"):
        if tower not in parsed:
            raise UserError(f"the section {tower!r} is missing: it says what makes embeddings of {tower}s")
        parsed[tower] = _section(TowerConfig, tower, parsed[tower])
    training = _plain("training", parsed.get("training", {}))
    stages = parsed.get("stages", [{}])
    if not isinstance(stages, list) or not stages:
        raise UserError(f"stages must be a list of mappings such as [{{epochs: 10}}], got {stages!r}")
    parsed["training"] = _section(StageConfig, "training", training)
    parsed["stages"] = tuple(
        _section(StageConfig, f"stages.{number}", training | _plain(f"stages.{number}", stage))
        for number, stage in enumerate(stages)
    )
    return _section(Config, "the configuration", parsed)


def as_plain(config: Config) -> dict[str, Any]:
    """Return what :func:`parse_config` makes the same configuration of."""
    return _as_plain(config)


def _as_plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {item.name: _as_plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: _as_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_plain(item) for item in value]
    return value


def _section(section: type, name: str, content: Any) -> Any:
    if dataclasses.is_dataclass(content):
        return content
    content = _plain(name, content)
    # None is how YAML says that a value is left as it is.
    optional = {item.name for item in dataclasses.fields(section) if item.default is None}
    given = {key: value for key, value in content.items() if value is not None or key in optional}
    try:
        return construct("section", name, section, given)
    except UserError as error:
        raise UserError(f"{name}: {error}") from error


def _plain(name: str, content: Any) -> dict[str, Any]:
    if not isinstance(content, Mapping) or not all(isinstance(key, str) for key in content):
        raise UserError(f"{name} must be a mapping of names to values, got {content!r:.80}")
    return {key: _numbers(value) for key, value in content.items()}


def _numbers(value: Any) -> Any:
    if isinstance(value, str) and SCIENTIFIC.fullmatch(value):
        return float(value)
    if isinstance(value, Mapping):
        return {key: _numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return value


def _override(content: Any, keys: Sequence[str], value: Any, path: str) -> None:
    for key in keys[:-1]:
        content = _child(content, key, path)
    if isinstance(content, list):
        content[_index(content, keys[-1], path)] = value
    elif isinstance(content, dict):
        content[keys[-1]] = value
    else:
        raise UserError(f"{path}: {'.'.join(keys[:-1])} has no parts")


def _child(content: Any, key: str, path: str) -> Any:
    if isinstance(content, list):
        return content[_index(content, key, path)]
    if not isinstance(content, dict):
        raise UserError(f"{path}: {key} is not part of a mapping")
    if isinstance(content.get(key), str):
        content[key] = {"name": content[key]}  # as in `loss: unified`, which `loss.scale=60` adds to
    if content.get(key) is None:
        content[key] = {}
    return content[key]


def _index(content: list, key: str, path: str) -> int:
    if not key.isdecimal() or int(key) >= len(content):
        raise UserError(f"{path}: expected a number below {len(content)} in the place of {key!r}")
    return int(key)


def _number(name: str, value: Any, kind: type, least: float | None = None) -> None:
    kinds = (int,) if kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or (least is not None and not value >= least):
        at_least = "" if least is None else f" of at least {least}"
        raise UserError(f"{name} must be {'an integer' if kind is int else 'a number'}{at_least}, got {value!r}")
