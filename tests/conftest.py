import contextlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.helpers.seeds import seed_torch

# Several threads beside a busy process make small tensors slower, not faster.
torch.set_num_threads(int(os.environ.get("VL_PLUGINS_TEST_THREADS", "1")))

# `make gpu` runs where neither hypothesis nor what reads and writes shards is installed, so that fixtures import the
# latter themselves.
if importlib.util.find_spec("hypothesis") is not None:
    from hypothesis import HealthCheck, settings

    # A busy machine is not an error.
    settings.register_profile("any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any speed")


def pytest_collection_modifyitems(items):
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_tests and not (torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)):
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU of compute capability 8.0 or later"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol():
    seed_torch(0)
    with _logging_as_before():  # its fixtures too
        return (yield)


@contextlib.contextmanager
def _logging_as_before():
    """open_clip's trainer sets the level of every logger, and adds handlers that write to standard error and a file."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    levels = {logger: logger.level for logger in _loggers()}
    yield
    for handler in [handler for handler in root.handlers if handler not in handlers]:
        root.removeHandler(handler)
        handler.close()
    if root.level != level:
        root.setLevel(level)
        for logger in _loggers():
            logger.setLevel(levels.get(logger, logging.NOTSET))


def _loggers():
    return [logger for logger in logging.root.manager.loggerDict.values() if isinstance(logger, logging.Logger)]


@pytest.fixture(scope="session", autouse=True)
def _cache(tmp_path_factory):
    os.environ["VL_PLUGINS_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def toy_scenes(tmp_path_factory) -> Path:
    """Folder with the toy pictures (64 train, 24 val, 24 test) and ``dataset_toy.json``."""
    from vl_plugins.data.toy import write_toy_scenes

    folder = tmp_path_factory.mktemp("toy")
    write_toy_scenes(folder, train=64, val=24, test=24)
    return folder


@pytest.fixture(scope="session")
def toy_shards(toy_scenes, tmp_path_factory) -> Path:
    """Folder with shards of 8 toy images: ``toy-train-{000000..000007}.tar`` and three each of ``val`` and ``test``."""
    from vl_plugins.data.sources import read_karpathy
    from vl_plugins.data.writer import write_shards

    folder = tmp_path_factory.mktemp("toy_shards")
    write_shards(read_karpathy(toy_scenes / "dataset_toy.json", "coco"), toy_scenes, folder, samples_per_shard=8)
    return folder


@pytest.fixture(scope="session")
def grouped_shards(toy_scenes, tmp_path_factory) -> tuple[str, list[str]]:
    """Shards of the 64 toy images to train on, and their groups: those with the same first caption are one."""
    from vl_plugins.data.sources import read_karpathy
    from vl_plugins.data.writer import write_shards

    folder = tmp_path_factory.mktemp("grouped_shards")
    images = read_karpathy(toy_scenes / "dataset_toy.json", "coco")
    images = [replace(image, group=image.captions[0]) for image in images if image.split == "train"]
    write_shards(images, toy_scenes, folder, samples_per_shard=8)
    return f"{folder}/toy-train-{{000000..000007}}.tar", [image.group for image in images]


@pytest.fixture(scope="session")
def stamps() -> Path:
    """Folder of real captioned pictures in the format of COCO, ``dataset_stamps.json`` in it."""
    default = Path(__file__).parents[2] / "shared" / "data" / "stamps"
    folder = Path(os.environ.get("VL_PLUGINS_REAL_DATA", default))
    if not (folder / "dataset_stamps.json").is_file():
        pytest.skip(f"no dataset_stamps.json in {folder}; VL_PLUGINS_REAL_DATA can name another folder")
    return folder


@pytest.fixture(scope="session")
def sources(tmp_path_factory) -> Path:
    """A copy of the checkout: setuptools writes beside the sources, and several test processes would meet there."""
    folder = tmp_path_factory.mktemp("sources") / "vl_plugins"
    unwanted = shutil.ignore_patterns(".*", "build", "demo", "logs", "__pycache__", "*.egg-info")
    shutil.copytree(Path(__file__).parents[1], folder, symlinks=True, ignore=unwanted)
    return folder


@pytest.fixture(scope="session")
def wheel(sources, tmp_path_factory) -> Path:
    """Folder with a built wheel, unpacked as pip does, without what it depends on."""
    return _install(sources, tmp_path_factory.mktemp("site"))


def _install(sources: Path, site: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(site), str(sources)], check=True)
    return site


@pytest.fixture(scope="session")
def sdist_wheel(sources, wheel, tmp_path_factory) -> Path:
    """The same of a wheel that is built from the sdist."""
    folder = tmp_path_factory.mktemp("sdist")
    build = f"from setuptools.build_meta import build_sdist; build_sdist({str(folder)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=sources, check=True, capture_output=True)
    return _install(next(folder.glob("*.tar.gz")), tmp_path_factory.mktemp("site"))
