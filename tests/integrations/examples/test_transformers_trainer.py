"""The Trainer learns, and one process or two take the steps of the plain formula on the joined batch."""

import os
import tempfile

import pytest
import torch

from tests.helpers.processes import in_processes
from vl_plugins import create_loss
from vl_plugins.integrations.examples import scenes

pytest.importorskip("accelerate", reason="needs pip install 'vl_plugins[transformers]'")
transformers = pytest.importorskip("transformers", reason="needs pip install 'vl_plugins[transformers]'")
example = pytest.importorskip("vl_plugins.integrations.examples.transformers_trainer")

IMAGES, STEPS, LEARNING_RATE = 8, 2, 0.1
IMAGE_IDS = [0, 1, 2, 3, 4, 0, 1, 2]  # with two processes, an image meets itself in the other one


def test_it_learns(capsys):
    metrics = example.main()
    for recall in ("image_to_text_R@1", "text_to_image_R@1"):
        assert metrics["before"][recall] < 0.05
        assert metrics["after"][recall] > 0.5
    assert "after " in capsys.readouterr().out


def make_model_and_dataset():
    torch.manual_seed(0)
    dataset = example.make_dataset(scenes.make_scenes(IMAGES))
    for item, image_id in zip(dataset, IMAGE_IDS, strict=True):
        item["image_id"] = image_id
    return example.make_model(), dataset


def train_in_process(rank, world_size):
    """Return the weights after some steps with all images, divided among the processes."""
    if world_size > 1:
        os.environ |= dict.fromkeys(["RANK", "LOCAL_RANK"], str(rank))  # as torchrun does
        os.environ |= dict.fromkeys(["WORLD_SIZE", "LOCAL_WORLD_SIZE"], str(world_size))
    model, dataset = make_model_and_dataset()
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=IMAGES // world_size,
            max_steps=STEPS,
            optim="sgd",
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            max_grad_norm=0,
            remove_unused_columns=False,
            label_names=["image_ids"],
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = example.RetrievalTrainer(model, arguments, data_collator=example.collate, train_dataset=dataset)
        assert arguments.world_size == world_size
        trainer.train()
        assert trainer.evaluate(dataset)["eval_loss"] > 0
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_steps_are_those_of_the_plain_formula():
    model, dataset = make_model_and_dataset()
    images = torch.stack([item["pixel_values"] for item in dataset])
    texts = torch.cat([item["input_ids"] for item in dataset])
    positives = torch.tensor([[image == other for other in IMAGE_IDS for _ in range(5)] for image in IMAGE_IDS])
    initial = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for _ in range(STEPS):
        outputs = model(pixel_values=images, input_ids=texts)
        similarities, scale = outputs.image_embeds @ outputs.text_embeds.T, model.logit_scale.exp()
        optimizer.zero_grad()
        pair_loss = create_loss("unified", margin=0.2)
        pair_loss.from_similarities(similarities, positives, ~positives, scale=scale).backward()
        optimizer.step()
    expected = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for weights in (train_in_process(0, 1), *in_processes(train_in_process, 2, 2)):
        assert weights.keys() == expected.keys()
        for name, weight in weights.items():
            assert not torch.equal(weight, initial[name]), f"{name} has no gradient"
            torch.testing.assert_close(weight, expected[name], rtol=1e-4, atol=1e-6, msg=name)
