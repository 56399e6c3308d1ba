"""A module of Lightning."""

import argparse

import lightning
import torch

from vl_plugins import create_loss
from vl_plugins.data import CaptionSampler, training_loader
from vl_plugins.integrations.examples.accelerate_loop import make_model_and_dataset


class RetrievalModule(lightning.LightningModule):
    def __init__(self, model, dataset, batch_size):
        super().__init__()
        self.model, self.dataset, self.batch_size = model, dataset, batch_size
        self.loss = create_loss("unified", margin=0.2, gather_across_devices=True)

    def train_dataloader(self):  # here the rank is known
        sampler = CaptionSampler(self.dataset.collection, self.batch_size, captions_per_image="all")
        return training_loader(self.dataset, sampler, workers=2)

    def training_step(self, batch, _):
        images, texts, labels, ref_ids, matching_ids = batch
        image_features, text_features, scale = self.model(images, texts)
        ids = {"ref_ids": ref_ids, "matching_ids": matching_ids}  # of captions: equal ones are no negatives
        return self.loss(image_features, labels, ref_emb=text_features, scale=scale, **ids)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(shards, processes=1):
    model, dataset = make_model_and_dataset(shards)
    trainer = lightning.Trainer(max_epochs=2, devices=processes, use_distributed_sampler=False)
    trainer.fit(RetrievalModule(model, dataset, batch_size=32))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shards", help="such as 'toy-train-{000000..000003}.tar'")
    parser.add_argument("processes", nargs="?", type=int, default=1)
    arguments = parser.parse_args()
    main(arguments.shards, arguments.processes)
