import pickle
import sys

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from tests.encoders.trunks import assert_keeps_the_promises_of_trunks
from vl_plugins.encoders import HuggingFaceTrunk
from vl_plugins.utils.errors import MissingExtraError, UserError

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "dog", "runs", "on", "the", "beach")
LENGTHS = {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 16}
BERT = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 12, **LENGTHS}
CONFIGS = {
    "bert": BERT,
    "distilbert": {"vocab_size": 20, "dim": 8, "hidden_dim": 12, "n_layers": 1, "n_heads": 2},
    "albert": {**BERT, "embedding_size": 4},
    "roberta": BERT,
    "t5": {"vocab_size": 20, "d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 1, "num_heads": 2},
}
TEXTS = ["a dog", "the dog runs on the beach"]


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """A name of the hub fails at once, as it does at last without a network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def make(kind="bert", **options):
    torch.manual_seed(0)
    config = {"model_type": kind, **CONFIGS[kind], **options}
    return HuggingFaceTrunk("no/such-model", pretrained=False, config=config).eval()


def save_tokenizer(folder, **options):
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    options = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]", **options}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options).save_pretrained(folder)


@pytest.fixture
def bert(tmp_path):
    """Folder of a BERT in half precision with its tokenizer, and the model."""
    torch.manual_seed(1)
    model = transformers.BertModel(transformers.BertConfig(**BERT)).half()
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    return tmp_path, model.float().eval()


@pytest.mark.parametrize("kind", CONFIGS)
def test_promises(kind):
    assert_keeps_the_promises_of_trunks(make(kind))


def test_features_are_the_last_hidden_state(bert):
    folder, model = bert
    trunk = HuggingFaceTrunk(str(folder)).eval()
    texts = trunk.tokenizer(TEXTS)
    assert texts.tolist() == [[2, 4, 5, 3, 0, 0, 0, 0], [2, 8, 5, 6, 7, 8, 9, 3]]
    features = trunk(texts)
    with torch.no_grad():
        expected = model(input_ids=texts, attention_mask=(texts != 0).long()).last_hidden_state
    torch.testing.assert_close(features.local, expected)
    torch.testing.assert_close(features.pooled, expected[:, 0])
    assert torch.equal(features.padding_mask, texts == 0)
    assert (features.grid, features.has_positions) == (None, True)
    assert {parameter.dtype for parameter in trunk.parameters()} == {torch.float32}


@pytest.mark.parametrize("kind", CONFIGS)
def test_padding_and_companions_change_nothing(kind):
    trunk = make(kind)
    words = torch.tensor([[2, 4, 5, 3], [2, 8, 6, 3]])
    if kind == "roberta":
        assert trunk.padding == 1
    padded = torch.nn.functional.pad(words, (0, 3), value=trunk.padding)
    torch.testing.assert_close(trunk(padded).pooled, trunk(words).pooled)
    torch.testing.assert_close(trunk(padded).local[:, :4], trunk(words).local)
    torch.testing.assert_close(trunk(words[:1]).pooled[0], trunk(words).pooled[0])


def test_t5_is_its_encoder():
    trunk = make("t5")
    assert isinstance(trunk.model, transformers.T5EncoderModel)
    assert trunk.local_width == 8


def test_random_weights_of_the_configuration_of_a_folder(bert):
    folder, model = bert
    trunk = HuggingFaceTrunk(str(folder), pretrained=False)
    words, of_file = trunk.model.get_input_embeddings().weight, model.get_input_embeddings().weight
    assert words.shape == of_file.shape
    assert not torch.equal(words, of_file)
    # Only random weights are of the given configuration.
    assert HuggingFaceTrunk(str(folder), config={"model_type": "t5"}).model.config.model_type == "bert"


def test_the_tokenizer_cuts_off_what_the_model_cannot_take(bert):
    folder, _ = bert
    tokenizer = pickle.loads(pickle.dumps(HuggingFaceTrunk(str(folder)).tokenizer))
    tokens = tokenizer([30 * "dog "])
    assert tokens.tolist() == [[2, *14 * [5], 3]]
    assert tokens.dtype == torch.int64
    save_tokenizer(folder, model_max_length=6)
    assert HuggingFaceTrunk(str(folder)).tokenizer([30 * "dog "]).shape == (1, 6)


def test_a_t5_saved_without_its_decoder_has_no_limit(tmp_path):
    transformers.T5EncoderModel(transformers.T5Config(**CONFIGS["t5"])).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    trunk = HuggingFaceTrunk(str(tmp_path))
    assert isinstance(trunk.model, transformers.T5EncoderModel)
    assert trunk.tokenizer([600 * "dog "]).shape == (1, 602)


def test_a_tokenizer_of_another_padding(bert):
    folder, _ = bert
    trunk = HuggingFaceTrunk(str(folder))
    save_tokenizer(folder, pad_token="[UNK]")
    with pytest.raises(UserError, match=r"pads by the token 1, the model by 0$"):
        trunk.tokenizer  # noqa: B018


@pytest.mark.parametrize("pretrained", [True, False])
def test_a_model_that_is_not_there(tmp_path, pretrained):
    for name in ("no/such-model", str(tmp_path)):
        with pytest.raises(UserError, match=f"^text encoder '{name}' of Hugging Face cannot be loaded: ") as caught:
            HuggingFaceTrunk(name, pretrained=pretrained)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 500


def test_weights_that_are_not_there(bert):
    folder, _ = bert
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"^text encoder .* cannot be loaded: .*model\.safetensors"):
        HuggingFaceTrunk(str(folder))


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (
            {"model_type": "bort"},
            r"^config .* of text encoder 'm' cannot be loaded: Unrecognized model identifier: bort",
        ),
        ({"hidden_size": 8}, r"^config .* cannot be loaded: .*model_type"),
        ({"model_type": "gpt2"}, r"^text encoder 'm' is of the type 'gpt2', not a text encoder such as bert"),
        ({"model_type": "bart"}, r"^text encoder 'm' is of the type 'bart', not a text encoder"),
        ({"model_type": "vit"}, r"^text encoder 'm' is of the type 'vit', not a text encoder"),
        ({"model_type": "clip"}, r"^text encoder 'm' is of the type 'clip', not a text encoder"),
        ({"model_type": "bert", "pad_token_id": None}, r"^the configuration of text encoder 'm' has no pad_token_id$"),
    ],
)
def test_wrong_configurations(config, problem):
    with pytest.raises(UserError, match=problem):
        HuggingFaceTrunk("m", pretrained=False, config=config)


def test_without_transformers_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'vl_plugins\[transformers\]'$"):
        HuggingFaceTrunk("m")
