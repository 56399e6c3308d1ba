"""What is read: shards, tables and plain archives of images with their captions, and who reads them."""

import io
import json
import shutil
from argparse import Namespace
from pathlib import Path

import open_clip_train.main
import pytest
import torch
from open_clip_train import data as host_data
from PIL import Image, UnidentifiedImageError
from webdataset.autodecode import imagehandler

from tests.helpers.archives import encode_archive, encode_picture
from tests.helpers.open_clip_training import loss_options
from tests.helpers.pictures import EPS, replace_ghostscript
from vl_plugins.data import content_ids
from vl_plugins.errors import UserError
from vl_plugins.integrations.open_clip import pictures
from vl_plugins.integrations.open_clip.data import get_data, read_splits
from vl_plugins.integrations.open_clip.flags import parse_args
from vl_plugins.integrations.open_clip.loss import build_loss
from vl_plugins.integrations.open_clip.steps import Steps, token_ids

LOSS, RANDOM = ["--loss", "unified"], ["--captions-per-image", "random"]
OURS = [*LOSS, *RANDOM]


@pytest.fixture
def args(toy_shards):
    def build(*flags):
        data = ["--train-data", f"{toy_shards}/toy-train-{{000000..000007}}.tar"]
        data += ["--val-data", f"{toy_shards}/toy-val-{{000000..000002}}.tar"]
        arguments = parse_args([*data, "--batch-size", "8", "--workers", "0", *flags])
        return Namespace(**vars(arguments), rank=0, local_rank=0, world_size=1, distributed=False)

    return build


def read(args, steps=None):
    """Return the data as the trainer gets them; pictures are their width, and texts their length and hash."""
    return get_data(
        args,
        (lambda image: torch.full((3, 4, 4), float(image.width)),) * 2,
        tokenizer=lambda texts: torch.tensor([[len(text), hash(text)] for text in texts]),
        host_get_data=open_clip_train.main.get_data,
        splits=read_splits(args),
        steps=steps or Steps(args.accum_freq),
    )


@pytest.mark.parametrize(
    ("flags", "splits"),
    [
        ([], []),
        (LOSS, []),
        (RANDOM, ["train_data", "val_data"]),
        (OURS, ["train_data", "val_data"]),
        ([*OURS, "--dataset-type", "synthetic"], []),
        ([*OURS, "--train-data", ""], ["val_data"]),
        ([*OURS, "--val-data", "pipe:cat x.tar", "--dataset-type", "webdataset"], ["train_data"]),
    ],
)
def test_who_reads_what(args, flags, splits):
    assert [*read_splits(args(*flags))] == splits


def test_plain_archives_have_one_caption_for_each_image(args, tmp_path, caplog):
    for split in ("train", "val"):
        pairs = [((f"{n}.png", encode_picture(mode="RGB")), (f"{n}.txt", f"dog {n}")) for n in range(9)]
        (tmp_path / f"{split}.tar").write_bytes(encode_archive([member for pair in pairs for member in pair]))
    arguments = args("--train-data", f"{tmp_path}/train.tar", "--val-data", f"{tmp_path}/val.tar", *OURS)
    assert [*read_splits(arguments)] == ["train_data", "val_data"]
    ((images, texts),) = read(arguments)["train"].dataloader
    assert (len(images), len(texts.unique(dim=0))) == (8, 8)
    assert "9 of 9 images in" in caplog.text
    assert "have no list of captions" in caplog.text


def test_rows_of_a_table_with_one_path_are_one_image(args, tmp_path):
    rows = []
    for number in range(8):
        Image.new("RGB", (number + 1, 5)).save(tmp_path / f"{number}.png")
        rows += [f"{tmp_path}/{number}.png,dog {number}", f"{tmp_path}/{number}.png,cat {number}"]
    (tmp_path / "table.csv").write_text("\n".join(["path,text", *rows[::2], *rows[1::2]]))
    flags = ["--train-data", f"{tmp_path}/table.csv", "--captions-per-image", "all", "--csv-separator", ","]
    steps, arguments = Steps(), args(*flags, "--csv-img-key", "path", "--csv-caption-key", "text", *LOSS)
    ((images, texts),) = read(arguments, steps)["train"].dataloader
    numbers = [int(image[0, 0, 0]) - 1 for image in images]
    assert sorted(numbers) == steps.ids["labels"].sort().values.tolist() == [*range(8)]
    assert texts[:, 1].tolist() == [hash(f"{word} {number}") for number in numbers for word in ("dog", "cat")]


