import csv
import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile

import open_clip
import pytest
import torch
from clip_benchmark.metrics import zeroshot_retrieval
from PIL import Image

from vl_plugins.cli import main
from vl_plugins.commands import evaluate
from vl_plugins.data import read_collection
from vl_plugins.distances import MatchProbability, match_probability
from vl_plugins.integrations.checkpoints import load_model
from vl_plugins.integrations.encoding import encode_shards
from vl_plugins.integrations.open_clip.heads import CLIPWithHeads
from vl_plugins.integrations.open_clip.models import register_models
from vl_plugins.retrieval import retrieval_metrics, similarity_ranks
from vl_plugins.retrieval.features import load_features
from vl_plugins.retrieval.protocols import PROTOCOLS


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A file as open_clip's trainer writes it in a run of several processes."""
    register_models()
    torch.manual_seed(0)
    state = open_clip.create_model("vl-tiny").state_dict()
    path = tmp_path_factory.mktemp("run") / "epoch_1.pt"
    torch.save({"epoch": 1, "state_dict": {f"module.{name}": tensor for name, tensor in state.items()}}, path)
    return path


@pytest.fixture(scope="module")
def shards(toy_shards):
    return f"{toy_shards}/toy-val-{{000000..000002}}.tar"


@pytest.fixture(scope="module")
def other_checkpoint(checkpoint):
    torch.manual_seed(1)
    path = checkpoint.with_name("epoch_2.pt")
    torch.save({"epoch": 2, "state_dict": open_clip.create_model("vl-tiny").state_dict()}, path)
    return path


@pytest.fixture(scope="module")
def head_checkpoint(checkpoint):
    """Of a model with sets and a similarity that has learned something."""
    clip = open_clip.create_model("vl-tiny")
    similarity = MatchProbability(scale=3.0, shift=-0.5)
    path = checkpoint.with_name("sets.pt")
    torch.save(
        {"state_dict": CLIPWithHeads(clip, "vl-tiny", {}, "set", {"num_slots": 3}, similarity).state_dict()}, path
    )
    return path


@pytest.fixture(scope="module")
def flags(shards, checkpoint):
    return ["evaluate", "--model", "vl-tiny", "--checkpoint", str(checkpoint), "--shards", shards, "--device", "cpu"]


def test_every_image_and_caption_is_encoded_once_in_order(shards, toy_shards, checkpoint):
    """Against encoding one image and one caption at a time."""
    loaded = load_model(checkpoint, "vl-tiny")
    model, transform, tokenizer = loaded
    collection = read_collection(shards)
    features, found = encode_shards(loaded, shards, batch_size=5, workers=2, device="cpu")
    assert found.records == collection.records
    assert features.image_of_caption.tolist() == [image for image in range(24) for _ in range(5)]
    assert features.image_ids == collection.image_ids
    assert features.caption_ids == collection.caption_ids

    expected_images, expected_captions = [], []
    with torch.no_grad():
        for index in range(3):
            with tarfile.open(toy_shards / f"toy-val-00000{index}.tar") as tar:
                for member in tar:
                    content = tar.extractfile(member).read()
                    if member.name.endswith(".png"):
                        picture = transform(Image.open(io.BytesIO(content)))
                        expected_images.append(model.encode_image(picture[None], normalize=True))
                    elif member.name.endswith(".json"):
                        for caption in json.loads(content)["captions"]:
                            expected_captions.append(model.encode_text(tokenizer([caption]), normalize=True))
    torch.testing.assert_close(features.images, torch.cat(expected_images), rtol=0, atol=1e-5)
    torch.testing.assert_close(features.captions, torch.cat(expected_captions), rtol=0, atol=1e-5)


