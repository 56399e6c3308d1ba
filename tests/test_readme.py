"""The commands and snippets of the README and of the guides are run as they stand there."""

import contextlib
import functools
import importlib
import inspect
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import open_clip
import PIL.Image
import pytest
import torch
from torchvision.transforms import PILToTensor

from tests.helpers.training_steps import config_of_command, step_of_each_stage
from vl_plugins.cli import build_parser
from vl_plugins.cli import main as own_main
from vl_plugins.integrations.open_clip.data import NOT_OURS
from vl_plugins.integrations.open_clip.flags import parse_args
from vl_plugins.integrations.open_clip.models import register_models
from vl_plugins.integrations.pytorch_metric_learning import main as train_towers
from vl_plugins.integrations.pytorch_metric_learning import read_config
from vl_plugins.integrations.pytorch_metric_learning.command_line import build_parser as build_towers_parser
from vl_plugins.retrieval.features import Features, save_features

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DATA = (ROOT / "docs/getting_data.md").read_text(encoding="utf-8")
# The others have tests of their own: test_docs.py, test_configs.py, losses/test_own_loss.py,
# integrations/sentence_transformers/test_guide.py.
PAGES = sorted({*ROOT.glob("docs/guides/*.md"), *ROOT.glob("docs/concepts/*.md"), ROOT / "docs/measured.md"})
PAGES = [page for page in PAGES if page.stem not in ("recipes", "own_loss", "sentence_transformers")]
TEXT = "\n".join([README, *(page.read_text(encoding="utf-8") for page in PAGES)])


def blocks(language, text=TEXT):
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def run(command, cwd):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    finished = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout + finished.stderr


def run_own(command, cwd):
    """Run a line ``vl-plugins ...`` in this process, which has imported torch already; return what it prints."""
    assert command[0] == "vl-plugins"
    output, before = io.StringIO(), Path.cwd()
    os.chdir(cwd)
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            status = own_main(command[1:])
    finally:
        os.chdir(before)
    assert status == 0, output.getvalue()
    return output.getvalue()


SNIPPETS = blocks("python")
(LOADING,) = (snippet for snippet in SNIPPETS if "load_model" in snippet)
(READER,) = (snippet for snippet in SNIPPETS if "dataset = ShardDataset" in snippet)
(WRITER,) = (snippet for snippet in SNIPPETS if "write_shards" in snippet)
(RANKS,) = (snippet for snippet in SNIPPETS if "retrieval_ranks" in snippet)
(TRAINER,) = (snippet for snippet in SNIPPETS if "CrossModalTrainer" in snippet)
INDEXES = [snippet for snippet in SNIPPETS if 'load_features("vit.npz")' in snippet]
OWN_LOOPS = [snippet for snippet in SNIPPETS if re.search("^(def|class) ", snippet, flags=re.MULTILINE)]
(NAMES,) = (snippet for snippet in SNIPPETS if "ProxyAnchorLoss" in snippet)
OTHERS = [LOADING, READER, WRITER, RANKS, TRAINER, NAMES, *INDEXES, *OWN_LOOPS]
LOSSES = [snippet for snippet in SNIPPETS if snippet not in OTHERS]


@pytest.mark.parametrize(
    "snippet", LOSSES, ids=["pml", "margins", "sets", "chunks", "processes", "similarities", "miner", "queues"]
)
def test_python_snippets(snippet):
    variables = {}
    exec(compile(snippet, "README.md", "exec"), variables)
    leaves = [value for name, value in variables.items() if name in ("image_embeddings", "text_embeddings")]
    if "image_encoder" in variables:
        leaves = [variables[f"{side}_encoder"].weight for side in ("image", "text")]
    gradients = [leaf.grad for leaf in leaves]
    gradients += [variables["similarities"].grad] if "similarities" in variables else []
    assert gradients
    assert all(gradient.isfinite().all() and gradient.any() for gradient in gradients)


def test_components_by_name():
    exec(compile(NAMES, "README.md", "exec"), variables := {})
    loss, proxies, miner = (variables[name] for name in ("loss", "proxies", "miner"))
    assert [type(part).__name__ for part in (loss, loss.distance, loss.reducer, proxies, miner)] == [
        "UnifiedLoss",
        "LpDistance",
        "AvgNonZeroReducer",
        "ProxyAnchorLoss",
        "MultiSimilarityMiner",
    ]
    assert (loss.distance.p, proxies.proxies.shape, miner.epsilon) == (1, (1000, 512), 0.1)


