"""A training that takes a second: two small towers on 16 images of the toy shards."""

import copy

IMAGE_TRUNK = {
    "name": "timm",
    "model": "vit_tiny_patch16_224",
    "image_size": 32,
    "patch_size": 8,
    "embed_dim": 24,
    "depth": 1,
    "num_heads": 2,
}
SETTINGS = {
    "data": {"train": "none.tar", "batch_size": 4, "workers": 0},
    "image": {"trunk": IMAGE_TRUNK, "pooling": "avg"},
    "text": {
        "trunk": {"name": "gru", "word_dim": 12, "hidden_dim": 16},
        "projection": "none",
        "vocabulary": {"min_count": 1},
    },
    "dim": 16,
    "loss": "unified",
    "training": {"epochs": 2, "optimizer": {"name": "Adam", "lr": 1e-2}},
    "seed": 3,
    "log_every": 2,
}


def settings(shards=None, **changes):
    """Return plain data for ``parse_config``; ``changes`` take the place of whole sections."""
    plain = copy.deepcopy(SETTINGS)
    if shards is not None:
        plain["data"] |= {
            "train": f"{shards}/toy-train-{{000000..000001}}.tar",
            "val": f"{shards}/toy-val-000000.tar",
        }
    for name, change in changes.items():
        plain[name] = plain[name] | change if name in ("data", "training") else change
    return plain
