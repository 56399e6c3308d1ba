import json
import shutil

import open_clip
import pytest
import torch

from vl_plugins.cli import main
from vl_plugins.data.reader import evaluation_pipeline
from vl_plugins.errors import UserError
from vl_plugins.integrations.open_clip.evaluation import evaluate_checkpoint
from vl_plugins.integrations.open_clip.models import register_models
from vl_plugins.integrations.open_clip.validation import encode


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


def test_encode_takes_every_image_and_caption_once_in_order(shards, toy_shards, checkpoint):
    """Against encoding one image and one caption at a time, and with ranks by a plain loop."""
    model, _, transform = open_clip.create_model_and_transforms("vl-tiny", pretrained=str(checkpoint))
    tokenizer = open_clip.get_tokenizer("vl-tiny")
    batches = torch.utils.data.DataLoader(
        evaluation_pipeline(shards, transform, tokenizer, batch_size=5), batch_size=None, num_workers=2
    )
    images, captions, image_of_caption = encode(model.eval(), batches, "cpu")
    assert image_of_caption.tolist() == [image for image in range(24) for _ in range(5)]

    import io
    import tarfile

    from PIL import Image

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
    torch.testing.assert_close(images, torch.cat(expected_images), rtol=0, atol=1e-5)
    torch.testing.assert_close(captions, torch.cat(expected_captions), rtol=0, atol=1e-5)


def test_evaluate_command(shards, checkpoint, capsys):
    flags = ["evaluate", "--model", "vl-tiny", "--checkpoint", str(checkpoint), "--shards", shards, "--device", "cpu"]
    assert main([*flags, "--json", "--batch-size", "7", "--workers", "2"]) == 0
    metrics = json.loads(capsys.readouterr().out)
    assert (metrics["num_samples"], metrics["num_captions"]) == (24, 120)
    recalls = [metrics[f"{way}_R@{k}"] for way in ("image_to_text", "text_to_image") for k in (1, 5, 10)]
    assert metrics["rsum"] == pytest.approx(sum(recalls))
    assert 0 < metrics["rsum"] < 600

    assert main([*flags, "--max-captions", "2", "--workers", "0"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("24 images, 48 captions\n")
    assert "RSUM" in output


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "vl-tinny"}, "unknown model 'vl-tinny' (did you mean 'vl-tiny'?)"),
        ({"checkpoint": "no-such.pt"}, "checkpoint no-such.pt: no such file, nor a pretrained tag of vl-tiny"),
        ({"shards": "no-such-{0..1}.tar"}, "2 of 2 shards do not exist: no-such-0.tar"),
        ({"model": "ViT-S-32-alt"}, "does not fit model ViT-S-32-alt"),
        ({"max_captions": 0}, "max_captions must be at least 1"),
    ],
)
def test_wrong_input(shards, checkpoint, change, message):
    arguments = {"model": "vl-tiny", "checkpoint": str(checkpoint), "shards": shards, "device": "cpu", **change}
    with pytest.raises(UserError) as raised:
        evaluate_checkpoint(**arguments)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_damaged_shard_is_one_line(tmp_path, checkpoint, toy_shards, capsys, workers):
    shard = tmp_path / "toy-val-000000.tar"
    shard.write_bytes((toy_shards / shard.name).read_bytes()[:10_000])
    shutil.copy(toy_shards / "sizes.json", tmp_path)
    flags = ["--model", "vl-tiny", "--checkpoint", str(checkpoint), "--shards", str(shard), "--device", "cpu"]
    assert main(["evaluate", *flags, "--workers", str(workers)]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(
        f"vl-plugins evaluate: error: cannot read the end of shard {shard}: ValueError('it is cut off"
    )


def test_a_file_that_is_no_checkpoint(tmp_path, shards):
    path = tmp_path / "epoch_1.pt"
    path.write_bytes(b"not a checkpoint")
    with pytest.raises(UserError, match=r"epoch_1\.pt"):
        evaluate_checkpoint("vl-tiny", str(path), shards, device="cpu")