def test_a_table_is_validated_by_images_and_counted(args, tmp_path, caplog, monkeypatch):
    """With all captions of an image; texts that pandas takes for missing values are captions, and blank ones none."""
    monkeypatch.chdir(tmp_path)
    rows = ["filepath,title"]
    for number in range(9):
        Image.new("RGB", (number + 1, 5)).save(f"{number}.png")
        rows += [f"{number}.png,{caption}" for caption in ("NA", f"dog {number}")]
    Path("table.csv").write_text("\n".join([*rows, "3.png, ", '3.png,"a, b"']))
    Path("val.csv").write_text("\n".join(rows[:7]))
    flags = ["--csv-separator", ",", "--train-data", "table.csv", "--val-data", "val.csv"]
    caplog.set_level("INFO")
    data = read(args(*flags, "--batch-size", "4", *OURS))
    assert (
        "table.csv: 20 rows, 9 images with 2 to 3 captions; left out: 1, because it has no captions, or a blank one; "
        "every image needs at least one: table.csv: line 20 (3.png); an epoch reads 8 images, 2 steps, where "
        "open_clip's own reader takes 5"
    ) in caplog.text
    (batch,) = data["val"].dataloader
    assert batch.images[:, 0, 0, 0].tolist() == [1, 2, 3]
    assert batch.image_of_caption.tolist() == [0, 0, 1, 1, 2, 2]
    assert batch.texts[:, 1].tolist() == [hash(text) for n in range(3) for text in ("NA", f"dog {n}")]


def test_equal_captions_of_a_table_have_one_id(args, tmp_path):
    rows = [f"{tmp_path}/{number}.png\tdog {number // 2}" for number in range(16)]
    for number in range(16):
        Image.new("RGB", (5, 5)).save(tmp_path / f"{number}.png")
    (tmp_path / "table.tsv").write_text("\n".join(["filepath\ttitle", *rows]))
    steps = Steps()
    for _ in read(args(*OURS, "--train-data", f"{tmp_path}/table.tsv"), steps)["train"].dataloader:
        noted = steps.ids
        expected = content_ids([f"dog {label // 2}" for label in noted["labels"].tolist()])
        assert noted["ref_ids"].tolist() == expected
        assert noted["matching_ids"].shape == (8, 0)


@pytest.mark.parametrize("flags", [OURS, []], ids=["our reader", "open_clip's"])
def test_an_epoch_without_a_step_is_an_error(args, flags):
    """64 images in batches of 16 are four batches."""
    flags = flags or ["--train-num-samples", "64"]
    arguments = args(*flags, "--batch-size", "16", "--accum-freq", "4")
    assert "train" in read(arguments)
    arguments.accum_freq = 5
    with pytest.raises(UserError, match="--accum-freq 5: an epoch has 4 batches in each process, so no step would be"):
        read(arguments)


def test_samples_of_an_epoch_as_open_clip_counts_them(args):
    """64 images in epochs of 20, which are three batches of 8; a pass is not over before every image was read."""
    steps, numbers = Steps(), []
    train = read(args(*OURS, "--train-num-samples", "20", "--shuffle-window", "16"), steps)["train"]
    assert (train.dataloader.num_batches, train.dataloader.num_samples) == (3, 24)
    for epoch in range(3):
        train.set_epoch(epoch)
        for _ in train.dataloader:
            numbers += steps.ids["labels"].tolist()
    assert sorted(numbers[:64]) == [*range(64)]


def test_batches_as_the_trainer_needs_them(args):
    """Epochs differ, processes share them out, and every image and step is noted."""
    steps, shared = Steps(batches_per_step=3), []
    train = read(args(*OURS, "--captions-per-image", "3", "--accum-freq", "3"), steps)["train"]
    assert (train.dataloader.num_batches, train.dataloader.num_samples) == (8, 64)
    assert steps.ids == {}
    epochs = []
    for epoch in range(2):
        train.set_epoch(epoch)
        seen, ids = [], []
        for number, (images, texts) in enumerate(train.dataloader):
            assert (images.shape, texts.shape) == ((8, 3, 4, 4), (24, 2))
            assert steps.number == 2 * epoch + number // 3, "8 batches are 2 steps and a rest"
            noted = steps.ids
            assert [len(values) for values in noted.values()] == [size * min(number + 1, 3) for size in (8, 24, 8)]
            ids += noted["labels"][-8:].tolist()
            seen.append(texts)
        assert sorted(ids) == [*range(64)]
        epochs.append(torch.cat(seen))
    assert not torch.equal(*epochs)
    for rank in range(2):
        arguments, steps = args(*OURS), Steps()
        arguments.rank, arguments.world_size = rank, 2
        train = read(arguments, steps)["train"].dataloader
        assert (train.num_batches, train.num_samples) == (4, 64)
        shared += [number for _ in train for number in steps.ids["labels"].tolist()]
    assert sorted(shared) == [*range(64)]


