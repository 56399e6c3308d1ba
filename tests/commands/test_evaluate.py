"""``vl-plugins encode`` and ``vl-plugins evaluate``."""

import contextlib
import csv
import hashlib
import io
import json

import open_clip
import pytest
import torch
from clip_benchmark.metrics import zeroshot_retrieval

from tests.helpers.open_clip_training import checkpoint_with_heads
from tests.helpers.processes import in_processes
from vl_plugins.cli import main
from vl_plugins.data import ShardDataset, read_collection
from vl_plugins.distances import MatchProbability
from vl_plugins.integrations.loading import find_checkpoint, load_model
from vl_plugins.integrations.open_clip.models import register_models
from vl_plugins.retrieval import retrieval_metrics, similarity_ranks
from vl_plugins.retrieval.features import load_features, save_features


def clip(seed):
    register_models()
    torch.manual_seed(seed)
    return open_clip.create_model("vl-tiny")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Checkpoints: ``epoch_1.pt``, as a run of several processes writes it, another model, and one with sets."""
    folder = tmp_path_factory.mktemp("checkpoints") / "run"
    folder.mkdir()
    state = {f"module.{name}": tensor for name, tensor in clip(0).state_dict().items()}
    torch.save({"epoch": 1, "state_dict": state}, folder / "epoch_1.pt")
    torch.save({"epoch": 2, "state_dict": clip(1).state_dict()}, folder / "other.pt")
    similarity, options = MatchProbability(scale=3.0, shift=-0.5), {"num_slots": 3, "num_iters": 4}
    torch.save(checkpoint_with_heads(clip(0), "vl-tiny", "set", options, similarity), folder / "sets.pt")
    return folder


@pytest.fixture(scope="module")
def shards(toy_shards):
    return f"{toy_shards}/toy-val-{{000000..000002}}.tar"


@pytest.fixture(scope="module")
def flags(shards, folder):
    return ["evaluate", "--model", "vl-tiny", "--checkpoint", f"{folder}/epoch_1.pt", "--shards", shards]


@pytest.fixture
def encode(folder, shards, tmp_path, capsys):
    """Function that encodes with a checkpoint of the folder, and returns the file of features."""

    def run(checkpoint, *options, of=shards, suffix=".npz"):
        out = tmp_path / f"{checkpoint}{suffix}"
        model = () if checkpoint == "sets" else ("--model", "vl-tiny")
        assert main(["encode", f"{folder}/{checkpoint}.pt", of, str(out), *model, *options]) == 0
        assert capsys.readouterr().out.startswith(f"wrote {out}: 24 images, ")
        return out

    return run


@pytest.fixture
def evaluate(capsys):
    """Function that evaluates and returns the results by name, and the file of features if it is one."""

    def run(*arguments):
        assert main([*map(str, arguments), "--json"]) == 0
        return {result.pop("name"): result for result in json.loads(capsys.readouterr().out)["results"]}

    return run


def test_recalls_are_those_of_clip_benchmark(flags, folder, shards, evaluate):
    """Of the same model, from the pictures on; fractions, as there and in open_clip."""
    model, transform, tokenizer = load_model(folder / "epoch_1.pt", "vl-tiny")
    dataset = ShardDataset(shards, transform, tokenizer)
    batch = torch.stack([item.image for item in dataset]), [item.captions for item in dataset]
    expected = zeroshot_retrieval.evaluate(model, [batch], tokenizer, "cpu", amp=False, recall_k_list=[1, 5, 10])
    result = evaluate(*flags, "--batch-size", "7", "--workers", "2")["epoch_1"]
    metrics = result["metrics"]["plain"]
    for way, theirs in (("text_to_image", "image_retrieval"), ("image_to_text", "text_retrieval")):
        for k in (1, 5, 10):
            assert metrics[f"{way}_R@{k}"] == pytest.approx(expected[f"{theirs}_recall@{k}"], abs=1e-6)
    assert metrics["rsum"] == pytest.approx(100 * sum(expected.values()))
    assert (metrics["num_samples"], metrics["num_captions"]) == (24, 120)
    assert (result["model"], result["checkpoint"]) == ("vl-tiny", f"{folder}/epoch_1.pt")


@pytest.mark.parametrize("suffix", [".safetensors", ""], ids=["safetensors", "folder"])
def test_features_give_the_numbers_of_their_checkpoint(flags, shards, encode, evaluate, capsys, suffix):
    expected = {**evaluate(*flags)["epoch_1"], "file": str(encode("epoch_1", suffix=suffix))}
    for more in ((), ("--shards", shards)):
        assert evaluate("evaluate", "--features", expected["file"], *more) == {"epoch_1": expected}
    features = load_features(expected["file"])
    features.images.mul_(torch.linspace(1, 3, 24)[:, None])
    save_features(features, expected["file"])
    assert main(["evaluate", "--features", expected["file"]]) == 2
    assert "23 of 24 images are not, the first is row 1" in capsys.readouterr().err
    found = evaluate("evaluate", "--features", expected["file"], "--normalize")["epoch_1"]["metrics"]["plain"]
    assert found == pytest.approx(expected["metrics"]["plain"])


def test_an_ensemble_averages_similarities(flags, folder, encode, evaluate, capsys):
    """Of two models that are encoded and one whose sets come from a file, with the similarity that it has learned."""
    files = [encode(name) for name in ("sets", "epoch_1", "other")]
    checkpoints = [f"{folder}/epoch_1.pt", f"ours={folder}/other.pt"]
    arguments = [*flags, "--checkpoint", *checkpoints, "--features", str(files[0]), "--ensemble"]
    results = evaluate(*arguments)
    assert [*results] == ["ensemble", "sets", "epoch_1", "ours"]
    sets, one, two = map(load_features, files)
    assert sets.images.shape == (24, 3, 128)
    assert sets.description["checkpoint_sha256"] == hashlib.sha256((folder / "sets.pt").read_bytes()).hexdigest()
    of_sets = MatchProbability(3.0, -0.5, learnable=False)(sets.images, sets.captions)
    mean = (of_sets + one.images @ one.captions.T + two.images @ two.captions.T) / 3
    for name, similarities in (("ensemble", mean), ("sets", of_sets)):
        expected = retrieval_metrics(similarity_ranks(similarities, one.image_of_caption))
        found = results[name]["metrics"]["plain"]
        assert {key: found[key] for key in expected} == pytest.approx(expected, rel=1e-5)
    report = files[0].with_name("report.html")
    assert main([*arguments, "--report", str(report)]) == 0
    first, _, *rows = capsys.readouterr().out.splitlines()
    assert first == "plain: 24 images, 120 captions"
    assert [row.split()[0] for row in rows[:4]] == [*results]
    assert rows[4].startswith("circular variance of the sets of sets: images 0.")
    assert rows[5:7] == ["", "plain, compared with sets:"]
    assert [row.split()[0] for row in rows[8:11]] == ["ensemble", "epoch_1", "ours"]
    page = report.read_text()
    assert "<title>Image-text retrieval of 4 models, protocol plain</title>" in page
    assert page.count("data:image/jpeg;base64,") == 24  # each picture once
    assert f"checkpoint {folder}/other.pt, " in page


def test_pretrained_tags_of_one_architecture_have_a_row_each(shards, evaluate, monkeypatch):
    def published(model, tag, **options):
        return clip(len(tag)), open_clip.image_transform(64, is_train=False)

    monkeypatch.setattr(open_clip, "create_model_from_pretrained", published)
    monkeypatch.setattr(open_clip, "get_tokenizer", lambda *_, get=open_clip.get_tokenizer, **__: get("vl-tiny"))
    tags = ["openai", "laion2b_s34b_b79k"]
    results = evaluate("evaluate", "--model", "ViT-B-32", "--checkpoint", *tags, "--shards", shards)
    assert [*results] == tags
    assert len({result["metrics"]["plain"]["positive_similarity"] for result in results.values()}) == 2


def test_the_checkpoint_of_a_run_folder(folder, flags, tmp_path, capsys):
    """The newest of open_clip, by number, and the best of the trainer for pytorch-metric-learning."""
    run, checkpoints = tmp_path / "run", tmp_path / "run" / "checkpoints"
    checkpoints.mkdir(parents=True)
    for name in ("epoch_9.pt", "epoch_10.pt"):
        (checkpoints / name).symlink_to(folder / "epoch_1.pt")
    assert main([*flags, "--checkpoint", str(run)]) == 0
    assert capsys.readouterr().out.startswith(f"run: {checkpoints}/epoch_10.pt\nplain: 24 images")
    assert main([*flags, "--checkpoint", str(run), "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert (result["file"], result["checkpoint"]) == (str(run), str(checkpoints / "epoch_10.pt"))
    for file in (checkpoints / "epoch_latest.pt", tmp_path / "towers" / "latest.pt", tmp_path / "towers" / "best.pt"):
        file.parent.mkdir(exist_ok=True)
        file.touch()
        assert find_checkpoint(run if file.parent == checkpoints else file.parent) == file


def run_in_process(rank, command):
    """The exit status and the output of one of several processes."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        return main(command), printed.getvalue()