def test_equals_clip_benchmark(flags, checkpoint, shards, toy_shards, capsys):
    """The metrics of clip_benchmark's evaluation of the same model, from the pictures on."""
    model, transform, tokenizer = load_model(checkpoint, "vl-tiny")
    samples = []
    for index in range(3):
        with tarfile.open(toy_shards / f"toy-val-00000{index}.tar") as tar:
            contents = {member.name: tar.extractfile(member).read() for member in tar}
        for name, content in contents.items():
            if name.endswith(".png"):
                captions = json.loads(contents[name.replace(".png", ".json")])["captions"]
                samples.append((transform(Image.open(io.BytesIO(content))), captions))
    batches = [
        (torch.stack([image for image, _ in part]), [captions for _, captions in part])
        for part in (samples[:10], samples[10:20], samples[20:])
    ]
    expected = zeroshot_retrieval.evaluate(model, batches, tokenizer, "cpu", amp=False, recall_k_list=[1, 5, 10])
    assert main([*flags, "--json", "--batch-size", "7", "--workers", "2"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["num_samples"], printed["num_captions"], printed["shards"]) == (24, 120, shards)
    (result,) = printed["results"]
    for way, theirs in (("text_to_image", "image_retrieval"), ("image_to_text", "text_retrieval")):
        for k in (1, 5, 10):
            recall = result["metrics"]["plain"][f"{way}_R@{k}"]
            assert recall == pytest.approx(100 * expected[f"{theirs}_recall@{k}"], abs=1e-4)
    assert (result["model"], result["checkpoint"]) == ("vl-tiny", str(checkpoint))
    assert result["checkpoint_sha256"] == hashlib.sha256(checkpoint.read_bytes()).hexdigest()
    metrics = result["metrics"]["plain"]
    assert metrics["rsum"] == pytest.approx(100 * sum(expected.values()))

    assert main([*flags, "--max-captions", "2", "--workers", "0"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("24 images, 48 captions\n")
    assert "RSUM" in output


def test_saved_features_give_the_same_numbers(flags, shards, tmp_path, capsys):
    file = tmp_path / "features.npz"
    assert main([*flags, "--json", "--save-features", str(file)]) == 0
    expected = json.loads(capsys.readouterr().out)["results"][0]
    for more in ([], ["--shards", shards]):
        assert main(["evaluate", "--features", str(file), "--json", *more]) == 0
        found = json.loads(capsys.readouterr().out)["results"][0]
        assert found == {**expected, "name": "features", "features": str(file)}


def test_sets_are_compared_by_their_similarity(head_checkpoint, shards, tmp_path, capsys):
    """In memory and from a file, with the parameters that the similarity has learned."""
    file = tmp_path / "sets.safetensors"
    flags = ["evaluate", "--shards", shards, "--device", "cpu", "--checkpoint", str(head_checkpoint)]
    assert main([*flags, "--json", "--save-features", str(file)]) == 0
    encoded = json.loads(capsys.readouterr().out)["results"][0]
    assert main(["evaluate", "--features", str(file), "--json"]) == 0
    read = json.loads(capsys.readouterr().out)["results"][0]
    assert read["metrics"] == encoded["metrics"]

    features = load_features(file)
    assert features.images.shape == (24, 3, 128)
    similarities = match_probability(features.images, features.captions, 3.0, -0.5)
    expected = retrieval_metrics(similarity_ranks(similarities, features.image_of_caption, negatives=5))
    for name, value in expected.items():
        assert encoded["metrics"]["plain"][name] == pytest.approx(value, rel=1e-5), name
    for kind, sets in (("image", features.images), ("caption", features.captions)):
        variance = (1 - sets.mean(dim=1).norm(dim=1)).mean().item()
        assert encoded[f"{kind}_circular_variance"] == pytest.approx(variance, rel=1e-4)

    assert main(flags) == 0
    assert "circular variance of the sets: images 0." in capsys.readouterr().out


def test_an_ensemble_averages_similarities(flags, checkpoint, other_checkpoint, head_checkpoint, tmp_path, capsys):
    """Of two models that are encoded and one whose sets come from a file."""
    files = [tmp_path / "one.npz", tmp_path / "two.safetensors", tmp_path / "sets.npz"]
    shards = flags[flags.index("--shards") + 1]
    sets = ["--checkpoint", str(head_checkpoint), "--save-features", str(files[2])]
    assert main(["evaluate", "--shards", shards, "--device", "cpu", *sets]) == 0
    capsys.readouterr()
    both = [str(checkpoint), f"ours={other_checkpoint}"]
    names = ["sets", checkpoint.parent.name, "ours", "ensemble"]
    arguments = ["evaluate", "--model", "vl-tiny", "--checkpoint", *both, "--features", str(files[2]), "--ensemble"]
    arguments += ["--shards", shards, "--device", "cpu"]
    assert main([*arguments, "--json", "--save-features", *map(str, files[:2])]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert [result["name"] for result in results] == names

    one, two, with_sets = map(load_features, files)
    mean = match_probability(with_sets.images, with_sets.captions, 3.0, -0.5)
    mean = (mean + one.images @ one.captions.T + two.images @ two.captions.T) / 3
    expected = retrieval_metrics(similarity_ranks(mean, one.image_of_caption, negatives=5))
    for name, value in expected.items():
        assert results[3]["metrics"]["plain"][name] == pytest.approx(value, rel=1e-5), name
    assert len({result["metrics"]["plain"]["positive_similarity"] for result in results}) == 4

    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:6]] == names


@pytest.mark.parametrize(
    ("processes", "batch_size"),
    [("2", "5"), pytest.param("3", "20", marks=pytest.mark.slow, id="fewer-batches-than-processes")],
)
def test_processes_share_out_the_encoding(flags, tmp_path, processes, batch_size):
    alone, shared = tmp_path / "alone.safetensors", tmp_path / "shared.safetensors"
    flags = [*flags, "--batch-size", batch_size, "--workers", "2", "--save-features"]
    assert main([*flags, str(alone)]) == 0
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", processes]
    finished = subprocess.run(
        [sys.executable, *launcher, "-m", "vl_plugins.cli", *flags, str(shared)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("24 images, 120 captions") == 1
    assert shared.read_bytes() == alone.read_bytes()


@pytest.mark.slow
def test_all_processes_end_when_the_first_finds_something_wrong(flags, tmp_path):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    finished = subprocess.run(
        [sys.executable, *launcher, "-m", "vl_plugins.cli", *flags, "--protocol", "flickr30k-1k"],
        capture_output=True,
        text=True,
    )
    assert finished.returncode != 0
    assert finished.stderr.count("vl-plugins evaluate: error: ") == 1
    assert "protocol flickr30k-1k is about 1,000 images" in finished.stderr


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--model", "vl-tinny"], "unknown model 'vl-tinny' (did you mean 'vl-tiny'?)"),
        (["--checkpoint", "laion2c"], "checkpoint laion2c: no such file, nor a pretrained tag of vl-tiny"),
        (["--device", "foo"], "--device foo: "),
        (["--ranking-device", "foo"], "--ranking-device foo: "),
        (["--shards", "no-such-{0..1}.tar"], "2 of 2 shards do not exist: no-such-0.tar"),
        (["--model", "ViT-S-32-alt"], "does not fit model ViT-S-32-alt"),
        (["--max-captions", "0"], "--max-captions must be at least 1"),
        (["--protocol", "coco-5k"], "protocol coco-5k is about 5,000 images, but "),
        (
            ["--ensemble"],
            "--ensemble averages the similarities of two or more checkpoints or files of features, got one",
        ),
        (["--normalize"], "--normalize is for --features"),
        (["--model", "vl-tiny", "vl-tiny"], "give one --model for all checkpoints or one for each, got 2 for 1"),
        (["--save-features", "a.npz", "b.npz"], "--save-features needs one file for each checkpoint, got 2 for 1"),
        (["--save-features", "a.pt"], "a file of features must end in .npz or .safetensors, got a.pt"),
        (["--report", "report.pdf"], "report.pdf"),
        (["--features", "no-such.npz"], "--features no-such.npz: no such file"),
        (["--batch-size", "0"], "--batch-size must be at least 1, got 0"),
    ],
)
def test_wrong_input(flags, tmp_path, capsys, change, message, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*flags, *change]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("vl-plugins evaluate: error: ")
    assert message in line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give --checkpoint with --shards, or --features"),
        (["--checkpoint", "a.pt"], "--checkpoint needs --shards"),
        (["--features", "a.npz", "--model", "vl-tiny"], "--model needs --checkpoint"),
        (["--features", "a.npz", "a.npz"], "a.npz is given twice"),
        (["--features", "a=a.npz", "a=b.npz"], "a is given twice"),
        (["--features", "ensemble=a.npz"], "'ensemble' is the name of all models together"),
        (
            ["--checkpoint", "a.pt", "b.pt", "--shards", "a.tar", "--save-features", "c.npz", "c.npz"],
            "c.npz is given twice",
        ),
    ],
)
def test_flags_that_do_not_belong_together(capsys, arguments, message):
    assert main(["evaluate", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_the_help_names_all_protocols(capsys):
    assert tuple(PROTOCOLS) == evaluate.PROTOCOLS
    with pytest.raises(SystemExit):
        main(["evaluate", "--help"])
    printed = capsys.readouterr().out
    assert all(f"\n  {name} " in printed for name in PROTOCOLS)


@pytest.mark.parametrize(("damage", "workers"), [("archive", "0"), ("picture", "0"), ("picture", "2")])
def test_a_damaged_shard_is_one_line(tmp_path, flags, toy_shards, capsys, damage, workers):
    shard = tmp_path / "toy-val-000000.tar"
    data = (toy_shards / shard.name).read_bytes()
    if damage == "archive":
        shard.write_bytes(data[:10_000])
        message = f"cannot read {shard}: it is cut off or damaged: "
    else:
        start = data.index(b"IDAT", data.index(b"IDAT") + 1)  # of the second picture
        shard.write_bytes(data[:start] + bytes(40) + data[start + 40 :])
        message = f"cannot read image 1, in {shard}: "
    assert main([*flags, "--shards", str(shard), "--workers", workers, "--save-features", f"{tmp_path}/a.npz"]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines()[-1].startswith(f"vl-plugins evaluate: error: {message}")
    assert not (tmp_path / "a.npz").exists()


def test_numbers_are_printed_before_anything_is_written(flags, tmp_path, capsys):
    """What is known after an hour must not be lost to a disk without room."""
    (tmp_path / "file").touch()
    assert main([*flags, "--save-features", str(tmp_path / "file" / "a.npz")]) == 2
    printed = capsys.readouterr()
    assert "RSUM" in printed.out
    assert f"cannot write {tmp_path}/file/a.npz: " in printed.err


def test_rows_of_a_csv_are_not_evaluated_again(flags, checkpoint, other_checkpoint, shards, tmp_path, capsys):
    def rows():
        with (tmp_path / "results.csv").open(newline="") as file:
            return list(csv.DictReader(file))

    def evaluate(*more):
        status = main([*flags, "--csv", str(tmp_path / "results.csv"), *map(str, more)])
        assert status == 0
        return capsys.readouterr()

    printed = evaluate("--json", "--save-features", tmp_path / "a.npz").out
    (result,) = json.loads(printed)["results"]
    (row,) = rows()
    assert (row["protocol"], row["shards"], row["precision"]) == ("plain", shards, "fp32")
    assert row["checkpoint_sha256"] == hashlib.sha256(checkpoint.read_bytes()).hexdigest()
    assert {name: float(row[name]) for name in result["metrics"]["plain"]} == result["metrics"]["plain"]

    output = evaluate()
    assert output.out == ""
    assert output.err.splitlines()[-1] == "nothing is left to evaluate; --force evaluates again"
    printed = evaluate("--checkpoint", checkpoint, other_checkpoint, "--features", tmp_path / "a.npz")
    assert f"{checkpoint}: {tmp_path}/results.csv has the results" in printed.err
    assert [row["checkpoint"] for row in rows()] == [str(checkpoint), str(tmp_path / "a.npz"), str(other_checkpoint)]
    assert rows()[1]["rsum"] == row["rsum"]
    evaluate("--force", "--max-captions", "2")
    evaluate("--max-captions", "2")
    assert [row["max_captions"] for row in rows()] == ["", "", "", "2"]
    assert len(rows()[0]) == len(rows()[3])
    ensemble = ["--checkpoint", checkpoint, other_checkpoint, "--ensemble"]
    evaluate(*ensemble)
    assert rows()[-1]["checkpoint"] == f"{checkpoint} + {other_checkpoint}"
    number = len(rows())
    evaluate(*ensemble)
    assert len(rows()) == number
    (tmp_path / "results.csv").write_text("a,b\n1,2\n")
    assert main([*flags, "--csv", str(tmp_path / "results.csv")]) == 2
    assert "results.csv is not a file of --csv: its first line must name the columns" in capsys.readouterr().err


def test_queries_in_the_report(head_checkpoint, shards, toy_shards, tmp_path, capsys):
    """Against the similarity of the model itself."""
    with tarfile.open(toy_shards / "toy-val-000001.tar") as tar:
        (tmp_path / "query.png").write_bytes(tar.extractfile(next(m for m in tar if m.name.endswith("png"))).read())
    flags = ["evaluate", "--checkpoint", str(head_checkpoint), "--shards", shards, "--device", "cpu"]
    queries = ["a red <b>circle</b>", str(tmp_path / "query.png")]
    assert main([*flags, "--report", str(tmp_path / "a.html"), "--queries", *queries]) == 0
    page = (tmp_path / "a.html").read_text()
    section = page[page.index('<section id="queries">') : page.index('<section id="examples">')]
    assert section.count("<h3>") == 2
    assert f' title="{head_checkpoint}">{head_checkpoint.parent.name}</th>' in page
    assert "a red &lt;b&gt;circle&lt;/b&gt;" in section
    assert section.count("data:image/jpeg;base64,") == 10
    model, transform, tokenizer = loaded = load_model(head_checkpoint)
    features, collection = encode_shards(loaded, shards)
    with torch.no_grad(), Image.open(tmp_path / "query.png") as image:
        rows = model.encode_text(tokenizer(queries[:1]), True), model.encode_image(transform(image)[None], True)
    shown = re.findall(r">image (\S+)<br/>([\d.-]+)</span>", section)
    captions = re.findall(r'<span dir="auto">(.*?)</span>', section)
    for number, row in enumerate(rows):
        values, indices = model.similarity(row, features.images).topk(5)
        expected = [features.image_ids[index] for index in indices[0].tolist()]
        assert [id for id, _ in shown[5 * number :][:5]] == [*map(str, expected)]
        assert [float(value) for _, value in shown[5 * number :][:5]] == pytest.approx(values[0].tolist(), abs=1e-3)
        nearest = model.similarity(row, features.captions).argmax()
        assert captions[5 * number] == collection.captions[nearest]
    assert main([*flags, "--queries", "a"]) == 2
    assert "--queries needs --report" in capsys.readouterr().err
