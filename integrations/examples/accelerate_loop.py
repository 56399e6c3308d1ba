"""A training loop with Hugging Face Accelerate, also under ``accelerate launch`` and ``torchrun``."""

import argparse

import open_clip
import torch
from accelerate import Accelerator

from vl_plugins import create_loss
from vl_plugins.data import CaptionSampler, ShardDataset, training_loader
from vl_plugins.integrations.open_clip.models import register_models


def train(accelerator, model, dataset, optimizer, epochs, batch_size):
    sampler = CaptionSampler(dataset.collection, batch_size, captions_per_image="all")
    loader = training_loader(dataset, sampler, workers=2)
    model, optimizer = accelerator.prepare(model, optimizer)  # not the loader, whose sampler knows the rank
    loss_function = create_loss("unified", margin=0.2, gather_across_devices=True)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for batch in loader:
            images, texts, labels, ref_ids, matching_ids = (tensor.to(accelerator.device) for tensor in batch)
            image_features, text_features, scale = model(images, texts)
            ids = {"ref_ids": ref_ids, "matching_ids": matching_ids}  # of captions: equal ones are no negatives
            loss = loss_function(image_features, labels, ref_emb=text_features, scale=scale, **ids)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
        accelerator.print(f"epoch {epoch}: loss {accelerator.reduce(loss.detach(), 'mean'):.3f}")


def make_model_and_dataset(shards):
    register_models()
    model, transform, _ = open_clip.create_model_and_transforms("vl-tiny")
    return model, ShardDataset(shards, transform, open_clip.get_tokenizer("vl-tiny"))


def main(shards):
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    accelerator.print("processes:", accelerator.num_processes)
    model, dataset = make_model_and_dataset(shards)
    train(accelerator, model, dataset, torch.optim.AdamW(model.parameters(), lr=1e-3), epochs=2, batch_size=32)
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shards", help="such as 'toy-train-{000000..000003}.tar'")
    main(parser.parse_args().shards)