# test_loops_on_shards.py runs the others as they stand.
LOOPS = [None, ("accelerate_loop", "train"), None, ("lightning_module", "RetrievalModule")]
LOOPS += [("transformers_trainer", "RetrievalTrainer"), ("metric_loss_only", "train")]


@pytest.mark.parametrize(("snippet", "loop"), [pair for pair in zip(OWN_LOOPS, LOOPS, strict=True) if pair[1]])
def test_training_loops_are_those_of_the_examples(snippet, loop):
    """Which their own tests run."""
    module, name = loop
    module = importlib.import_module(f"vl_plugins.integrations.examples.{module}")
    imports, core = snippet.split("\n\n\n")
    assert core == inspect.getsource(getattr(module, name))
    variables = {}
    exec(imports, variables)
    for imported in variables.keys() - {"__builtins__"}:
        assert variables[imported] is getattr(module, imported)


def test_ranks_snippet(capsys):
    exec(compile(RANKS, "README.md", "exec"), {})
    rsum, mean_average_precision = map(float, capsys.readouterr().out.split())
    assert 0 < rsum < 200
    assert 0 <= mean_average_precision <= 1


@pytest.fixture
def saved_features(tmp_path, monkeypatch):
    """As ``vl-plugins encode`` leaves them in the current folder, in ``vit.npz``."""
    generator = torch.Generator().manual_seed(0)
    images = torch.nn.functional.normalize(torch.randn(20, 16, generator=generator), dim=1)
    image_of_caption = torch.arange(20).repeat_interleave(5)
    noise = torch.randn(100, 16, generator=generator)
    captions = torch.nn.functional.normalize(images[image_of_caption] + 0.1 * noise, dim=1)
    ids = {"image_ids": range(100, 120), "caption_ids": range(1000, 1100)}
    features = Features(images=images, captions=captions, image_of_caption=image_of_caption, **ids)
    monkeypatch.chdir(tmp_path)
    save_features(features, "vit.npz")
    return features


def test_faiss_snippet(saved_features, capsys):
    pytest.importorskip("faiss")
    exec(compile(INDEXES[0], "README.md", "exec"), variables := {})
    expected = (saved_features.captions[:3] @ saved_features.images.T).topk(5)
    assert np.array_equal(variables["rows"], expected.indices.numpy())
    assert variables["cosines"] == pytest.approx(expected.values.numpy(), abs=1e-6)
    assert [row[0] for row in json.loads(capsys.readouterr().out)] == [100, 100, 100]
    assert Path("images.index").is_file()


