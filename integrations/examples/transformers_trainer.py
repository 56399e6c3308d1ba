"""Hugging Face's CLIPModel and Trainer with several captions per image, in any number of processes.

:class:`RetrievalTrainer` and :func:`collate` are all that matters; the model is tiny, and the data are made up. With
``pip install 'vl_plugins[transformers]'`` it takes some seconds::

    python -m vl_plugins.integrations.examples.transformers_trainer
    torchrun --nproc_per_node 2 -m vl_plugins.integrations.examples.transformers_trainer
"""

import tempfile

import torch
from torch.nn import functional
from transformers import CLIPConfig, CLIPModel, Trainer, TrainingArguments

from vl_plugins import create_loss
from vl_plugins.integrations.examples import scenes
from vl_plugins.retrieval import format_metrics_table

__all__ = ["RetrievalTrainer", "collate", "main", "make_dataset", "make_model"]

TRAIN, TEST, SIZE, END = 512, 64, 2 * scenes.PATCH_SIZE, scenes.THINGS + 1


class RetrievalTrainer(Trainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.pair_loss = create_loss("unified", margin=0.2, gather_across_devices=True)

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        image_ids = inputs.pop("image_ids")  # (B,); pixel_values (B, 3, H, W), input_ids (k * B, L)
        outputs = model(**inputs)
        images, texts = outputs.image_embeds, outputs.text_embeds
        text_ids = image_ids.repeat_interleave(len(texts) // len(images))
        scale = self.model.logit_scale.exp()
        loss = self.pair_loss(images, image_ids, ref_emb=texts, ref_labels=text_ids, scale=scale)
        return (loss, outputs) if return_outputs else loss


def collate(items):
    return {
        "pixel_values": torch.stack([item["pixel_values"] for item in items]),
        "input_ids": torch.cat([item["input_ids"] for item in items]),  # (k, L) of each image
        "image_ids": torch.tensor([item["image_id"] for item in items]),
    }


def make_model():
    """Return a small CLIP with random weights."""
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = {"image_size": SIZE, "patch_size": scenes.PATCH_SIZE}
    text = {"vocab_size": END + 1, "max_position_embeddings": 4}
    text |= {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": END}
    return CLIPModel(CLIPConfig(text_config=sizes | text, vision_config=sizes | vision, projection_dim=64))


def make_dataset(split):
    """Return items of images with 2 x 2 regions, and of captions that end as CLIP wants, by the largest id."""
    images = functional.fold(split.regions.mT, SIZE, scenes.PATCH_SIZE, stride=scenes.PATCH_SIZE)
    captions = functional.pad(split.words, (0, 1), value=END)
    items = enumerate(zip(images, captions, strict=True))
    return [{"pixel_values": image, "input_ids": texts, "image_id": image_id} for image_id, (image, texts) in items]


@torch.inference_mode()
def evaluate(model, test):
    batch = collate(test)
    outputs = model.eval()(pixel_values=batch["pixel_values"], input_ids=batch["input_ids"])
    return scenes.evaluate(outputs.image_embeds @ outputs.text_embeds.T)


def main():
    """Train and print the recalls on test pictures; return the metrics ``"before"`` and ``"after"``."""
    torch.manual_seed(0)
    training, test = (make_dataset(scenes.make_scenes(count, seed)) for count, seed in ((TRAIN, 1), (TEST, 2)))
    model = make_model()
    metrics = {"before": evaluate(model, test)}
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=32,
            num_train_epochs=10,
            learning_rate=1e-3,
            remove_unused_columns=False,  # the Trainer would drop image_ids, which is no input of the model
            label_names=["image_ids"],  # for an eval_loss
            dataloader_drop_last=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = RetrievalTrainer(model, arguments, data_collator=collate, train_dataset=training)
        trainer.train()
    metrics["after"] = evaluate(model, test)
    if trainer.is_world_process_zero():
        print(format_metrics_table(metrics))
    return metrics


if __name__ == "__main__":
    main()
