"""Hugging Face's CLIPModel and Trainer, also under ``accelerate launch`` and ``torchrun``."""

import argparse

import torch
from transformers import CLIPConfig, CLIPModel, Trainer, TrainingArguments

from vl_plugins import create_loss
from vl_plugins.data import CaptionSampler, training_loader
from vl_plugins.integrations.examples import accelerate_loop


class RetrievalTrainer(Trainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.pair_loss = create_loss("unified", margin=0.2, gather_across_devices=True)

    def get_train_dataloader(self):  # of the batches of all processes, which accelerate splits
        batch_size, collection = self.args.train_batch_size * self.args.world_size, self.train_dataset.collection
        sampler = CaptionSampler(collection, batch_size, captions_per_image="all", rank=0, world_size=1)
        return self.accelerator.prepare(training_loader(self.train_dataset, sampler, workers=2))

    def compute_loss(self, model, inputs, **kwargs):
        images, texts, labels, ref_ids, matching_ids = inputs
        outputs = model(pixel_values=images, input_ids=texts)
        scale = self.model.logit_scale.exp()
        ids = {"ref_ids": ref_ids, "matching_ids": matching_ids}  # of captions: equal ones are no negatives
        return self.pair_loss(outputs.image_embeds, labels, ref_emb=outputs.text_embeds, scale=scale, **ids)


def make_model_and_dataset(shards):
    _, dataset = accelerate_loop.make_model_and_dataset(shards)
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = {"image_size": 64, "patch_size": 16}
    return CLIPModel(CLIPConfig(text_config=sizes, vision_config=sizes | vision, projection_dim=64)), dataset


def train(model, dataset, **options):
    arguments = TrainingArguments(
        accelerator_config={"split_batches": True}, save_strategy="no", report_to="none", **options
    )
    RetrievalTrainer(model, arguments, train_dataset=dataset).train()


def main(shards):
    options = {"per_device_train_batch_size": 32, "num_train_epochs": 2}
    options |= {"learning_rate": 1e-3, "logging_steps": 1}
    model, dataset = make_model_and_dataset(shards)
    train(model, dataset, use_cpu=not torch.cuda.is_available(), **options)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shards", help="such as 'toy-train-{000000..000003}.tar'")
    main(parser.parse_args().shards)
