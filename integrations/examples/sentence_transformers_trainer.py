"""A tiny CLIP from scratch by sentence-transformers' trainer, with five captions per image.

:func:`train` is all that matters; pictures of colored shapes are drawn first. With
``pip install 'vl_plugins[sentence-transformers,data]'`` it takes half a minute::

    python -m vl_plugins.integrations.examples.sentence_transformers_trainer
"""

import argparse
import tempfile
from pathlib import Path

import torch
from datasets import Dataset, Image
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, PreTrainedTokenizerFast

from vl_plugins.data import read_karpathy
from vl_plugins.data.toy import write_toy_scenes
from vl_plugins.integrations.sentence_transformers import CrossModalRetrievalEvaluator, RetrievalLoss
from vl_plugins.retrieval import format_metrics_table

__all__ = ["main", "make_model", "read_scenes", "train"]

CAPTIONS = [f"caption_{number}" for number in range(5)]
WORDS = (
    "a and shape circle square triangle star red green blue yellow purple cyan large small left right of above below"
)
WORDS += " on white black gray background"


def make_model(folder):
    """Write a small CLIP with random weights and a tokenizer of whole words, and load it as a user would."""
    words = {word: number for number, word in enumerate(["[PAD]", *WORDS.split(), "[END]"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[PAD]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    end = words["[END]"]  # the largest id: CLIP takes the embedding at this token
    tokenizer.post_processor = processors.TemplateProcessing(single="$A [END]", special_tokens=[("[END]", end)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", eos_token="[END]")
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {"vocab_size": len(words), "max_position_embeddings": 32, "pad_token_id": 0}
    text |= {"bos_token_id": None, "eos_token_id": end}
    vision = {"image_size": 32, "patch_size": 8}
    model = CLIPModel(CLIPConfig(text_config=sizes | text, vision_config=sizes | vision, projection_dim=64))
    size = {"height": 32, "width": 32}
    model.save_pretrained(folder)
    CLIPProcessor(CLIPImageProcessor(size=size, crop_size=size), tokenizer).save_pretrained(folder)
    return SentenceTransformer(str(folder), device="cpu")


def read_scenes(folder, **counts):
    """Draw scenes; return the data sets of training and test, with an image and its five captions in each row."""
    scenes = list(read_karpathy(write_toy_scenes(folder, image_size=32, **counts), "coco"))
    return [
        Dataset.from_list(
            [
                {"image": str(Path(folder, scene.file)), **dict(zip(CAPTIONS, scene.captions, strict=True))}
                for scene in scenes
                if scene.split == split
            ]
        ).cast_column("image", Image())
        for split in ("train", "test")
    ]


def make_evaluator(test):
    return CrossModalRetrievalEvaluator(test["image"], list(zip(*(test[name] for name in CAPTIONS), strict=True)))


def train(model, training, test, loss, folder, **options):
    """Train with any loss of sentence-transformers or :class:`RetrievalLoss`; return the metrics of the test split."""
    evaluator = make_evaluator(test)
    defaults = {"per_device_train_batch_size": 32, "num_train_epochs": 8, "learning_rate": 3e-3, "warmup_steps": 0.1}
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(folder), save_strategy="no", report_to="none", disable_tqdm=True, **defaults | options
    )
    trainer = SentenceTransformerTrainer(model, arguments, train_dataset=training, loss=loss, evaluator=evaluator)
    trainer.train()
    return evaluator(model)


def main():
    """Train and print the recalls on test pictures; return the metrics ``"before"`` and ``"after"``."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(f"{folder}/model")
        training, test = read_scenes(f"{folder}/scenes", train=1024, val=1, test=100)
        loss = RetrievalLoss(model, "unified", num_positives=5, scale=20)
        metrics = {"before": make_evaluator(test)(model)}
        metrics["after"] = train(model, training, test, loss, folder)
    print(format_metrics_table(metrics))
    return metrics


if __name__ == "__main__":
    argparse.ArgumentParser(description=main.__doc__).parse_args()
    main()
