"""The trainer of two modalities, with modules of plain torch, against a training loop written out."""

import pytest
import torch
from pytorch_metric_learning.losses import NTXentLoss
from pytorch_metric_learning.miners import BatchHardMiner
from torch import nn
from torch.utils.data import Dataset

from vl_plugins import create_loss
from vl_plugins.data import CaptionSampler, ShardDataset, training_loader
from vl_plugins.integrations.pytorch_metric_learning import CrossModalTrainer
from vl_plugins.losses.cross_modal import CrossModalLoss

BATCH, STEPS, CAPTIONS = 4, 3, 2


class Pairs(Dataset):
    """Features of images, with captions that are integers, and labels."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randn(BATCH * STEPS, 6, generator=generator, dtype=torch.float64)
        self.texts = torch.randint(0, 9, (BATCH * STEPS, CAPTIONS, 3), generator=generator)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index], self.texts[index], 10 + index


def collate(items):
    images, texts, labels = zip(*items, strict=True)
    return torch.stack(images), torch.cat(texts), torch.tensor(labels)


def modules():
    torch.manual_seed(1)
    return {
        "image_trunk": nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5)).double(),
        "image_embedder": nn.Linear(5, 4).double(),
        "text_trunk": nn.EmbeddingBag(9, 4).double(),
    }


def make_trainer(models, **options):
    defaults = {
        "optimizers": {
            f"{name}_optimizer": torch.optim.SGD(model.parameters(), lr=0.1)
            for name, model in models.items()
            if name not in options.get("freeze_these", ())
        },
        "loss_funcs": {"metric_loss": create_loss("unified")},
        "dataset": Pairs(),
        "collate_fn": collate,
        "sampler": range(BATCH * STEPS),
        "batch_size": BATCH,
        "dataloader_num_workers": 0,
        "data_device": torch.device("cpu"),
    }
    return CrossModalTrainer(models=models, **defaults | options)


def loop(models, loss_of, epochs=1, frozen=()):
    """The trainer's steps, written out; ``loss_of`` gets embeddings and labels of both sides."""
    parameters = [p for name, model in models.items() if name not in frozen for p in model.parameters()]
    for name, model in models.items():
        model.train(name not in frozen)
    dataset, values = Pairs(), []
    for step in [*range(STEPS)] * epochs:
        images, texts, labels = collate([dataset[index] for index in range(BATCH * step, BATCH * (step + 1))])
        x = models["image_embedder"](models["image_trunk"](images))
        value = loss_of(x, labels, models["text_trunk"](texts), labels.repeat_interleave(CAPTIONS))
        for parameter, gradient in zip(parameters, torch.autograd.grad(value, parameters), strict=True):
            parameter.data -= 0.1 * gradient
        values.append(value.item())
    return values


def unified(x, labels, y, y_labels):
    return create_loss("unified")(x, labels, ref_emb=y, ref_labels=y_labels)


def one_loss_weighted(x, labels, y, y_labels):
    return 0.25 * CrossModalLoss(NTXentLoss())(x, labels, None, y, y_labels)


def mined(x, labels, y, y_labels):
    return CrossModalLoss(create_loss("unified"), BatchHardMiner())(x, labels, None, y, y_labels)


@pytest.mark.parametrize(
    ("options", "loss_of"),
    [
        ({"dtype": torch.float64}, unified),  # of images, not of token ids
        ({"collate_fn": None}, unified),  # torch's default stacks the texts of an item
        ({"freeze_these": ("image_trunk",)}, unified),
        (
            {
                "loss_funcs": {"a": NTXentLoss(), "off": NTXentLoss()},
                "loss_weights": {"a": 0.25, "off": 0},
            },
            one_loss_weighted,
        ),
        ({"mining_funcs": {"tuple_miner": BatchHardMiner()}}, mined),
    ],
    ids=["plain", "default collate", "frozen", "losses with weights", "miner"],
)
def test_a_training_equals_the_loop_and_hooks_see_it(options, loss_of):
    models, expected, seen, epochs = modules(), modules(), [], []
    trainer = make_trainer(
        models,
        end_of_iteration_hook=lambda trainer: seen.append(trainer.loss_tracker.losses["total_loss"].item()),
        end_of_epoch_hook=lambda trainer: epochs.append(trainer.epoch),
        **options,
    )
    trainer.train(num_epochs=2)
    assert seen == pytest.approx(loop(expected, loss_of, 2, options.get("freeze_these", ())), abs=1e-12)
    assert (len(seen), epochs) == (2 * STEPS, [1, 2])
    for name, model in expected.items():
        torch.testing.assert_close(models[name].state_dict(), model.state_dict())


def test_batch_statistics_can_be_kept():
    models = modules()
    make_trainer(models, freeze_trunk_batchnorm=True).train()
    assert models["image_trunk"][1].num_batches_tracked == 0


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_shards_are_read_from_any_epoch(toy_shards, workers):
    dataset = ShardDataset(
        f"{toy_shards}/toy-train-{{000000..000007}}.tar",
        lambda image: torch.zeros(6, dtype=torch.float64) + image.getpixel((0, 0))[0],
        lambda captions: torch.tensor([[len(caption) % 9] for caption in captions]),
    )
    sampler, seen, expected = CaptionSampler(dataset.collection, 16), [], []

    def get(batch):
        seen.append(batch[2].tolist())
        return batch[:2], batch[2]

    options = {"dataset": dataset, "sampler": sampler, "collate_fn": dataset.collate, "batch_size": 16}
    trainer = make_trainer(modules(), dataloader_num_workers=workers, data_and_label_getter=get, **options)
    trainer.train(start_epoch=2, num_epochs=3)
    for epoch in (2, 3):
        sampler.set_epoch(epoch)
        expected += [labels.tolist() for _, _, labels, *_ in training_loader(dataset, sampler)]
    assert seen == expected
    assert len(seen) == 8