def test_clip_retrieval_snippet(saved_features):
    parquet = pytest.importorskip("pyarrow.parquet")
    exec(compile(INDEXES[1], "README.md", "exec"), {})
    images, captions = (np.load(f"embeddings/{name}/{name}_0.npy") for name in ("img_emb", "text_emb"))
    assert images.dtype == captions.dtype == np.float32
    assert np.array_equal(captions, saved_features.captions.numpy())
    table = parquet.read_table("embeddings/metadata/metadata_0.parquet").to_pydict()
    assert table["caption"] == list(range(1000, 1100))
    for row in range(100):
        assert table["image_path"][row] == 100 + row // 5
        assert np.array_equal(images[row], saved_features.images[row // 5].numpy())


def test_install_line(wheel):
    """The folder can be installed; the extras have to be its own. They are enough for the start page as well."""
    pages = (README, (ROOT / "docs/index.md").read_text(encoding="utf-8"))
    lines = [line for page in pages for line in "".join(blocks("bash", page)).splitlines()]
    command, of_start = (shlex.split(line, comments=True) for line in lines if line.startswith("pip install"))
    assert command == of_start
    (requirement,) = command[2:]
    (metadata,) = wheel.glob("vl_plugins-*.dist-info/METADATA")
    extras = re.fullmatch(r"\.\[(.+)\]", requirement)[1].split(",")
    assert all(f"Provides-Extra: {extra}\n" in metadata.read_text() for extra in extras)


def test_make_commands():
    """What they run is tested by itself."""
    targets = re.findall("^make (.*?) +#", "".join(blocks("bash", README)), flags=re.MULTILINE)
    for target, command in zip(targets, ("/vl-plugins demo", "/python -m pytest "), strict=True):
        assert command in run(["make", "--dry-run", target], ROOT)


def changed_command(sign):
    """Return the open_clip command before ("-") or after ("+") the change that the README shows."""
    diff, _ = blocks("diff")  # the other is of sentence-transformers
    lines = [line[1:].strip().removesuffix("\\") for line in diff.splitlines() if line[0] in (" ", sign)]
    return shlex.split(" ".join(lines))


def test_the_change_is_one_module_and_one_flag():
    before, after = changed_command("-"), changed_command("+")
    assert [token for token in after if token not in before] == [
        "vl_plugins.integrations.open_clip",
        "--loss",
        "unified",
    ]
    assert [token for token in before if token not in after] == ["open_clip_train.main"]


def test_the_open_clip_command(tmp_path, toy_shards):
    """It is run to its end, on two processes, with a small model, on toy shards."""
    command = changed_command("+")
    assert command[0] == "torchrun"
    command[command.index("--nproc_per_node") + 1] = "2"
    small = "--model vl-tiny --device cpu --precision fp32 --batch-size 16 --workers 0 --epochs 1 --name run".split()
    small += ["--pretrained", "", "--train-data", f"{toy_shards}/toy-train-{{000000..000007}}.tar"]
    small += ["--val-data", f"{toy_shards}/toy-val-{{000000..000002}}.tar"]
    output = run([*command, *small], tmp_path)
    assert "Training with the loss of vl_plugins: unified(" in output
    assert (tmp_path / "logs" / "run" / "checkpoints" / "epoch_1.pt").is_file()


def test_reader_snippet(toy_shards, tmp_path, monkeypatch):
    """With the toy shards under the name it gives, smaller batches, and what follows each batch."""
    monkeypatch.chdir(tmp_path)
    Path("shards").symlink_to(toy_shards)
    snippet = READER.replace("coco-train-{000000..000113}", "toy-train-{000000..000007}")
    snippet = snippet.replace("batch_size=128", "batch_size=4").replace("workers=4", "workers=0")
    snippet = snippet.replace("range(10)", "range(2)").replace("...", "use()")
    batches = []

    def use():
        batches.append((variables["images"], variables["texts"], variables["labels"]))

    tokenizer = open_clip.get_tokenizer("ViT-B-32")
    variables = {"image_transform": PILToTensor(), "tokenizer": tokenizer, "use": use}
    exec(compile(snippet, "README.md", "exec"), variables)
    assert len(batches) == 2 * 64 / 4
    for images, texts, labels in batches:
        assert (images.shape[0], texts.shape[0], labels.shape[0]) == (4, 20, 4)
    for epoch in (batches[:16], batches[16:]):
        assert sorted(label for *_, labels in epoch for label in labels.tolist()) == list(range(64))


def test_writer_snippet(toy_scenes, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("pictures").symlink_to(toy_scenes / "train")
    write_table("train.csv", "image", "caption", json.loads((toy_scenes / "dataset_toy.json").read_text()))
    exec(compile(WRITER, "README.md", "exec"), {})
    assert capsys.readouterr().out == "1 shards, 64 images\n"
    assert [path.name for path in Path("shards").glob("*.tar")] == ["train-train-000000.tar"]


def write_table(file, image_column, caption_column, document, delimiter=","):
    """Write a row for each caption of the training pictures."""
    items = [item for item in document["images"] if item["filepath"] == "train"]
    rows = [(item["filename"], sentence["raw"]) for item in items for sentence in item["sentences"]]
    with open(file, "w", newline="") as stream:
        stream.writelines(delimiter.join(row) + "\n" for row in [(image_column, caption_column), *rows])


def test_trainer_snippet(capsys, monkeypatch):
    """With encoders of a layer each, and a data set of two batches."""
    monkeypatch.setattr(torch.optim, "Adam", functools.partial(torch.optim.Adam, lr=0.1))
    torch.manual_seed(0)
    images = torch.randn(256, 5)
    variables = {
        "image_encoder": torch.nn.Linear(5, 8),
        "text_encoder": torch.nn.EmbeddingBag(256, 8),
        "dataset": [(image, torch.tensor([label]), label) for label, image in enumerate(images)],
    }
    before = {name: variables[name].weight.clone() for name in ("image_encoder", "text_encoder")}
    exec(compile(TRAINER, "README.md", "exec"), variables)
    assert re.findall(r"epoch (\d+)", capsys.readouterr().out) == [str(epoch) for epoch in range(1, 11)]
    assert not any(torch.equal(variables[name].weight, weight) for name, weight in before.items())
    assert variables["trainer"].iterations_per_epoch == 2


def test_configuration(tmp_path):
    """It is read as it stands, and tried with smaller encoders."""
    (content,) = blocks("yaml")
    path = tmp_path / "own.yaml"
    path.write_text(content)
    config = read_config(path)
    assert [(stage.epochs, stage.freeze) for stage in config.schedule] == [(30, ["image_trunk"]), (15, [])]
    assert config.stages[1].optimizer["lr"] == 2e-5
    small = ["image.trunk.model=test_vit", "text.trunk.hidden_dim=32", "dim=32", "text.trunk.word_dim=16"]
    step_of_each_stage(config_of_command(["--config", path, "--set", *small]))


def host_commands(module):
    """Return the lines ``python -m MODULE ...``, split, without the first three words."""
    lines = [line for block in blocks("bash") for line in block.replace("\\\n", " ").splitlines()]
    return [shlex.split(line)[3:] for line in lines if line.startswith(f"python -m {module}")]


def test_commands_of_two_towers(tmp_path, toy_shards, monkeypatch):
    """They train an epoch on toy shards under the names they give, with a small CNN; the second is then evaluated."""
    monkeypatch.chdir(tmp_path)
    Path("shards").mkdir()
    for number in range(29):
        Path(f"shards/flickr30k-train-{number:06d}.tar").symlink_to(toy_shards / f"toy-train-{number % 8:06d}.tar")
    Path("shards/flickr30k-val-000000.tar").symlink_to(toy_shards / "toy-val-000000.tar")
    commands = host_commands("vl_plugins.integrations.pytorch_metric_learning")
    assert len(commands) == 2
    small = ["image.trunk.model=test_resnet", "image.trunk.pretrained=False", "image.trunk.image_size=32", "dim=16"]
    small += ["text.trunk.hidden_dim=16", "data.workers=0", "data.batch_size=100"]
    small += ["data.allow_duplicate_captions=True"]
    small += ["stages.0.epochs=1", "stages.1.epochs=1"]
    for arguments in commands:
        assert train_towers([*arguments, "--device", "cpu", "--set", *small]) == 0
    for folder in ("runs/vsepp_flickr30k", "runs/goal"):
        assert len(Path(folder, "results.jsonl").read_text().splitlines()) == 2
    (checkpoint,) = re.findall(r"`vl-plugins evaluate --checkpoint (\S+)`", TEXT)
    evaluate = ["evaluate", "--checkpoint", checkpoint, "--shards", "shards/flickr30k-val-000000.tar", "--workers", "0"]
    assert own_main([*evaluate, "--device", "cpu"]) == 0


def test_example_commands(tmp_path, toy_shards, monkeypatch, capsys):
    """With fewer steps, where that is an option. What needs no arguments is run beside it, where it learns."""
    monkeypatch.chdir(tmp_path)
    Path("toy-shards").symlink_to(toy_shards)
    text = TEXT.replace("\\\n", " ")
    commands = re.findall(r"^python -m (vl_plugins\.integrations\.examples\.\w+)([^#\n]*)", text, re.MULTILINE)
    assert len(commands) == 5
    for name, arguments in commands:
        main, arguments = importlib.import_module(name).main, shlex.split(arguments)
        if "--loss" in arguments:
            assert main([*arguments, "--steps", "2"]).keys() == {"before", "after"}
        elif arguments:
            main(*arguments)
        else:
            assert not inspect.signature(main).parameters
    assert re.findall(r"^epoch (\d): loss \d", capsys.readouterr().out, re.MULTILINE) == ["0", "1"]
    assert list(Path("lightning_logs").rglob("*.ckpt"))


def own_commands(*names, text=TEXT):
    """Return the lines ``vl-plugins NAME ...``, split."""
    lines = [line for block in blocks("bash", text) for line in block.replace("\\\n", " ").splitlines()]
    commands = [shlex.split(line, comments=True) for line in lines if line.startswith("vl-plugins")]
    return [command for command in commands if command[1] in names]


def test_plot_commands(tmp_path, monkeypatch):
    """With fewer gradients."""
    monkeypatch.setattr("vl_plugins.plots.gradients.POINTS", 5)
    commands = [command for command in own_commands("plot") if command[2] != "attention"]
    assert len(commands) == 1
    run_own(commands[0], tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"gradients.png"}


BENCHMARKS = {
    "losses": "--batch-sizes 32 64 --dimension 16 --rounds 1",
    "ranks": "--images 50 --dimension 16 --rounds 1",
    "data": "--scale 0.002 --rounds 1",
}


def test_benchmark_commands(tmp_path, capsys):
    """The lines, with small sizes and without compilation."""
    text = "\n".join(blocks("bash")).replace("\\\n", " ")
    # Those of the study are in test_study.py.
    commands = re.findall(r"^python -m (benchmarks\.(?!study)(\w+))([^#\n]*)", text, re.MULTILINE)
    assert {script for _, script, _ in commands} == BENCHMARKS.keys()
    for module, script, arguments in commands:
        if "--growth" in arguments or "--remote" in arguments:
            continue  # run by test_benchmarks.py
        arguments = shlex.split(arguments.replace("clip-compiled", "").replace("losses.png", f"{tmp_path}/losses.png"))
        importlib.import_module(module).main([*arguments, *BENCHMARKS[script].split()])
        assert re.search(r"ratio to .*\n.* 1\.000", capsys.readouterr().out, flags=re.DOTALL)
    assert PIL.Image.open(tmp_path / "losses.png").size == (1440, 540)


@pytest.mark.slow
def test_set_head_is_trained_drawn_and_loaded(tmp_path, toy_shards, monkeypatch):
    """The lines about embedding sets in their order, with a small model, on toy shards under their names."""
    (training,) = (line for block in blocks("bash") for line in block.splitlines() if "smooth_chamfer.yaml" in line)
    (tmp_path / "shards").mkdir()
    for shard in toy_shards.glob("toy-val-*.tar"):
        (tmp_path / "shards" / shard.name.replace("toy", "coco")).symlink_to(shard)
    small = "--model vl-tiny --device cpu --precision fp32 --batch-size 8 --workers 0 --epochs 10 --name run".split()
    small += ["--pretrained", "", "--val-data", "", "--save-frequency", "0", "--warmup", "1"]
    small += ["--train-data", f"{toy_shards}/toy-train-000000.tar"]
    small += ["--head-kwargs", "num_iters=2", "hidden_dim=16"]
    monkeypatch.chdir(tmp_path)
    run([*shlex.split(training), *small], tmp_path)
    (draw,) = (command for command in own_commands("plot") if command[2] == "attention")
    run(draw, tmp_path)
    assert (tmp_path / "attention.png").is_file()
    variables = {"picture": PIL.Image.new("RGB", (80, 60))}
    exec(compile(LOADING, "README.md", "exec"), variables)
    assert variables["image_sets"].shape == (1, 4, 128)
    assert variables["similarities"].shape == (1, 2)
    assert variables["similarities"].isfinite().all()


def test_every_command_is_known_here():
    assert len(own_commands("shards", "encode", "evaluate", "plot")) == sum(
        line.startswith("vl-plugins") for block in blocks("bash") for line in block.splitlines()
    )


def test_shards_commands(tmp_path, toy_scenes):
    """The lines that need no hub and no cluster, on the toy scenes under the names that they give."""
    for name in ("train2014", "train2017", "val2014", "val2017"):
        (tmp_path / "coco").mkdir(exist_ok=True)
        (tmp_path / "coco" / name).symlink_to(toy_scenes / name[:-4])
    for split in ("train", "val", "test"):
        (tmp_path / "coco" / split).symlink_to(toy_scenes / split)
    for name in ("flickr30k-images", "pictures", "Images", "flickr30k_images"):
        (tmp_path / name).symlink_to(toy_scenes / "train")
    document = json.loads((toy_scenes / "dataset_toy.json").read_text())
    (tmp_path / "dataset_coco.json").write_text(json.dumps({**document, "dataset": "coco"}))
    of_train = [item for item in document["images"] if item["filepath"] == "train"]
    (tmp_path / "dataset_flickr30k.json").write_text(json.dumps({"dataset": "flickr30k", "images": of_train}))
    (tmp_path / "annotations").mkdir()
    for split, splits in (("train", ["train"]), ("val", ["val", "test"])):
        (tmp_path / f"captions_{split}2017.json").write_text(json.dumps(official(document["images"], [split])))
        (tmp_path / f"annotations/captions_{split}2014.json").write_text(
            json.dumps(official(document["images"], splits))
        )
    write_table(tmp_path / "train.csv", "filepath", "title", document, "\t")
    write_table(tmp_path / "captions.txt", "image", "caption", document)
    write_table(tmp_path / "results.csv", "image_name", "comment", document, "| ")
    (tmp_path / "bottom-up-36").mkdir()
    for item in document["images"]:
        np.save(tmp_path / "bottom-up-36" / f"{item['cocoid']}.npy", np.ones((36, 8), np.float32))

    commands = [*own_commands("shards", text=DATA), *own_commands("shards")]
    commands = [command for command in commands if command[2] != "hugging-face" and "--engine" not in command]
    kinds = "coco coco-captions flickr30k table table table verify info coco"
    assert [command[2] for command in commands] == kinds.split()
    outputs = []
    for command in commands:
        small = [] if command[2] in ("verify", "info") else ["--samples-per-shard", "5"]
        outputs.append(run_own([*command, *small], tmp_path))
    sizes = {
        folder: Counter(shard.name.rpartition("-")[0] for shard in (tmp_path / folder).glob("*.tar"))
        for folder in ("shards", "shards-2017", "shards-features")
    }
    tables = {"train-train": 13, "captions-train": 13, "results-train": 13}
    assert sizes == {
        "shards": {"coco-train": 13, "coco-val": 5, "coco-test": 5, "flickr30k-train": 13} | tables,
        "shards-2017": {"coco-train2017": 13, "coco-val2017": 5},
        "shards-features": {"coco-train": 13, "coco-val": 5, "coco-test": 5},
    }
    assert "75 shards, 368 samples, 1,840 captions: no problems" in outputs[6]
    assert (tmp_path / "shards.png").is_file()


def save_checkpoint(folder):
    """Write one of a small model under the name of the guide."""
    register_models()
    checkpoint = folder / "logs/run/checkpoints/epoch_10.pt"
    checkpoint.parent.mkdir(parents=True)
    torch.save({"state_dict": open_clip.create_model("vl-tiny").state_dict()}, checkpoint)


def test_evaluate_commands(tmp_path, toy_shards):
    """Under the protocol for any shards, with a small model; the second file of features is the first one."""
    (tmp_path / "shards").mkdir()
    for number in range(5):
        source = toy_shards / f"toy-{('test', 'val')[number // 3]}-{number % 3:06d}.tar"
        (tmp_path / "shards" / f"coco-test-{number:06d}.tar").symlink_to(source)
    save_checkpoint(tmp_path)
    (tmp_path / "logs/run/params.txt").write_text("model: vl-tiny\n")
    several, encoding, one, comparing = (
        [argument.replace("coco-5k", "plain") for argument in command if argument not in ("coco-1k", "eccv")]
        for command in (*own_commands("evaluate")[:1], *own_commands("encode"), *own_commands("evaluate")[1:])
    )
    first = run_own([*several, "--device", "cpu"], tmp_path)
    run_own([*encoding, "--device", "cpu"], tmp_path)
    assert run_own(one, tmp_path).splitlines()[2].split()[1:] == first.splitlines()[2].split()[1:]
    shutil.copy(tmp_path / "vit.safetensors", tmp_path / "other.safetensors")
    second = run_own([argument.replace("other.npz", "other.safetensors") for argument in comparing], tmp_path)
    assert (tmp_path / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert "40 images, 200 captions" in first
    assert "RSUM" in first
    assert "ensemble" in second


def official(items, splits):
    """Return entries of Karpathy's format in that of COCO's own caption files."""
    items = [item for item in items if item["split"] in splits]
    return {
        "images": [{"id": item["cocoid"], "file_name": item["filename"]} for item in items],
        "annotations": [
            {"id": sentence["sentid"], "image_id": item["cocoid"], "caption": sentence["raw"]}
            for item in items
            for sentence in item["sentences"]
        ],
    }


def test_every_flag_exists():
    help_texts = [help_of("shards", source) for source in ("coco", "coco-captions", "table")]
    help_texts.append(help_of("--help", parse=parse_args))
    help_texts += [help_of("evaluate"), help_of("plot", "attention")]
    help_texts.append(build_towers_parser().format_help())
    help_texts += [(ROOT / "benchmarks" / f"{script}.py").read_text() for script in BENCHMARKS]
    flags = {flag for text in help_texts for flag in re.findall(r"--[a-z][a-z-]+", text)}
    flags |= {
        f"--{name.replace('_', '-')}"
        for name in {*NOT_OURS, "fsdp", "fsdp_no_reshard_after_forward", "max_image_pixels"}
    }  # of newer versions, too
    named = set(re.findall(r"`(--[a-z-]+)", TEXT))
    assert len(named) > 12
    assert named <= flags


def help_of(*command, parse=None):
    text = io.StringIO()
    with contextlib.redirect_stdout(text), pytest.raises(SystemExit):
        (parse or build_parser().parse_args)([*command, "--help"])
    return text.getvalue()
