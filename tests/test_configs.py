"""Every file under configs/ is read by what it is for, tried without data, and listed as it is."""

import json
import re
import shlex
from pathlib import Path

import open_clip
import pytest
import torch

from tests.helpers.training_steps import config_of_command, step_of_each_stage
from vl_plugins.cli import build_parser
from vl_plugins.integrations.open_clip.flags import parse_args
from vl_plugins.integrations.open_clip.loss import build_loss
from vl_plugins.integrations.open_clip.models import check_model, register_models
from vl_plugins.integrations.pytorch_metric_learning import read_config

CONFIGS = Path(__file__).parents[1] / "configs"
RECIPES = (CONFIGS.parent / "docs" / "guides" / "recipes.md").read_text()
OPEN_CLIP = sorted(CONFIGS.glob("open_clip/*.yaml"))
PML = sorted(CONFIGS.glob("pytorch_metric_learning/*.yaml"))
# What the models of these take is small; the others have encoders with millions of parameters.
LIGHT = re.compile("toy|vsepp_butd_flickr30k|dive_faster_rcnn_flickr30k")


def in_turn(paths):
    return [
        pytest.param(path, id=path.stem, marks=() if LIGHT.match(path.stem) else pytest.mark.slow) for path in paths
    ]


@pytest.mark.parametrize("path", OPEN_CLIP, ids=lambda path: path.stem)
def test_open_clip_configurations(path, monkeypatch):
    options = parse_args(["--config", str(path)])
    check_model(options.model)
    if options.loss is not None:
        build_loss(options)
    if options.pretrained:
        assert options.pretrained in open_clip.list_pretrained_tags_by_model(options.model)
    monkeypatch.chdir("/")
    found = parse_args(["--config", path.name])
    assert vars(found) == vars(options) | {"config": path.name}, "found by its name from anywhere"


@pytest.mark.parametrize("path", [path for path in OPEN_CLIP if "toy" not in path.stem], ids=lambda path: path.stem)
def test_weights_meet_the_activation_that_they_were_trained_with(path):
    host_options = parse_args(["--config", str(path)])
    weights_quick_gelu = open_clip.get_pretrained_cfg(host_options.model, host_options.pretrained)["quick_gelu"]
    model_quick_gelu = open_clip.get_model_config(host_options.model).get("quick_gelu", False)
    assert weights_quick_gelu == (model_quick_gelu or host_options.force_quick_gelu)


@pytest.mark.parametrize("path", PML, ids=lambda path: path.stem)
def test_pytorch_metric_learning_configurations(path, monkeypatch):
    config = read_config(path)
    assert sum(stage.epochs for stage in config.schedule) >= 12
    for stage in config.schedule:
        milestones = (stage.lr_scheduler or {}).get("milestones", [0])
        assert sorted(milestones) == list(milestones)
        assert milestones[-1] < stage.epochs
    warmup_steps = config.loss.get("warmup_steps")
    if warmup_steps is not None:
        images, passes = len_of(config.data.train), {"random": 5, "all": 1}[config.data.captions_per_image]
        assert warmup_steps == images // config.data.batch_size * passes, "one epoch of the paper"
    monkeypatch.chdir("/")
    assert read_config(path.name) == config, "found by its name from anywhere"


def len_of(shards):
    """Number of training images; a shard holds a thousand."""
    images = {"coco": 113_287, "flickr30k": 29_000}[re.search(r"/(\w+)-train-", shards)[1]]
    assert f"{{000000..{(images - 1) // 1000:06}}}" in shards
    return images


@pytest.mark.parametrize("path", in_turn(PML))
def test_steps_with_pytorch_metric_learning(path):
    step_of_each_stage(read_config(path))


@pytest.mark.parametrize("path", PML + [path for path in OPEN_CLIP if "336" in path.stem], ids=lambda path: path.stem)
def test_comments_say_how_to_make_the_shards_and_how_to_train(path):
    comments = " ".join(
        line.removeprefix("#").rstrip("\\").strip() for line in path.read_text().splitlines() if line[:1] == "#"
    )
    assert f"# Run: python -m vl_plugins.integrations.{path.parent.name} --config {path.name}\n" in path.read_text()
    (command,) = re.findall(r"vl-plugins (shards .*?--out \S+)", comments)
    arguments = build_parser().parse_args(shlex.split(command))
    (name,) = {name for name in ("coco", "flickr30k", "toy") if name in path.stem}
    patterns = re.findall(r"(?:train|val|train-data|val-data): (\S+\.tar)", path.read_text())
    assert len(patterns) == 2
    assert all(pattern.startswith(f"{arguments.out}/{name}-") for pattern in patterns)
    assert (getattr(arguments, "features", None) is not None) == ("inputs: features" in path.read_text())