def test_unreadable_pictures_are_skipped(args, toy_shards, tmp_path, caplog):
    shutil.copytree(toy_shards, tmp_path, dirs_exist_ok=True)
    loader = read(args(*OURS, "--train-data", f"{tmp_path}/toy-train-{{000000..000007}}.tar"))["train"].dataloader
    shard = tmp_path / "toy-train-000003.tar"
    shard.write_bytes(shard.read_bytes().replace(b"IHDR", b"ihdr"))
    assert len(list(loader)) == 8
    assert caplog.text.count("cannot read image") == 8


def test_pictures_of_too_many_pixels_are_skipped(args):
    """Those of the toy data have 4,096."""
    for split in ("train", "val"):
        assert len(list(read(args(*OURS, "--max-image-pixels", "4096"))[split].dataloader)) > 0
        with pytest.raises(UserError, match="the image has 64 x 64 pixels, more than max_image_pixels 4,095"):
            list(read(args(*OURS, "--max-image-pixels", "4095"))[split].dataloader)


@pytest.mark.parametrize("opens", [imagehandler("pilrgb"), lambda name, data: Image.open(io.BytesIO(data))])
def test_what_readers_of_open_clip_open(opens, tmp_path, monkeypatch):
    """Shards and tables, and other formats than ours."""
    has_run = replace_ghostscript(monkeypatch, tmp_path)
    monkeypatch.setattr(pictures, "HOST_CHECKS_PIXELS", False)  # as in open_clip 3.x
    monkeypatch.setattr(Image, "open", pictures.image_opener(12))
    for content in (encode_picture((4, 3)), encode_picture((4, 3), "GIF")):
        assert opens("x.jpg", content).size == (4, 3)
    with pytest.raises(UnidentifiedImageError):
        opens("x.jpg", EPS)
    assert not has_run.exists()
    with pytest.raises(ValueError, match="the image has 13 x 1 pixels, more than --max-image-pixels 12"):
        opens("x.jpg", encode_picture((13, 1)))


def write_recaptioned(file):
    """Samples with captions of two models in their json; the first has no long one."""
    members = []
    for number in range(8):
        fields = {"long": f"long {number}" if number else " ", "short": f"short {number}"}
        members += [
            (f"{number}.png", encode_picture((number + 1, 5), mode="RGB")),
            (f"{number}.json", json.dumps(fields)),
            (f"{number}.caption", f"own {number}"),
        ]
    file.write_bytes(encode_archive(members))
    return str(file)


@pytest.mark.parametrize(
    ("flags", "texts"),
    [
        # As open_clip 4.x reads them: one caption, the first that is not empty.
        (["--json-text-key", "long; short"], ["short 0", *(f"long {number}" for number in range(1, 8))]),
        (["--text-key", "txt;caption"], [f"own {number}" for number in range(8)]),
        (
            ["--caption-fields", "long", "short", "--captions-per-image", "all"],
            ["short 0", "short 0", *(f"{word} {number}" for number in range(1, 8) for word in ("long", "short"))],
        ),
    ],
)
def test_captions_in_other_files_and_fields(args, tmp_path, flags, texts):
    shard = write_recaptioned(tmp_path / "00000.tar")
    ((images, tokens),) = read(args(*OURS, "--train-data", shard, "--val-data", "", *flags))["train"].dataloader
    order = images[:, 0, 0, 0].argsort()
    tokens = tokens.unflatten(0, (8, -1))[order].flatten(0, 1)
    assert tokens[:, 1].tolist() == [hash(text) for text in texts]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--caption-fields", "long"],
            "--caption-fields is for our reader: add --train-data and --captions-per-image random",
        ),
        (["--no-index"], "--no-index is for our reader: add --train-data and --captions-per-image random"),
        (
            [*OURS, "--caption-fields", "long", "--json-text-key", "short"],
            "--caption-fields takes each field for a caption, and --json-text-key one of them; give one flag",
        ),
    ],
)
def test_flags_of_reading_that_do_not_fit(args, flags, message):
    with pytest.raises(UserError, match=message):
        read_splits(args(*flags))


