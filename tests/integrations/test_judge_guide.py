"""The scripts of the guide run as they stand, with tiny models, and give the numbers of their hosts."""

import json
import random
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vl_plugins.cli import main

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "guides" / "judge.md").read_text(encoding="utf-8")
WORDS = "a and shape circle square triangle star red green blue yellow purple cyan large small left right".split()


def script(section):
    """Return the first Python block of a section."""
    body = re.search(rf"^##+ {section}\n(.*?)(?=^##)", TEXT, flags=re.MULTILINE | re.DOTALL)[1]
    return re.search(r"^```python\n(.*?)^```", body, flags=re.MULTILINE | re.DOTALL)[1]


def run(section, *arguments):
    variables = {"__name__": "__main__"}
    argv, sys.argv = sys.argv, ["embed.py", *arguments]
    try:
        exec(compile(script(section), "judge.md", "exec"), variables)
    finally:
        sys.argv = argv
    return variables


def evaluate(capsys, *arguments):
    """Return the metrics of each model."""
    capsys.readouterr()  # progress bars of the script
    assert main(["evaluate", "--json", *arguments]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return {row["name"]: row["metrics"]["plain"] for row in json.loads(printed.out)["results"]}


@pytest.fixture
def pictures(tmp_path, monkeypatch):
    """The current folder with 24 pictures of noise, ``captions.json``, and the same as Flickr30K's test split."""
    monkeypatch.chdir(tmp_path)
    generator = random.Random(0)
    noise = np.random.default_rng(0)
    captions_of = {}
    lines = ["image,caption"]
    (tmp_path / "flickr30k").mkdir()
    for number in range(24):
        name = f"flickr30k/{number}.jpg"
        low = Image.fromarray(noise.integers(0, 256, (4, 4, 3), np.uint8))
        low.resize((64, 64), Image.Resampling.NEAREST).save(name)
        captions_of[name] = [" ".join(generator.sample(WORDS, 8)) for _ in range(1 + number % 3)]
        lines += [f"{number}.jpg,{caption}" for caption in captions_of[name]]
    (tmp_path / "captions.json").write_text(json.dumps(captions_of), encoding="utf-8")
    (tmp_path / "flickr30k" / "flickr30k_test_karpathy.txt").write_text("\n".join(lines), encoding="utf-8")
    return captions_of


@pytest.fixture
def weights(tmp_path):
    """File with random weights of ``vl-tiny``, which open_clip knows from here on."""
    import open_clip
    import torch

    from vl_plugins.integrations.open_clip.models import register_models

    register_models()
    torch.save(open_clip.create_model("vl-tiny").state_dict(), tmp_path / "tiny.pt")
    return str(tmp_path / "tiny.pt")


def test_open_clip(pictures, weights, capsys):
    import open_clip
    import torch

    torch.save(open_clip.create_model("vl-tiny").state_dict(), "other.pt")
    run("Coming from open_clip", "vl-tiny", "other.pt", "b.npz")
    variables = run("Coming from open_clip", "vl-tiny", weights, "a.npz")
    metrics = evaluate(capsys, "--features", "a=a.npz", "b=b.npz")
    assert metrics["a"]["positive_similarity"] != metrics["b"]["positive_similarity"]
    assert (metrics["a"]["num_samples"], metrics["a"]["num_captions"]) == (24, 48)
    file = np.load("a.npz")
    assert file["image_ids"].tolist() == list(pictures)
    captions = variables["tokenizer"](pictures["flickr30k/2.jpg"])
    expected = variables["model"].encode_text(captions, normalize=True).detach().numpy()
    np.testing.assert_allclose(file["caption_features"][file["image_of_caption"] == 2], expected, atol=1e-5)


def test_clip_benchmark(pictures, weights, capsys):
    pytest.importorskip("clip_benchmark")
    from clip_benchmark.metrics.zeroshot_retrieval import evaluate as evaluate_there

    variables = run("Coming from CLIP_benchmark", "vl-tiny", weights, "a.npz")
    metrics = evaluate(capsys, "--normalize", "--features", "a.npz")["a"]
    host = (variables[name] for name in ("model", "batches", "tokenizer"))
    expected = evaluate_there(*host, device="cpu", amp=False, recall_k_list=[1, 5, 10])
    for k in (1, 5, 10):
        assert metrics[f"text_to_image_R@{k}"] == pytest.approx(expected[f"image_retrieval_recall@{k}"])
        assert metrics[f"image_to_text_R@{k}"] == pytest.approx(expected[f"text_retrieval_recall@{k}"])


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory):
    """Folder of a tiny CLIP with random weights."""
    reason = "needs pip install 'vl_plugins[sentence-transformers]'"
    pytest.importorskip("sentence_transformers", minversion="6.0", reason=reason)
    example = pytest.importorskip(
        "vl_plugins.integrations.examples.sentence_transformers_trainer", exc_type=ImportError
    )
    folder = tmp_path_factory.mktemp("clip")
    example.make_model(folder)
    return str(folder)


