"""Inputs that are likely mistakes: captions as hard negatives, and paths of pictures that do not exist."""

import warnings

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast

from vl_plugins.errors import InputWarning

reason = "needs pip install 'vl_plugins[sentence-transformers]'"
host = pytest.importorskip("sentence_transformers", minversion="6.0", reason=reason)
ours = pytest.importorskip("vl_plugins.integrations.sentence_transformers", exc_type=ImportError, reason=reason)
example = pytest.importorskip("vl_plugins.integrations.examples.sentence_transformers_trainer", exc_type=ImportError)


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    return example.read_scenes(tmp_path_factory.mktemp("scenes"), train=4, val=1, test=2)


def train(folder, data, output, num_positives):
    model = host.SentenceTransformer(folder, device="cpu")
    loss = ours.RetrievalLoss(model, "unified", num_positives)
    arguments = host.SentenceTransformerTrainingArguments(
        str(output), max_steps=2, per_device_train_batch_size=2, report_to="none", use_cpu=True, save_strategy="no"
    )
    host.SentenceTransformerTrainer(model, arguments, train_dataset=data, loss=loss).train()


def test_captions_as_hard_negatives_are_named(clip_folder, scenes, tmp_path):
    """Once, with the names of their columns and without the column of labels."""
    data = scenes[0].add_column("label", [0, 1, 2, 3])
    with pytest.warns(InputWarning, match="^num_positives is 1") as warned:
        train(clip_folder, data, tmp_path, num_positives=1)
    (message,) = [str(warning.message) for warning in warned if issubclass(warning.category, InputWarning)]
    assert "so caption_1, caption_2, caption_3, caption_4 are hard negatives" in message
    assert "set num_positives=5" in message


@pytest.mark.parametrize(("captions", "num_positives"), [(1, 1), (5, 5), (3, 2), (2, 1)])
def test_no_warning_of_negatives_that_are_meant(captions, num_positives, clip_folder, scenes, tmp_path):
    """A number of positives above 1, or a name, says that they are."""
    data = scenes[0].select_columns(["image", *example.CAPTIONS[:captions]])
    if num_positives == 1 and captions == 2:
        data = data.rename_column("caption_1", "hard_negative")
    with warnings.catch_warnings():
        warnings.simplefilter("error", InputWarning)
        train(clip_folder, data, tmp_path, num_positives)


def test_columns_without_a_trainer_are_numbered(clip_folder, scenes):
    model = host.SentenceTransformer(clip_folder, device="cpu")
    columns = [model.preprocess(list(scenes[0][name])) for name in ("image", *example.CAPTIONS[:3])]
    with pytest.warns(InputWarning, match=r"^num_positives is 1, so column 3, column 4 are hard negatives"):
        ours.RetrievalLoss(model, "unified")(columns)


class Encoder(nn.Module):
    """A model with a tokenizer that divides words at punctuation, as CLIP's does."""

    def __init__(self, modalities, texts):
        super().__init__()
        splitter = pre_tokenizers.BertPreTokenizer()
        words = {word for text in texts for word, _ in splitter.pre_tokenize_str(text)}
        numbers = {word: number for number, word in enumerate(["[PAD]", *sorted(words)])}
        tokenizer = Tokenizer(models.WordLevel(numbers, unk_token="[PAD]"))
        tokenizer.pre_tokenizer = splitter
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]")
        self.modalities = modalities
        self.table = nn.Embedding(len(numbers), 4)

    def supports(self, modality):
        return modality in self.modalities

    def column(self, texts):
        return dict(self.tokenizer(texts, padding=True, return_tensors="pt"))

    def forward(self, features):
        return {"sentence_embedding": self.table(features["input_ids"]).sum(dim=1)}


@pytest.mark.parametrize("kind", ["RetrievalLoss", "CachedRetrievalLoss"])
@pytest.mark.parametrize("is_first_column", [True, False])
def test_paths_to_nothing_in_training(kind, is_first_column):
    """The collator takes them for text; pictures may be anchors or positives."""
    captions, paths = ["a dog", "a cat"], ["train/a.png", "train/missing-2.JPG"]
    encoder = Encoder(["text", "image"], captions + paths)
    columns = [encoder.column(paths), encoder.column(captions)]
    message = (
        r"^row 0 of column 1 is 'train/a\.png', but there is no such file, so it would be embedded as text: correct"
    )
    if not is_first_column:
        columns.reverse()
        message = message.replace("column 1", "column 2")
    loss = getattr(ours, kind)(encoder, "unified")
    with pytest.raises(ValueError, match=message):
        loss(columns)


def test_texts_that_are_meant():
    """Captions without pictures, paths of a model that reads text alone, and paths beside pictures."""
    captions, paths = ["a dog.", "a cat"], ["a.png", "b.jpg"]
    encoder = Encoder(["text", "image"], captions + paths)
    loss = ours.RetrievalLoss(encoder, "unified")
    assert loss([encoder.column(captions), encoder.column(captions[::-1])]).isfinite()
    pictures = encoder.column(captions) | {"pixel_values": torch.rand(2, 3, 4, 4)}
    assert loss([pictures, encoder.column(paths)]).isfinite()
    encoder.modalities = ["text"]
    assert loss([encoder.column(captions), encoder.column(paths)]).isfinite()


def test_paths_to_nothing_in_an_evaluation(clip_folder, scenes, tmp_path):
    model = host.SentenceTransformer(clip_folder, device="cpu")
    paths = []
    for number, image in enumerate(scenes[1]["image"]):
        image.save(tmp_path / f"{number}.png")
        paths.append(str(tmp_path / f"{number}.png"))
    captions = list(zip(*(scenes[1][name] for name in example.CAPTIONS), strict=True))
    right = ours.CrossModalRetrievalEvaluator(list(scenes[1]["image"]), captions)(model)
    assert ours.CrossModalRetrievalEvaluator(paths, captions)(model) == right
    with pytest.raises(ValueError, match=r"^images\[1\] is 'nothere\.jpg', but there is no such file, so it would be"):
        ours.CrossModalRetrievalEvaluator([paths[0], "nothere.jpg"], captions)(model)
    scenes[1]["image"][0].save(tmp_path / "a.ppm")
    with pytest.raises(
        ValueError, match=r"^images\[0\] is the file '.*a\.ppm', whose ending sentence-transformers takes"
    ):
        ours.CrossModalRetrievalEvaluator([str(tmp_path / "a.ppm"), paths[1]], captions)(model)
