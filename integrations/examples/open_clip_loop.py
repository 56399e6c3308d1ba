"""A training loop of your own for a model of open_clip, with several captions per image.

:func:`train` is all that matters; the model is tiny, and the data are made up. It takes some seconds::

    python -m vl_plugins.integrations.examples.open_clip_loop
"""

import open_clip
import torch

from vl_plugins import create_loss
from vl_plugins.integrations.examples import scenes
from vl_plugins.retrieval import format_metrics_table

__all__ = ["main", "make_loader", "make_model", "train"]

TRAIN, TEST, BATCH_SIZE, EPOCHS, LEARNING_RATE = 512, 64, 32, 10, 1e-3


def train(model, loader, optimizer, epochs):
    loss = create_loss("unified", margin=0.2)
    for _ in range(epochs):
        for images, texts, labels in loader:  # (B, 3, H, W), (k * B, L), (B,): k captions per image
            image_features, text_features, scale = model(images, texts)
            text_labels = labels.repeat_interleave(len(texts) // len(images))
            optimizer.zero_grad()
            loss(image_features, labels, ref_emb=text_features, ref_labels=text_labels, scale=scale).backward()
            optimizer.step()


def make_model():
    """Return a small ViT-B-32 with random weights."""
    vision = {"image_size": scenes.PICTURE_SIZE, "patch_size": scenes.PATCH_SIZE, "layers": 2, "width": 64}
    text = {"context_length": scenes.CAPTION_LENGTH, "vocab_size": scenes.VOCABULARY_SIZE, "layers": 2, "width": 64}
    model, _, _ = open_clip.create_model_and_transforms(
        "ViT-B-32", embed_dim=64, vision_cfg=vision | {"head_width": 32}, text_cfg=text | {"heads": 2}
    )
    return model


def make_loader(training, batch_size=BATCH_SIZE):
    return torch.utils.data.DataLoader(
        list(zip(training.pictures, training.captions, range(len(training.pictures)), strict=True)),
        batch_size=batch_size,
        shuffle=True,
        drop_last=True,
        collate_fn=collate,
    )


def collate(items):
    images, texts, labels = zip(*items, strict=True)
    return torch.stack(images), torch.cat(texts), torch.tensor(labels)


@torch.inference_mode()
def evaluate(model, test):
    image_features = model.encode_image(test.pictures, normalize=True)
    text_features = model.encode_text(test.captions.flatten(0, 1), normalize=True)
    return scenes.evaluate(image_features @ text_features.T)


def main():
    """Train and print the recalls on test pictures; return the metrics ``"before"`` and ``"after"``."""
    torch.manual_seed(0)
    training, test = scenes.make_scenes(TRAIN, TEST)
    model = make_model()
    metrics = {"before": evaluate(model, test)}
    train(model, make_loader(training), torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE), EPOCHS)
    metrics["after"] = evaluate(model, test)
    print(format_metrics_table(metrics))
    return metrics


if __name__ == "__main__":
    main()
