import open_clip
import pytest
import torch

from tests.encoders.trunks import assert_keeps_the_promises_of_trunks
from vl_plugins.integrations.open_clip.models import register_models
from vl_plugins.integrations.pytorch_metric_learning.open_clip_text_trunk import OpenCLIPTextTrunk
from vl_plugins.utils.errors import UserError

TEXTS = ["a dog", "the dog runs on the beach"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A file of weights of vl-tiny, and the model."""
    register_models()
    torch.manual_seed(1)
    clip = open_clip.create_model("vl-tiny").eval()
    path = tmp_path_factory.mktemp("checkpoint") / "weights.pt"
    torch.save({"state_dict": clip.state_dict()}, path)
    return path, clip


def test_promises():
    trunk = OpenCLIPTextTrunk("vl-tiny", pretrained=None)
    assert trunk.training
    assert (trunk.local_width, trunk.pooled_width) == (96, 128)
    assert_keeps_the_promises_of_trunks(trunk)


def test_features_are_those_of_the_text_tower(checkpoint):
    path, clip = checkpoint
    trunk = OpenCLIPTextTrunk("vl-tiny", pretrained=str(path)).eval()
    texts = trunk.tokenizer(TEXTS)
    assert torch.equal(texts, open_clip.get_tokenizer("vl-tiny")(TEXTS))
    features = trunk(texts)
    torch.testing.assert_close(features.pooled, clip.encode_text(texts))
    assert features.local.shape == (2, 32, 96)
    assert (~features.padding_mask).sum(dim=1).tolist() == [4, 8]
    assert features.grid is None


def test_nothing_but_the_text_tower_is_kept(checkpoint):
    _, clip = checkpoint
    kept = {name.removeprefix("model.") for name in OpenCLIPTextTrunk("vl-tiny").state_dict()}
    everything = clip.state_dict().keys()
    assert kept == {name for name in everything if not name.startswith(("visual.", "logit_"))}


def test_without_pretrained_weights_they_are_random(checkpoint):
    _, clip = checkpoint
    torch.manual_seed(2)
    trunk = OpenCLIPTextTrunk("vl-tiny", pretrained=False)
    assert not torch.equal(trunk.model.positional_embedding, clip.positional_embedding)


def test_what_cannot_be_loaded(checkpoint, tmp_path):
    path, _ = checkpoint
    with pytest.raises(UserError, match=r"^unknown model 'vl-tiniest' \(did you mean 'vl-tiny'\?\)"):
        OpenCLIPTextTrunk("vl-tiniest")
    with pytest.raises(UserError, match=r"^checkpoint laion2b: no such file, nor a pretrained tag of vl-tiny$"):
        OpenCLIPTextTrunk("vl-tiny", pretrained="laion2b")
    saved = torch.load(path, weights_only=True)["state_dict"]
    del saved["text_projection"]
    torch.save(saved, tmp_path / "other.pt")
    with pytest.raises(UserError, match=r"^checkpoint .*other\.pt does not fit model vl-tiny: "):
        OpenCLIPTextTrunk("vl-tiny", pretrained=tmp_path / "other.pt")
