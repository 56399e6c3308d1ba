"""The trainer of two modalities, with modules of plain torch, against a training loop written out."""

import copy
import multiprocessing

import pytest
import torch
from pytorch_metric_learning.losses import MultipleLosses, NTXentLoss
from torch import nn
from torch.utils.data import Dataset

from vl_plugins import create_loss
from vl_plugins.data import CaptionSampler, ShardDataset, training_loader
from vl_plugins.errors import UserError
from vl_plugins.integrations.pytorch_metric_learning import CrossModalTrainer

BATCH, STEPS, CAPTIONS = 4, 3, 2


class Pairs(Dataset):
    """Features of images, with captions that are integers, and labels."""

    def __init__(self, captions=CAPTIONS):
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randn(BATCH * STEPS, 6, generator=generator, dtype=torch.float64)
        self.texts = torch.randint(0, 9, (BATCH * STEPS, captions, 3), generator=generator)

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


def make_trainer(models, loss=None, **options):
    optimizers = {
        f"{name}_optimizer": torch.optim.SGD(model.parameters(), lr=0.1)
        for name, model in models.items()
        if name not in options.get("freeze_these", ()) and list(model.parameters())
    }
    options = {"dataset": Pairs(), "collate_fn": collate, "sampler": range(BATCH * STEPS), **options}
    return CrossModalTrainer(
        models=models,
        optimizers=options.pop("optimizers", optimizers),
        batch_size=BATCH,
        loss_funcs=options.pop("loss_funcs", None) or {"metric_loss": loss or create_loss("unified")},
        dataloader_num_workers=0,
        data_device=torch.device("cpu"),
        **options,
    )


def loop(models, loss_of, epochs=1, lr=0.1, frozen=()):
    """What the trainer should do, written out; `loss_of` gets embeddings and labels of both sides."""
    dataset = Pairs()
    parameters = [p for name, model in models.items() if name not in frozen for p in model.parameters()]
    for name, model in models.items():
        model.train(name not in frozen)
    values = []
    for epoch in range(epochs):
        for step in range(STEPS):
            images, texts, labels = collate([dataset[index] for index in range(BATCH * step, BATCH * (step + 1))])
            x = models["image_embedder"](models["image_trunk"](images))
            value = loss_of(x, labels, models["text_trunk"](texts), labels.repeat_interleave(CAPTIONS))
            gradients = torch.autograd.grad(value, parameters)
            with torch.no_grad():
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter -= (lr(epoch) if callable(lr) else lr) * gradient
            values.append(value.item())
    return values


def assert_same_weights(models, others):
    for name, model in others.items():
        torch.testing.assert_close(
            models[name].state_dict(), model.state_dict(), msg=lambda text, name=name: name + text
        )


def unified(x, labels, y, y_labels):
    return create_loss("unified")(x, labels, ref_emb=y, ref_labels=y_labels)


def test_a_training_equals_the_loop_and_hooks_see_it():
    models, expected = modules(), modules()
    seen = []
    epochs = []
    trainer = make_trainer(
        models,
        dtype=torch.float64,  # of images, not of token ids
        end_of_iteration_hook=lambda trainer: seen.append(trainer.loss_tracker.losses["total_loss"].item()),
        end_of_epoch_hook=lambda trainer: epochs.append(trainer.epoch),
    )
    trainer.train(num_epochs=2)
    assert seen == pytest.approx(loop(expected, unified, epochs=2), abs=1e-12)
    assert len(seen) == 2 * STEPS
    assert epochs == [1, 2]
    assert_same_weights(models, expected)
    assert trainer.models["image_head"](3) == 3, "what is left out passes on what it gets"


def test_texts_of_an_item_are_stacked_by_the_default_collate():
    models, expected = modules(), modules()
    make_trainer(models, collate_fn=None).train()
    loop(expected, unified)
    assert_same_weights(models, expected)


def test_several_losses_with_weights():
    models, expected = modules(), modules()
    make_trainer(
        models,
        loss_funcs={"metric_loss": create_loss("unified"), "other": create_loss("triplet_sh"), "off": NTXentLoss()},
        loss_weights={"metric_loss": 0.25, "other": 2, "off": 0},
    ).train()

    def weighted(*sides):
        x, labels, y, y_labels = sides
        other = create_loss("triplet_sh")(x, labels, ref_emb=y, ref_labels=y_labels)
        return 0.25 * unified(*sides) + 2 * other

    loop(expected, weighted)
    assert_same_weights(models, expected)


def test_frozen_parts_do_not_change_and_evaluate():
    models, expected = modules(), modules()
    before = copy.deepcopy(models["image_trunk"].state_dict())
    make_trainer(models, freeze_these=("image_trunk",)).train()
    loop(expected, unified, frozen=("image_trunk",))
    assert_same_weights(models, expected)
    torch.testing.assert_close(models["image_trunk"].state_dict(), before, rtol=0, atol=0)