def rows_of_recipes():
    rows = [line.strip("|").split("|") for line in RECIPES.splitlines() if line[:1] == "|"]
    return [[cell.strip() for cell in row] for row in rows]


def test_the_recipes_list_every_file_with_the_numbers_that_are_in_it():
    links = {}
    for file, *_, numbers in rows_of_recipes():
        link = re.fullmatch(r"\[(\S+)\]\(\.\./\.\./configs/(\S+)\)", file)
        if link:
            assert link[1] == Path(link[2]).name
            assert link[2] not in links
            links[link[2]] = re.findall(r"\d+\.\d", numbers)
    assert links.keys() == {str(path.relative_to(CONFIGS)) for path in (*OPEN_CLIP, *PML)}
    assert sum(map(len, links.values())) > 40
    for file, numbers in links.items():
        in_file = re.findall(r"^#.*", (CONFIGS / file).read_text(), flags=re.MULTILINE)
        missing = set(numbers).difference(re.findall(r"\d+\.\d", " ".join(in_file)))
        assert not missing, file


@pytest.mark.parametrize(
    "command",
    re.findall(r"^python -m (?:.*\\\n)*.*$", RECIPES, flags=re.MULTILINE),
    ids=lambda command: " ".join(command.split()[4:])[:60],
)
def test_commands_of_the_recipes(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, _, module, *arguments = shlex.split(command.replace("\\\n", " "))
    if module.endswith("open_clip"):
        parse_args(arguments)
        return
    small = (
        ["--set", "image.trunk.model=test_resnet", "image.trunk.image_size=64"]
        if "vsepp_flickr30k.yaml" in arguments
        else []
    )
    step_of_each_stage(config_of_command([*arguments, *small]))


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("models/*.json")), ids=lambda path: path.stem)
def test_models(path):
    register_models()
    assert open_clip.get_model_config(path.stem) == json.loads(path.read_text())
    model = open_clip.create_model(path.stem)
    tokens = open_clip.get_tokenizer(path.stem)(["a red circle left of a blue star"])
    images, texts, _ = model(torch.zeros(1, 3, *model.visual.image_size), tokens)
    assert images.shape == texts.shape


ROOT = CONFIGS.parent
LAUNCH = "vl_plugins.integrations.open_clip"


def launches():
    """Return the commands of the launcher on the pages, in the demo, and in the files of claims and studies."""
    files = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("docs/guides/*.md")]
    files += [*ROOT.glob("benchmarks/claims/*.yaml"), *ROOT.glob("benchmarks/studies/*.yaml")]
    commands = {}
    for file in files:
        text = re.sub(r"\\\n(?:[-+] )?\s*", " ", file.read_text())
        if file.suffix == ".yaml":
            text = re.sub(r"\n {4,}(?=--)", " ", text)  # lines of a folded text
        for number, line in enumerate(text.splitlines()):
            if LAUNCH in line and re.search(r"--(loss|config)\b", line.partition(LAUNCH)[2]):
                commands[f"{file.name}, {number}: {line.strip()}"] = line.partition(LAUNCH)[2]
    return commands


def test_commands_that_rely_on_several_captions_say_so():
    """``--loss`` alone leaves the reading to open_clip, which takes one caption of an image."""
    commands = launches()
    assert len(commands) > 10
    for where, command in commands.items():
        words = command.replace("`", " ").split()
        files = [CONFIGS / "open_clip" / word for word in words if word.endswith(".yaml")]
        configured = any("captions-per-image" in file.read_text() for file in files if file.is_file())
        assert configured or "--captions-per-image" in words, where
    for path in OPEN_CLIP:
        options = parse_args(["--config", str(path)])
        assert options.loss is None or options.captions_per_image is not None, path
