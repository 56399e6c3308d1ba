"""Small models of every kind of tower that open_clip has, built by its own classes."""

import json
from dataclasses import asdict

import torch
from open_clip.model import CLIP, CustomTextCLIP, set_model_preprocess_cfg
from open_clip.transform import PreprocessCfg
from transformers import BertConfig

NATIVE_TEXT = {"context_length": 12, "vocab_size": 60, "width": 24, "heads": 2, "layers": 2}
VIT = {"image_size": 32, "patch_size": 8, "width": 32, "head_width": 16, "layers": 2}
IMAGE_TOWERS = {
    "vit": VIT,
    "vit with attentional pooling": {**VIT, "attentional_pool": True, "attn_pooler_heads": 2, "attn_pooler_queries": 5},
    "vit, mean of patches": {**VIT, "pool_type": "avg", "final_ln_after_pool": True},
    "resnet": {"image_size": 64, "layers": [1, 1, 1, 1], "width": 8, "head_width": 16},
    "timm vit": {"timm_model_name": "test_vit", "timm_pool": "token", "image_size": 160},
    "timm convnext": {"timm_model_name": "test_convnext", "timm_pool": "avg", "timm_proj": "mlp", "image_size": 160},
    "timm resnet": {"timm_model_name": "test_resnet", "timm_pool": "avg", "image_size": 160},
}
TEXT_TOWERS = {
    "clip": NATIVE_TEXT,
    "eos": {**NATIVE_TEXT, "pool_type": "eos", "eos_id": 2},
    "siglip": {**NATIVE_TEXT, "pool_type": "last", "no_causal_mask": True, "pad_id": 1, "proj_bias": True},
    "mobileclip, no causal mask": {**NATIVE_TEXT, "no_causal_mask": True},
    "bert, mean": {"hf_pooler_type": "mean_pooler"},
    "bert, first token": {"hf_pooler_type": "cls_pooler", "hf_proj_type": "linear"},
}
PADDING = {"siglip": 1}
EMBED_DIM = 16


def make_model(tmp_path, image="vit", text="clip", seed=0, **options):
    """Return a model in float32 and evaluation mode with random weights."""
    torch.manual_seed(seed)
    text_config = TEXT_TOWERS[text]
    if text.startswith("bert"):
        config = BertConfig(
            vocab_size=60, hidden_size=20, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24
        )
        (tmp_path / "bert").mkdir(exist_ok=True)
        (tmp_path / "bert" / "config.json").write_text(json.dumps(config.to_dict()))
        text_config = {**text_config, "hf_model_name": str(tmp_path / "bert"), "hf_model_pretrained": False}
    custom = text not in ("clip", "eos")
    model_class = CustomTextCLIP if custom else CLIP
    model = model_class(EMBED_DIM, dict(IMAGE_TOWERS[image]), text_config, output_dict=True, **options)
    set_model_preprocess_cfg(model, asdict(PreprocessCfg()))  # as create_model_and_transforms does
    return model.eval()


def images_for(model, count=3, seed=1):
    size = model.visual.image_size
    height, width = (size, size) if isinstance(size, int) else size
    return torch.randn(count, 3, height, width, generator=torch.Generator().manual_seed(seed))


# Beginning, two to six words, end, padding. Zero is also a word, as it is in CLIP's vocabulary.
TEXTS = torch.tensor([[58, 5, 0, 7, 59, 0, 0, 0, 0, 0, 0, 0], [58, 9, 8, 3, 0, 4, 7, 59, 0, 0, 0, 0]])
LENGTHS = [5, 8]


def texts_for(text="clip"):
    texts = TEXTS.clone()
    if text == "eos":
        texts[texts == 59] = 2
    for row, length in enumerate(LENGTHS):
        texts[row, length:] = PADDING.get(text, 0)
    if text.startswith("bert"):  # its padding is no word
        texts[:, :5][texts[:, :5] == 0] = 6
    return texts