def test_batch_statistics_can_be_kept():
    models = modules()
    make_trainer(models, freeze_trunk_batchnorm=True).train()
    assert models["image_trunk"][1].num_batches_tracked == 0
    assert not torch.equal(models["image_trunk"][1].weight, modules()["image_trunk"][1].weight)


def test_clippers_of_a_part_and_of_all():
    models = modules()
    clipped = []
    clippers = {"text_trunk_grad_clipper": lambda: clipped.append(0)}
    make_trainer(models, gradient_clippers=clippers, clip_grad_norm=1e-3).train()
    assert clipped == [0] * STEPS
    norms = [parameter.grad.norm() for model in models.values() for parameter in model.parameters()]
    assert torch.stack(norms).norm().item() == pytest.approx(1e-3, rel=1e-3)


def test_names_are_checked():
    models = modules()
    with pytest.raises(AssertionError, match='models must contain "text_trunk"'):
        make_trainer({"image_trunk": models["image_trunk"]})
    with pytest.raises(AssertionError, match="models keys must be one of image_trunk"):
        make_trainer({**models, "trunk": models["image_trunk"]})
    with pytest.raises(AssertionError, match="freeze_these keys must be one of"):
        make_trainer(models, freeze_these=("trunk",))
    with pytest.raises(UserError, match="MultipleLosses takes no ref_emb"):
        make_trainer(models, MultipleLosses([NTXentLoss()]))


def test_sets_with_slots_reach_the_loss():
    class Head(nn.Module):
        def forward(self, rows):
            sets = torch.stack([rows, -rows], dim=1)
            return {"features": sets, "slots": 2 * sets}

    class Watched(type(create_loss("smooth_chamfer"))):
        def regularization(self, *arguments):
            calls.append(arguments)
            return super().regularization(*arguments)

    calls = []
    make_trainer({**modules(), "image_head": Head(), "text_head": Head()}, Watched(base="unified")).train()
    assert len(calls) == STEPS
    for images, texts, image_slots, text_slots in calls:
        assert (images.shape, texts.shape) == ((BATCH, 2, 4), (CAPTIONS * BATCH, 2, 4))
        assert torch.equal(image_slots, 2 * images)
        assert torch.equal(text_slots, 2 * texts)


def shard_dataset(shards):
    return ShardDataset(
        f"{shards}/toy-train-{{000000..000007}}.tar",
        lambda image: torch.zeros(1, 1, 1) + image.getpixel((0, 0))[0],
        lambda captions: torch.tensor([[len(caption)] for caption in captions]),
    )


def labels_of_epochs(shards, start, stop, workers=0, **options):
    """Return the labels of each epoch's batches, as the trainer reads them."""
    seen = []
    dataset = shard_dataset(shards)
    trainer = CrossModalTrainer(
        models={"image_trunk": nn.Identity(), "text_trunk": nn.Identity()},
        optimizers={},
        batch_size=None,
        loss_funcs={"metric_loss": create_loss("unified")},
        dataset=dataset,
        sampler=CaptionSampler(dataset.collection, 16),
        dataloader_num_workers=workers,
        data_device=torch.device("cpu"),
        **options,
    )
    trainer.calculate_loss = lambda batch: seen.append((trainer.epoch, batch[1].tolist()))
    trainer.loss_tracker.update = lambda weights: None
    trainer.backward = lambda: None
    trainer.train(start_epoch=start, num_epochs=stop)
    return seen


@pytest.mark.parametrize("iterations_per_epoch", [3, 6])
def test_shards_are_read_from_any_epoch_on(toy_shards, iterations_per_epoch):
    """The sampler has four batches."""
    options = {"iterations_per_epoch": iterations_per_epoch}
    whole = labels_of_epochs(toy_shards, 1, 4, **options)
    assert len(whole) == 4 * iterations_per_epoch
    assert labels_of_epochs(toy_shards, 3, 4, **options) == [entry for entry in whole if entry[0] >= 3]
    dataset = shard_dataset(toy_shards)
    sampler = CaptionSampler(dataset.collection, 16)
    expected = []
    for epoch in range(len(whole) // 4):
        sampler.set_epoch(epoch)
        expected += [labels.tolist() for _, _, labels in training_loader(dataset, sampler)]
    assert [labels for _, labels in whole][: len(expected)] == expected
    assert expected[:4] != expected[4:8]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_loader_processes_serve_all_epochs_and_end_with_the_training(toy_shards):
    others = set(multiprocessing.active_children())
    by_epoch = {}

    def note(trainer):
        by_epoch[trainer.epoch] = {process.pid for process in set(multiprocessing.active_children()) - others}

    whole = labels_of_epochs(toy_shards, 1, 3, workers=2, end_of_epoch_hook=note)
    assert len(by_epoch[1]) == 2
    assert by_epoch[1] == by_epoch[2] == by_epoch[3]
    assert set(multiprocessing.active_children()) <= others
    assert labels_of_epochs(toy_shards, 2, 3, workers=2) == [entry for entry in whole if entry[0] >= 2]
