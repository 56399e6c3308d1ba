import shutil
from argparse import Namespace
from pathlib import Path

import open_clip_train.main
import pytest
import torch

from tests.helpers.archives import encode_archive, encode_picture
from tests.helpers.open_clip_data_flags import data_flags, without_rule
from tests.reference import losses as reference
from vl_plugins.errors import UserError
from vl_plugins.integrations.open_clip import host
from vl_plugins.integrations.open_clip.batch_record import BatchRecord
from vl_plugins.integrations.open_clip.data import AllCaptions, Reader, choose_reader, get_data
from vl_plugins.integrations.open_clip.loss import build_loss
from vl_plugins.integrations.open_clip.options import PluginOptions

UNIFIED = PluginOptions(loss="unified")
RANDOM = PluginOptions(captions_per_image="random")


@pytest.fixture
def args(toy_shards):
    def build(*flags):
        data = ["--train-data", f"{toy_shards}/toy-train-{{000000..000007}}.tar"]
        data += ["--val-data", f"{toy_shards}/toy-val-{{000000..000002}}.tar"]
        arguments = host.parse_args([*data, "--batch-size", "8", "--workers", "0", *flags])
        return Namespace(**vars(arguments), rank=0, world_size=1, distributed=False)

    return build


@pytest.mark.parametrize(
    ("options", "flags", "captions_per_image", "validation"),
    [
        (PluginOptions(), [], None, False),
        (UNIFIED, [], "random", True),
        (PluginOptions(loss="unified", captions_per_image="3"), [], "3", True),
        (UNIFIED, ["--dataset-resampled"], None, True),
        (UNIFIED, ["--dataset-type", "synthetic"], None, False),
    ],
)
def test_who_reads_what(args, options, flags, captions_per_image, validation):
    assert who_reads(options, args(*flags)) == (captions_per_image, validation)


def who_reads(options, args):
    """Return the captions per image if our reader serves the training split, and whether it serves the other."""
    reader = choose_reader(options, args)
    assert (reader.make_sampler is None) == (reader.captions_per_image is None)
    return reader.captions_per_image, reader.validation is not None


def test_shards_without_lists_of_captions_are_left_to_open_clip_unless_captions_are_asked_for(args, tmp_path):
    for split in ("train", "val"):
        members = [(f"{number}.{name}", content) for number in range(9) for name, content in SAMPLE]
        (tmp_path / f"{split}.tar").write_bytes(encode_archive(members))
    arguments = args("--train-data", f"{tmp_path}/train.tar", "--val-data", f"{tmp_path}/val.tar")
    assert who_reads(UNIFIED, arguments) == (None, False)
    assert who_reads(RANDOM, arguments) == ("random", False)
    # Shards of version 0.2, which have lists and no index.
    for split in ("train", "val"):
        members = [(f"{number}.{name}", content) for number in range(9) for name, content in [*SAMPLE, LIST]]
        (tmp_path / f"{split}.tar").write_bytes(encode_archive(members))
    assert who_reads(UNIFIED, arguments) == ("random", True)


SAMPLE = [("png", encode_picture(mode="RGB")), ("txt", "a dog")]
LIST = ("json", {"captions": ["a dog", "a cat"]})


@pytest.mark.parametrize("split", ["train", "val"])
@pytest.mark.parametrize("damage", ["cut off", "first picture"])
def test_damaged_shards_are_found_before_training(args, toy_shards, tmp_path, split, damage):
    shutil.copytree(toy_shards, tmp_path, dirs_exist_ok=True)
    flags = [f"--{split}-data", f"{tmp_path}/toy-{split}-{{000000..000002}}.tar"]
    assert who_reads(UNIFIED, args(*flags)) == ("random", True)
    shard = tmp_path / f"toy-{split}-00000{1 if damage == 'cut off' else 0}.tar"
    data = shard.read_bytes()
    shard.write_bytes(data[:4000] if damage == "cut off" else data.replace(b"IHDR", b"ihdr", 1))
    with pytest.raises(UserError, match=f"{shard}.*({'bytes' if damage == 'cut off' else 'cannot identify'})"):
        choose_reader(UNIFIED, args(*flags))


@pytest.mark.parametrize(
    "options", [{"allow_duplicate_captions": True}, {"on_read_error": "raise"}], ids=["duplicates", "on-read-error"]
)
def test_flags_of_the_training_reader_need_it(args, options):
    assert who_reads(PluginOptions(loss="unified", **options), args()) == ("random", True)
    flag = "--" + next(iter(options)).replace("_", "-")
    needs = f"{flag} is for training shards that the reader of vl_plugins reads, .* give --captions-per-image too"
    nothing_to_train = args()
    nothing_to_train.train_data = None
    for arguments in (args(), args("--dataset-resampled"), args("--train-data", "captions.csv"), nothing_to_train):
        with pytest.raises(UserError, match=needs):
            choose_reader(PluginOptions(**options), arguments)
    assert who_reads(PluginOptions(captions_per_image="first", **options), args()) == ("first", True)


