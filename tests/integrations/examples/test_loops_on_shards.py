"""Loops with plain torch, Accelerate and Lightning take the steps of the plain formula on the joined batches."""

import functools
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from tests.helpers.processes import in_processes
from vl_plugins import create_loss
from vl_plugins.data import CaptionSampler, normalize_caption, read_karpathy, write_shards

accelerate = pytest.importorskip("accelerate", reason="needs pip install 'vl_plugins[pml]'")
lightning = pytest.importorskip("lightning", reason="needs pip install 'vl_plugins[lightning]'")
accelerate_loop = pytest.importorskip("vl_plugins.integrations.examples.accelerate_loop")
transformers_trainer = pytest.importorskip("vl_plugins.integrations.examples.transformers_trainer")
lightning_module = pytest.importorskip("vl_plugins.integrations.examples.lightning_module")

PAGE = (Path(__file__).parents[3] / "docs/guides/own_loop.md").read_text(encoding="utf-8")
PLAIN, *_ = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
COMMANDS = "".join(re.findall(r"^```bash\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL))
COMMANDS = [shlex.split(line, comments=True) for line in COMMANDS.replace("\\\n", " ").splitlines()]
IMAGES, EPOCHS, LEARNING_RATE = 32, 2, 0.05  # of all processes


@pytest.fixture(scope="module")
def shards(toy_shards):
    return f"{toy_shards}/toy-train-{{000000..000007}}.tar"


def sgd(model):
    return torch.optim.SGD(model.parameters(), LEARNING_RATE)


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def train_plain(model, dataset, world_size):
    exec(PLAIN, variables := {})
    wrapped = DistributedDataParallel(model) if world_size > 1 else model
    variables["train"](wrapped, dataset, sgd(model), "cpu", EPOCHS, IMAGES // world_size)


def train_with_accelerate(model, dataset, world_size):
    accelerator = accelerate.Accelerator(cpu=True)
    assert accelerator.num_processes == world_size
    accelerate_loop.train(accelerator, model, dataset, sgd(model), EPOCHS, IMAGES // world_size)


class ModuleWithSGD(lightning_module.RetrievalModule):
    def configure_optimizers(self):
        return sgd(self)


def train_with_lightning(model, dataset, world_size):
    options = {"accelerator": "cpu", "devices": world_size, "strategy": "ddp" if world_size > 1 else "auto"}
    options |= dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
    trainer = lightning.Trainer(max_epochs=EPOCHS, use_distributed_sampler=False, **options)
    trainer.fit(ModuleWithSGD(model, dataset, IMAGES // world_size))


def train_with_trainer(model, dataset, world_size):
    options = {"optim": "sgd", "learning_rate": LEARNING_RATE, "lr_scheduler_type": "constant", "max_grad_norm": 0}
    options |= {"num_train_epochs": EPOCHS, "per_device_train_batch_size": IMAGES // world_size}
    with tempfile.TemporaryDirectory() as folder:
        transformers_trainer.train(model, dataset, output_dir=folder, use_cpu=True, disable_tqdm=True, **options)


def of_open_clip(model, images, texts):
    return model(images, texts)


def of_transformers(model, images, texts):
    outputs = model(pixel_values=images, input_ids=texts)
    return outputs.image_embeds, outputs.text_embeds, model.logit_scale.exp()


def train_in_process(rank, shards, world_size):
    """Return the weights of each loop after its training, all in one process, which takes seconds to import torch."""
    found = []
    for train, (make, _) in LOOPS.items():
        torch.manual_seed(0)
        model, dataset = make(shards)
        train(model, dataset, world_size)
        found.append(weights(model))
    return found


@functools.cache
def train_by_the_formula(make, embed, shards):
    """Return the weights before, and after the steps of the plain formula on batches of one process.

    Captions that are equal to one of an image's captions are no negatives of the image.
    """
    torch.manual_seed(0)
    model, dataset = make(shards)
    before, optimizer = weights(model), sgd(model)
    sampler = CaptionSampler(dataset.collection, IMAGES, captions_per_image="all", rank=0, world_size=1)
    positives, known = torch.eye(IMAGES, dtype=torch.bool).repeat_interleave(5, dim=1), 0
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        items = [dataset[draw] for draw in sampler]
        assert len(items) == 64
        for batch in (items[:IMAGES], items[IMAGES:]):
            texts = dataset.tokenizer([caption for item in batch for caption in item.captions])
            negatives = torch.ones_like(positives)
            for row, image in enumerate(batch):
                own = {normalize_caption(caption) for caption in image.captions}
                captions = [normalize_caption(caption) for item in batch for caption in item.captions]
                for column, caption in enumerate(captions):
                    negatives[row, column] = caption not in own
            known += int((~negatives & ~positives).sum())
            images, texts, scale = embed(model, torch.stack([item.image for item in batch]), texts)
            loss = create_loss("unified", margin=0.2)
            optimizer.zero_grad()
            loss.from_similarities(images @ texts.T, positives, negatives, scale=scale).backward()
            optimizer.step()
    assert known > 0
    return before, weights(model)


OPEN_CLIP = accelerate_loop.make_model_and_dataset, of_open_clip
LOOPS = {train_plain: OPEN_CLIP, train_with_accelerate: OPEN_CLIP, train_with_lightning: OPEN_CLIP}
LOOPS |= {train_with_trainer: (transformers_trainer.make_model_and_dataset, of_transformers)}


@pytest.fixture(scope="module")
def trained(shards):
    """For one process and for two, a list of each process's weights after each loop."""
    return {world_size: in_processes(train_in_process, world_size, shards, world_size) for world_size in (1, 2)}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("train", LOOPS)
def test_steps_are_those_of_the_plain_formula(train, world_size, shards, trained):
    before, after = train_by_the_formula(*LOOPS[train], shards)
    assert (after - before).abs().max() > 1e-3
    loop = list(LOOPS).index(train)
    assert len(trained[world_size]) == world_size
    for weights_of_process in trained[world_size]:
        torch.testing.assert_close(weights_of_process[loop], after, rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def folder(toy_scenes, tmp_path_factory):
    """Folder with shards of 64 images by the names of the guide."""
    folder = tmp_path_factory.mktemp("guide")
    images = read_karpathy(toy_scenes / "dataset_toy.json", "coco")
    write_shards(images, toy_scenes, folder / "toy-shards", samples_per_shard=16)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", COMMANDS, ids=lambda command: f"{command[0]}-{command[command.index('-m') + 1].split('.')[-1]}"
)
def test_commands_of_the_guide(command, folder):
    """Those for two processes start two."""
    program = Path(sys.executable).with_name(command[0])
    search_path = os.pathsep.join([str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": search_path, "OMP_NUM_THREADS": "1"}
    finished = subprocess.run([program, *command[1:]], cwd=folder, env=environment, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    if "accelerate_loop" in " ".join(command):
        expected = 1 if command[0] == "python" else 2
        assert f"processes: {expected}\n" in finished.stdout
        assert len(re.findall(r"^epoch \d: loss \d", finished.stdout, flags=re.MULTILINE)) == 2