def test_sentence_transformers(pictures, clip_folder, capsys):
    variables = run("Coming from sentence-transformers", clip_folder, "a.npz")
    metrics = evaluate(capsys, "--features", "a.npz")["a"]
    similarity = variables["model"].similarity
    file = np.load("a.npz")
    scores = similarity(file["caption_features"], file["image_features"]).numpy()
    owners = file["image_of_caption"]
    assert metrics["text_to_image_R@1"] == pytest.approx((scores.argmax(1) == owners).mean())
    assert metrics["image_to_text_R@1"] == pytest.approx((owners[scores.argmax(0)] == np.arange(24)).mean())


@pytest.mark.slow
def test_mteb(pictures, clip_folder, capsys, monkeypatch):
    """Flickr30K's task with other pictures, and its recall by mteb itself."""
    mteb = pytest.importorskip("mteb", minversion="2.0", exc_type=ImportError)
    from datasets import Dataset
    from datasets import Image as ImageFeature
    from mteb.models import SentenceTransformerEncoderWrapper
    from mteb.tasks.retrieval.eng import Flickr30kT2IRetrieval

    ids = list(pictures)
    queries, answers = [], {}
    for image_id in ids[::-1]:  # another order than that of images
        for text in pictures[image_id]:
            queries.append({"id": f"q{len(queries)}", "text": text})
            answers[queries[-1]["id"]] = {image_id: 1}
    corpus = Dataset.from_dict({"id": ids, "image": ids}).cast_column("image", ImageFeature())

    def load_data(task, **_):
        split = {"corpus": corpus, "queries": Dataset.from_list(queries), "relevant_docs": answers, "top_ranked": None}
        task.dataset = {"default": {"test": split}}
        task.data_loaded = True

    monkeypatch.setattr(Flickr30kT2IRetrieval, "load_data", load_data)

    def get_model(folder):
        model = SentenceTransformerEncoderWrapper(folder, device="cpu")
        modalities = {"modalities": ["image", "text"]}  # mteb knows those of published models
        model.mteb_model_meta = model.mteb_model_meta.model_copy(update=modalities)
        return model

    monkeypatch.setattr(mteb, "get_model", get_model)
    variables = run("Coming from mteb", clip_folder, "a.npz")
    metrics = evaluate(capsys, "--normalize", "--features", "a.npz")["a"]
    results = mteb.evaluate(variables["model"], variables["task"], cache=None)
    (scores,) = results[0].scores["test"]
    for k in (1, 5, 10):
        name = f"recall_at_{k}"
        if name in scores:
            assert metrics[f"text_to_image_R@{k}"] == pytest.approx(scores[name], abs=1e-4)
    assert "recall_at_1" in scores


def test_other_names(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    vectors = np.eye(4, dtype=np.float32)
    np.savez("embeds.npz", image_embeds=vectors, text_embeds=vectors, image_of_caption=np.arange(4))
    run("Other names")
    assert evaluate(capsys, "--features", "features.npz")["features"]["rsum"] == 600


def test_folders(tmp_path, monkeypatch, capsys):
    """Random vectors, by the folder and by one file."""
    monkeypatch.chdir(tmp_path)
    run("Folders")
    images = np.concatenate([np.load(f"features/images/part_{number:06d}.npy") for number in range(4)])
    captions = np.concatenate([np.load(f"features/captions/part_{number:06d}.npy") for number in range(4)])
    owners = run("Without the image of each caption")["image_of_caption"]
    np.savez("one.npz", image_features=images, caption_features=captions, image_of_caption=owners)
    metrics = evaluate(capsys, "--normalize", "--features", "features", "one.npz")
    assert metrics["features"] == metrics["one"]
    assert metrics["one"]["num_samples"] == 100