def test_our_reader_has_a_rule_for_every_data_flag_of_the_installed_version():
    """A flag of a new version that is in none of the three would be ignored without a word."""
    flags = data_flags(Path(open_clip_train.main.__file__).parent, host.parser_help())
    assert {"train_data", "batch_size", "csv_separator", "val_num_samples"} <= flags
    assert without_rule(flags) == set()


@pytest.mark.parametrize("flags", ["--train-data-upsampling-factors 1::2", "--train-num-samples 8"])
def test_other_orders_need_the_reader_of_open_clip(args, flags):
    arguments = args(*flags.split())
    with pytest.raises(
        UserError,
        match=f"{flags.split()[0]} is for open_clip's reader: that of vl_plugins, which reads --train-data here, reads "
        "every image once in an epoch; leave the flag out",
    ):
        choose_reader(UNIFIED, arguments)
    assert who_reads(PluginOptions(), arguments) == (None, False)
    arguments.train_data = None
    assert who_reads(UNIFIED, arguments) == (None, True)


def test_the_limit_of_pixels_is_that_of_open_clip(args):
    """A flag of 4.x; toy scenes have 64 x 64 pixels. All of a validation split counts."""
    arguments = args("--warmup", "1")
    arguments.max_image_pixels = 64 * 64 - 1
    data = read(arguments, UNIFIED)
    with pytest.raises(UserError, match="64 x 64 pixels are more than 4095"):
        list(data["train"].dataloader)
    assert sum(len(images) for images, *_ in data["val"].dataloader) == 24
    for limit in (64 * 64, 0):
        arguments.max_image_pixels = limit
        assert len(list(read(arguments, UNIFIED)["train"].dataloader)) == 8


def identity(image):
    return torch.full((3, 4, 4), float(image.width))


def tokenizer(texts):
    return torch.tensor([[len(text), hash(text)] for text in texts])


def captions(number, **options):
    return PluginOptions(loss="unified", captions_per_image=number, **options)


def read(args, options, record=None):
    return get_data(
        args,
        (identity, identity),
        tokenizer=tokenizer,
        host=host.OpenCLIP3(),
        host_get_data=open_clip_train.main.get_data,
        reader=choose_reader(options, args),
        record=record or BatchRecord(args.accum_freq),
    )


def test_batches_and_counts_as_the_trainer_needs_them(args):
    data = read(args("--warmup", "1"), captions("3"))
    assert list(data) == ["train", "val"]
    train = data["train"].dataloader
    assert (train.num_batches, train.num_samples) == (8, 64)
    epochs = []
    for epoch in (0, 1):
        data["train"].set_epoch(epoch)
        batches = list(train)
        assert [(images.shape, texts.shape) for images, texts in batches] == [((8, 3, 4, 4), (24, 2))] * 8
        epochs.append(torch.cat([texts for _, texts in batches]))
    assert not torch.equal(*epochs)
    with_other_seed = read(args("--warmup", "1", "--seed", "1"), captions("3"))["train"].dataloader
    assert not torch.equal(torch.cat([texts for _, texts in with_other_seed]), epochs[0])

    assert isinstance(data["val"], AllCaptions)
    val = data["val"].dataloader
    assert val.num_samples == 24
    assert [len(batch.images) for batch in val] == [8] * 3


def test_processes_share_out_an_epoch(args):
    keys = []
    for rank in range(2):
        arguments, record = args("--warmup", "1"), BatchRecord()
        arguments.rank, arguments.world_size = rank, 2
        train = read(arguments, captions("first"), record)["train"].dataloader
        assert (train.num_batches, train.num_samples) == (4, 64)
        keys += [key for _ in train for key in record.keys]
    assert len(set(keys)) == len(keys) == 64


def test_the_step_and_its_images_are_recorded(args):
    record = BatchRecord(batches_per_step=3)
    assert record.image_ids is None
    data = read(args("--warmup", "1", "--accum-freq", "3"), captions("2"), record)["train"]
    for epoch in range(2):
        data.set_epoch(epoch)
        labels, keys = [], []
        for number, (images, _) in enumerate(data.dataloader):
            assert record.step == 2 * epoch + number // 3, "8 batches are 2 steps and a rest"
            recent = min(number + 1, 3)
            assert len(record.image_ids) == len(record.keys) == recent * len(images)
            labels.append(record.image_ids[-len(images) :])
            keys += record.keys[-len(images) :]
            assert torch.equal(record.image_ids, torch.cat(labels[-recent:]))
            assert record.keys == keys[-recent * len(images) :]
        assert sorted(torch.cat(labels).tolist()) == list(range(64))
        assert len(set(keys)) == 64