@pytest.mark.parametrize(("processes", "batch_size"), [(2, 5), pytest.param(3, 20, marks=pytest.mark.slow)])
def test_processes_share_out_the_encoding(encode, folder, shards, tmp_path, processes, batch_size):
    """The files are equal, with their hashes, also where there are fewer batches than processes."""
    options, shared = ["--batch-size", str(batch_size)], tmp_path / "shared.safetensors"
    alone = encode("epoch_1", *options, suffix=".safetensors")
    command = ["encode", f"{folder}/epoch_1.pt", shards, str(shared), "--model", "vl-tiny", *options]
    first, *others = in_processes(run_in_process, processes, command, joined=False)
    assert first == (0, f"wrote {shared}: 24 images, 120 captions\n")
    assert others == [(0, "")] * (processes - 1)
    assert shared.read_bytes() == alone.read_bytes()


def test_suspects_are_the_captions_that_miss_their_image(encode, shards, tmp_path, capsys):
    """Of a model of random weights nearly all are, which the command says."""
    file = encode("epoch_1")
    arguments = ["evaluate", "--features", str(file), "--shards", shards]
    assert main([*arguments, "--suspects", f"{tmp_path}/suspects.csv", "--confidence", "0.25"]) == 0
    features = load_features(file)
    missed = similarity_ranks(features.similarities(), features.image_of_caption).text_to_image.rank > 1
    with open(tmp_path / "suspects.csv", newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    collection = read_collection(shards)
    owners = collection.image_of_caption.tolist()
    expected = {(str(collection.image_ids[owners[i]]), collection.captions[i]) for i in missed.nonzero().flatten()}
    assert {(row["image_id"], row["caption"]) for row in rows} == expected
    assert {row["confidence"] for row in rows} == {"0.25"}
    state = f"{len(rows)} suspect pairs of epoch_1 among 120 captions; with so many, the model is probably at fault"
    assert capsys.readouterr().err == f"wrote {tmp_path}/suspects.csv: {state}\n"


def test_features_of_other_shards(encode, toy_shards, tmp_path, capsys):
    """One image less, another order, other captions."""
    file, first = encode("epoch_1"), toy_shards / "toy-val-000000.tar"
    (tmp_path / first.name).write_bytes(first.read_bytes().replace(b"shape", b"thing"))
    for other, message in (
        (f"{toy_shards}/toy-val-{{000000..000001}}.tar", "image_ids: there are 24, expected 16"),
        ("::".join(f"{toy_shards}/toy-val-00000{index}.tar" for index in (1, 0, 2)), "image_ids: number 0 of 24 is "),
        (f"{tmp_path}/{first.name}::{toy_shards}/toy-val-{{000001..000002}}.tar", "the pictures or captions differ"),
    ):
        assert main(["evaluate", "--features", str(file), "--shards", other]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"vl-plugins evaluate: error: epoch_1 and {other} do not belong together: {message}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--model", "vl-tinny"], "unknown model 'vl-tinny' (did you mean 'vl-tiny'?)"),
        (["--checkpoint", "laion2c"], "checkpoint laion2c: no such file, nor a pretrained tag of vl-tiny"),
        (["--checkpoint", "."], "checkpoint best.pt: no such file"),
        (["--device", "foo"], "foo"),
        (["--shards", "no-such-{0..1}.tar"], "2 of 2 shards do not exist: no-such-0.tar"),
        (["--model", "ViT-S-32-alt"], "does not fit model ViT-S-32-alt"),
        (["--protocol", "coco-5k", "--checkpoint", "laion2c"], "protocol coco-5k is about 5,000 images, but "),
        (["--protocol", "plian"], "unknown protocol 'plian' (did you mean 'plain'?)"),
        (["--features", "no-such.npz"], "no-such.npz"),
        (["--checkpoint", "ensemble=a.pt"], "'ensemble' is the name of all models together"),
        (
            ["--checkpoint", "a={file}", "b={file}"],
            "{file} is given twice: as a and b, a model would be compared",
        ),
        (["--checkpoint", "a={file}", "a={file}"], "{file} is given twice: one training cannot be two seeds of a"),
        (["--shards", ""], "give --features, or --checkpoint with --shards"),
        ([], "give --features, or --checkpoint with --shards"),
    ],
)
def test_wrong_input(flags, folder, tmp_path, capsys, change, message, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = str(folder / "epoch_1.pt")
    change = [word.replace("{file}", file) for word in change]
    assert main([*flags, *change] if change else ["evaluate"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("vl-plugins evaluate: error: ")
    assert message.replace("{file}", file) in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("checkpoint", "message"),
    [
        ("{folder}/other.pt", "checkpoint {folder}/other.pt does not say which model it is of: give --model NAME"),
        ("openai", "checkpoint openai: no such file; a pretrained tag needs --model NAME"),
    ],
)
def test_a_model_that_cannot_be_told(folder, shards, capsys, checkpoint, message):
    assert main(["evaluate", "--checkpoint", checkpoint.format(folder=folder), "--shards", shards]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line == f"vl-plugins evaluate: error: {message.format(folder=folder)}"


def test_numbers_are_printed_before_the_report_is_written(encode, tmp_path, capsys):
    """What is known after an hour must not be lost to a disk without room. Without shards there are no examples."""
    file = encode("epoch_1")
    assert main(["evaluate", "--features", str(file), "--report", f"{tmp_path}/a.html"]) == 0
    assert "Without the shards there are no pictures" in (tmp_path / "a.html").read_text()
    (tmp_path / "file").touch()
    assert main(["evaluate", "--features", str(file), "--report", f"{tmp_path}/file/a.html"]) == 2
    printed = capsys.readouterr()
    assert "RSUM" in printed.out
    assert f"cannot write {tmp_path}/file/a.html: " in printed.err
