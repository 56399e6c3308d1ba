import json
import pickle

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from tests.encoders.trunks import assert_keeps_the_promises_of_trunks
from vl_plugins.encoders import HuggingFaceTrunk
from vl_plugins.errors import UserError

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "dog", "runs", "on", "the", "beach")
LENGTHS = {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 16}
BERT = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 12, **LENGTHS}
CONFIGS = {
    "bert": BERT,
    "distilbert": {"vocab_size": 20, "dim": 8, "hidden_dim": 12, "n_layers": 1, "n_heads": 2},
    "roberta": BERT,
    "t5": {"vocab_size": 20, "d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 1, "num_heads": 2},
}
TEXTS = ["a dog", "the dog runs on the beach"]


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
    trunk = make(kind)
    tokens = torch.tensor([[2, 4, 5, 3, 9], [2, 8, 3, 0, 0], [2, 3, 0, 0, 0]])
    tokens = tokens.masked_fill(tokens == 0, trunk.padding)
    assert_keeps_the_promises_of_trunks(trunk, tokens)
    torch.testing.assert_close(trunk(tokens)[1][1:2], trunk(tokens[1:2, :3])[1])  # padding changes nothing


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


def test_the_tokenizer_cuts_off_what_the_model_cannot_take(bert):
    folder, _ = bert
    tokenizer = pickle.loads(pickle.dumps(HuggingFaceTrunk(str(folder)).tokenizer))
    tokens = tokenizer([30 * "dog "])
    assert tokens.tolist() == [[2, *14 * [5], 3]]
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


@pytest.mark.parametrize("kind", ["gpt2", "clip", "bart"])
def test_models_that_are_no_text_encoders(kind):
    with pytest.raises(UserError, match=f"{kind} is not a text encoder"):
        HuggingFaceTrunk("m", pretrained=False, config={"model_type": kind})


def test_code_of_a_folder_is_not_run(tmp_path):
    config = {"model_type": "planted", "auto_map": {"AutoConfig": "planted.PlantedConfig"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "planted.py").write_text(f"open({str(tmp_path / 'made')!r}, 'w').close()")
    with pytest.raises(ValueError, match="trust_remote_code"):
        HuggingFaceTrunk(str(tmp_path))
    assert not (tmp_path / "made").exists()