def test_an_epoch_draws_the_same_random_numbers_wherever_training_begins(args):
    data = read(args("--warmup", "1"), captions("first"))
    draws = {}
    for epoch in (0, 1, 2, 1, 0):
        data["train"].set_epoch(epoch)
        drawn = draws.setdefault(epoch, torch.rand(3))
        torch.rand(epoch + 1)
        if epoch in draws:
            data["train"].set_epoch(epoch)
            assert torch.equal(torch.rand(3), drawn)
    assert len({tuple(drawn.tolist()) for drawn in draws.values()}) == 3
    arguments = args("--warmup", "1")
    arguments.rank, arguments.world_size = 1, 2
    read(arguments, captions("first"))["train"].set_epoch(0)
    assert not torch.equal(torch.rand(3), draws[0]), "another process has others, of dropout for example"


def test_what_the_flags_ask_for_reaches_the_reader(args, toy_shards, tmp_path):
    shutil.copytree(toy_shards, tmp_path, dirs_exist_ok=True)
    arguments = args("--warmup", "1", "--train-data", f"{tmp_path}/toy-train-{{000000..000007}}.tar")
    loaders = [read(arguments, captions("first", on_read_error=way))["train"].dataloader for way in ("skip", "raise")]
    shard = tmp_path / "toy-train-000003.tar"
    shard.write_bytes(shard.read_bytes().replace(b"IHDR", b"ihdr"))
    assert len(list(loaders[0])) == 8
    with pytest.raises(UserError, match=r"cannot read image \d+, in .*toy-train-000003\.tar"):
        list(loaders[1])

    arguments = args("--warmup", "1", "--batch-size", "64")
    distinct = []
    for allowed in (False, True):
        data = read(arguments, captions("first", allow_duplicate_captions=allowed))
        ((_, texts),) = data["train"].dataloader
        distinct.append(len(texts.unique(dim=0)))
    assert distinct[1] < distinct[0] == 64


def test_images_of_a_group_are_positives_of_each_other(args, grouped_shards):
    """Value and gradient of the training loss are those of loops over pairs, with groups in place of images."""
    shards, groups = grouped_shards
    assert 1 < len(set(groups)) < 64
    arguments = args("--warmup", "1", "--train-data", shards, "--batch-size", "32")
    record = BatchRecord()
    loss = build_loss(PluginOptions(loss="unified", loss_kwargs={"scale": 20}), record=record)
    for images, texts in read(arguments, captions("2"), record)["train"].dataloader:
        generator = torch.Generator().manual_seed(0)
        drawn = [torch.randn(len(side), 8, generator=generator, dtype=torch.float64) for side in (images, texts)]
        features = [torch.nn.functional.normalize(side, dim=1).requires_grad_() for side in drawn]
        value = loss(*features, torch.tensor(1.0))

        batch = [groups[int(key.rpartition("-")[2])] for key in record.keys]
        assert len(set(batch)) < len(batch), "images of a group meet"
        pairs = [(row, column) for row in range(len(batch)) for column in range(2 * len(batch))]
        positives = {(row, column) for row, column in pairs if batch[row] == batch[column // 2]}
        unit = [torch.nn.functional.normalize(feature, dim=1) for feature in features]
        similarities = unit[0] @ unit[1].T
        values, derivatives = reference.pair_losses(
            reference.unified,
            similarities.tolist(),
            positives,
            set(pairs) - positives,
            symmetric=True,
            margin=0.2,
            scale=20,
        )
        expected = torch.zeros_like(similarities)
        for derivative in derivatives.values():
            for (row, column), number in derivative.items():
                expected[row, column] += number / len(values)
        torch.testing.assert_close(value.item(), sum(values.values()) / len(values))
        gradients = torch.autograd.grad(value, features)
        torch.testing.assert_close(gradients, torch.autograd.grad(similarities, features, expected))


def test_more_arguments_of_get_data_are_passed_on():
    given = {}

    def host_get_data(args, preprocess_fns, **options):
        given.update(options)
        return {}

    args = Namespace(train_data=None, val_data=None)
    ours = {"host": host.OpenCLIP3(), "reader": Reader(), "record": None, "host_get_data": host_get_data}
    assert get_data(args, (None, None), 3, "t", **ours, naflex_data_config="n") == {}
    assert given == {"epoch": 3, "tokenizer": "t", "naflex_data_config": "n"}