@pytest.mark.skipif(hasattr(host_data, "JsonCaptionExtractor"), reason="open_clip 4.x has these flags")
@pytest.mark.parametrize("flag", ["--json-text-key", "--text-key", "--image-key"])
def test_flags_of_open_clip_4_are_no_flags_of_the_reader_of_3(args, flag):
    with pytest.raises(UserError, match=f"{flag} is for our reader: add --train-data and --captions-per-image random"):
        read_splits(args(flag, "other"))


@pytest.mark.parametrize("resampled", [[], ["--dataset-resampled"]])
def test_counts_that_open_clips_reader_needs(args, tmp_path, resampled):
    shards = [write_recaptioned(tmp_path / f"{number}.tar") for number in range(2)]
    flags = ["--train-data", "::".join(shards), "--val-data", "", *resampled]
    with pytest.raises(
        UserError, match=r"open_clip does not know how many samples .* add --train-num-samples N, or --cap"
    ):
        read_splits(args(*flags))
    flags += ["--train-num-samples", "8"]
    read_splits(args(*flags, "--workers", "2"))
    three = args(*flags, "--workers", "3")
    if resampled:
        read_splits(three)
    else:
        with pytest.raises(
            UserError, match="a shard for each worker of each process, 3 in all, and these are 2: lower"
        ):
            read_splits(three)
    (tmp_path / "sizes.json").write_text('{"0.tar": 8}')
    with pytest.raises(UserError, match=r"sizes.json has no number of samples of '1.tar': add --train-num-samples N"):
        read_splits(args("--train-data", "::".join(shards), "--val-data", ""))


def test_indexes_are_kept_unless_a_flag_says_otherwise(args, tmp_path):
    shard = write_recaptioned(tmp_path / "00000.tar")
    flags = [*OURS, "--train-data", shard, "--text-key", "caption"]
    read_splits(args(*flags, "--no-index"))
    assert not (tmp_path / "__index__").exists()
    read_splits(args(*flags))
    assert (tmp_path / "__index__/00000.tar.jsonl").exists()


@pytest.mark.parametrize("kind", ["folder", "json lines"])
def test_other_data_for_training_and_validation(args, tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    for split in ("train", "val"):
        (tmp_path / split).mkdir()
        rows = []
        for number in range(8):
            name = f"{split}/{number}.png"
            (tmp_path / name).write_bytes(encode_picture((number + 1, 5), mode="RGB"))
            (tmp_path / name).with_suffix(".txt").write_text(f"dog {number}\ncat {number}")
            rows.append(json.dumps({"image": name, "captions": [f"dog {number}", f"cat {number}"]}))
        (tmp_path / f"{split}.jsonl").write_text("\n".join(rows))
    names = ("train", "val") if kind == "folder" else ("train.jsonl", "val.jsonl")
    flags = ["--train-data", names[0], "--val-data", names[1], "--captions-per-image", "all"]
    data = read(args(*OURS, *flags))
    ((images, tokens),) = data["train"].dataloader
    assert (len(images), len(tokens.unique(dim=0))) == (8, 16)
    (batch,) = data["val"].dataloader
    assert batch.images[:, 0, 0, 0].tolist() == list(range(1, 9))
    assert len(batch.texts) == 16


@pytest.mark.parametrize("flags", [OURS, RANDOM])
def test_the_log_counts_pairs_with_equal_captions(args, tmp_path, caplog, flags):
    """For open_clip's own loss they are negatives."""
    caplog.set_level("INFO")
    for number in range(8):
        Image.new("RGB", (5, 5)).save(tmp_path / f"{number}.png")
    rows = [f"{tmp_path}/{number}.png\tdog {number // 2}" for number in range(8)]
    (tmp_path / "table.tsv").write_text("\n".join(["filepath\ttitle", *rows]))
    read(args(*flags, "--train-data", f"{tmp_path}/table.tsv"))
    meaning = "no negatives" if flags == OURS else "negatives, because this loss takes no ids"
    assert f"; 14 % of the pairs of images have an equal caption, and are {meaning}" in caplog.text


@pytest.mark.parametrize("pad_id", [0, 1, 49406])
def test_ids_of_tokenized_texts(pad_id):
    """Texts are equal if their tokens are, whatever their padding; and the order of tokens counts."""
    texts = [[5, 6, 7], [5, 6], [6, 5, 7], [5, 6, 7, 7], [7], [5, pad_id, 7], [5, 6, 7]]
    ids = {}
    for length in (5, 9):
        padded = torch.tensor([[*text, *[pad_id] * (length - len(text))] for text in texts])
        ids[length] = token_ids(padded, pad_id).tolist()
    assert ids[5] == ids[9]
    assert ids[5][0] == ids[5][-1]
    assert len(set(ids[5])) == len(texts) - 1
    assert min(ids[5]) >= 0


@pytest.mark.parametrize("accum_freq", [1, 2])
def test_equal_texts_of_open_clips_reader_have_one_id(args, tmp_path, accum_freq):
    for number in range(16):
        Image.new("RGB", (5, 5)).save(tmp_path / f"{number}.png")
    rows = [f"{tmp_path}/{number}.png\tdog {number // 4}" for number in range(16)]
    (tmp_path / "table.tsv").write_text("\n".join(["filepath\ttitle", *rows]))
    steps = Steps(accum_freq)
    flags = ["--train-data", f"{tmp_path}/table.tsv", "--val-data", "", "--accum-freq", str(accum_freq)]
    texts = []
    for batch in read(args(*LOSS, *flags), steps)["train"].dataloader:
        texts.append(batch[1] if isinstance(batch, tuple | list) else batch["text"])
        of_step = torch.cat(texts[-accum_freq:]).flatten(1)
        equal = (of_step[:, None] == of_step[None]).all(dim=2)
        known = steps.ids
        assert list(known) == ["ref_ids"]
        assert torch.equal(known["ref_ids"][:, None] == known["ref_ids"][None], equal)


def test_known_positives_behind_open_clips_reader():
    """The loss and its gradient are those of a loop that leaves pairs of equal texts out."""
    torch.manual_seed(0)
    images, texts = (torch.randn(6, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    tokens = torch.tensor([[3, 4], [5, 0], [3, 4], [6, 0], [5, 0], [7, 8]])
    steps = Steps()
    steps.batches.append({"ref_ids": token_ids(tokens, 0)})
    loss = build_loss(loss_options("vlc", {"scale": 20}), steps).double()
    value = loss(images, texts, torch.tensor(1.0))
    normalize = torch.nn.functional.normalize
    similarities = 20 * normalize(images) @ normalize(texts).T
    expected = 0
    for row in range(6):
        kept = [other for other in range(6) if other == row or not torch.equal(tokens[row], tokens[other])]
        expected += torch.logsumexp(similarities[row, kept], 0) - similarities[row, row]
        expected += torch.logsumexp(similarities[kept, row], 0) - similarities[row, row]
    assert torch.isclose(value, expected / 6)
    for gradient, other in zip(
        *(torch.autograd.grad(each, (images, texts)) for each in (value, expected / 6)), strict=True
    ):
        assert torch.allclose(gradient, other)


@pytest.mark.parametrize("flags", [[], LOSS, OURS])
def test_the_log_says_that_captions_are_not_read(args, tmp_path, caplog, toy_shards, flags):
    caplog.set_level("INFO")
    for number in range(8):
        Image.new("RGB", (5, 5)).save(tmp_path / f"{number}.png")
    rows = [f"{tmp_path}/{number % 8}.png\tdog {number}" for number in range(16)]
    (tmp_path / "table.tsv").write_text("\n".join(["filepath\ttitle", *rows]))
    read(args(*flags, "--train-data", f"{tmp_path}/table.tsv", "--train-num-samples", "8"))
    train = "table.tsv: images have up to 2 captions, and open_clip reads each as another image"
    val = "images have up to 5 captions, and open_clip ranks pairs, where other captions of an image are wrong"
    assert [text in caplog.text for text in (train, val)] == [flags == LOSS] * 2
    read(args(*flags, "--train-data", str(toy_shards / "toy-train-000000.tar"), "--train-num-samples", "8"))
    shards = "toy-train-000000.tar: images have up to 5 captions, and open_clip reads the first one only"
    assert (shards in caplog.text) is (flags == LOSS)
