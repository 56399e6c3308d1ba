"""Whatever is wrong with flags and files ends in one line and exit status 2, and no file runs code."""

import json
import pickle
import re
import shutil

import numpy as np
import open_clip
import pytest
import torch

from tests.helpers.archives import encode_archive, encode_picture
from tests.helpers.open_clip_training import TINY, checkpoint_with_heads, error_line
from vl_plugins.integrations.open_clip.launcher import main
from vl_plugins.integrations.open_clip.models import register_models


class Harmful:
    def __reduce__(self):
        return print, ("code has run",)


PICTURE = encode_picture(mode="RGB")
CONFIG = {
    "code.json": {"embed_dim": 8, "vision_cfg": {}, "text_cfg": {"tokenizer_kwargs": {"trust_remote_code": True}}},
    "tokenizer.json": {"embed_dim": 8, "vision_cfg": {}, "text_cfg": {"hf_tokenizer_name": "automap"}},
    "coded/open_clip_config.json": {"model_cfg": {"vision_cfg": {}, "text_cfg": {"trust_remote_code": True}}},
    "automap/open_clip_config.json": {"model_cfg": {"vision_cfg": {}, "text_cfg": {}}},
    "automap/tokenizer_config.json": {"auto_map": {"AutoTokenizer": ["code.Tokenizer", None]}},
}
YAML = {
    "bracket": "loss: [",
    "list": "- loss\n- unified\n",
    "key": "los: unified\n",
    "twice": "loss: unified\nloss: vlc\n",
    "object": "loss: !!python/object/apply:print [code has run]\n",
    "value": "lr: false\n",
    "class": "loss: json:dumps\n",
    "smuggled": "image-mean: [0.1, --loss=json:dumps]\n",
    "smuggled_key": "loss: unified\nloss-kwargs: {--loss: json:dumps}\n",
    "pipe_in_braces": "train-data: 'p{i..i}pe:echo code has run'\n",
    "pipe_in_list": "train-data: 'toy-train-000000.tar::p{i,i}pe:echo code has run'\ndataset-type: webdataset\n",
    "pipe_in_capitals": "val-data: ' PIPE:echo code has run'\ndataset-type: webdataset\n",
    "url": "train-data: https://example.invalid/a.tar\n",
    "loss_pipe": "loss: unified\ntrain-data: 'p{i..i}pe:echo code has run #.tar'\n",
}


def cut_state(model):
    """Return the state of open_clip's optimizer after a step, with one average cut to a single row."""
    is_small = {
        name: p.ndim < 2 or "bn" in name or "ln" in name or "bias" in name for name, p in model.named_parameters()
    }
    groups = [[p for name, p in model.named_parameters() if is_small[name] is small] for small in (True, False)]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups])
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = optimizer.state_dict()
    state["state"][3]["exp_avg"] = state["state"][3]["exp_avg"][:1]
    return state


@pytest.fixture(scope="module")
def folder(toy_shards, tmp_path_factory):
    folder = shutil.copytree(toy_shards, tmp_path_factory.mktemp("wrong"), dirs_exist_ok=True)
    for name, content in CONFIG.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    for name, content in YAML.items():
        (folder / f"{name}.yaml").write_text(content)
    register_models()
    model = open_clip.create_model("vl-tiny")
    weights = model.state_dict()
    other = open_clip.create_model("vl-tiny-resnet").state_dict()
    heads = checkpoint_with_heads(open_clip.create_model("vl-tiny"), "vl-tiny", "linear", {"dim": 24})
    for name, content in {
        "weights": weights,
        "other_run": {"epoch": 1, "state_dict": other},
        "heads": heads,
        "no_weights": {"epoch": 1},
        "no_epoch": {"epoch": "one", "state_dict": weights},
        "other_optimizer": {"epoch": 1, "state_dict": weights, "optimizer": {"state": {}, "param_groups": []}},
        "cut_state": {"epoch": 1, "state_dict": weights, "optimizer": cut_state(model)},
        "harmful": Harmful(),
        "harmful_part": {"state_dict": weights, "more": Harmful()},
    }.items():
        torch.save(content, folder / f"{name}.pt")
    data = (folder / "weights.pt").read_bytes()
    (folder / "cut.pt").write_bytes(data[: len(data) // 2])
    (folder / "pickle.pt").write_bytes(pickle.dumps(Harmful(), protocol=2))
    np.savez(folder / "foreign.npz", weight=np.ones(2))
    (folder / "plain.tar").write_bytes(encode_archive([("0.txt", "a dog"), ("0.png", PICTURE)]))
    missing = [f"no{number}.png\tdog {number}" for number in range(8)]
    (folder / "missing.tsv").write_text("\n".join(["filepath\ttitle", *missing]) + "\n")
    (folder / "columns.tsv").write_text("a\tb\n1\t2\n")
    return folder


LOSS, SETS = "--loss unified", "--loss smooth_chamfer --head set"
PROXIES = "--loss ProxyAnchorLoss --loss-kwargs embedding_size=128"
TRAIN = "--train-data toy-train-{000000..000001}.tar"
RUN = f"{TRAIN} {LOSS}"
VAL = "--val-data toy-val-000000.tar"
FLAGS = {
    "--loss unifed": "unknown loss 'unifed' (did you mean 'unified'?)",
    "--loss no_such_module:Loss": "loss 'no_such_module:Loss': No module named 'no_such_module'",
    f"{PROXIES} num_classes=16": "images for classes, which our reader numbers: add --captions-per-image random",
    f"{PROXIES} num_classes=4 --captions-per-image all": "each of the 16 images of --train-data is a class",
    f"{PROXIES} num_classes=16 embedding_size=8 --captions-per-image 1": "embeddings of vl-tiny have 128 numbers",
    f"{LOSS} --loss-kwargs learn_scale=True --torchscript": "has trained parameters, which --torchscript does not",
    f"{LOSS} --head-lr 1e-2": "--head-lr is the rate of heads and of a loss's parameters: add --head, or remove it",
    f"{LOSS} --loss-kwargs margin": "argument --loss-kwargs: expected key=value, got 'margin'",
    f"{LOSS} --loss-kwargs scale=0": "--loss unified: scale must be ",
    "--loss triplet_hn --loss-kwargs scale=learned": "has no scale; losses that have one: siglip, unified, vlc",
    f"{LOSS} --loss-kwargs temperature=0.07": "unknown option temperature; scale = 1 / temperature = 14.3",
    f"{LOSS} --miner-kwargs a=1": "--miner-kwargs needs --miner",
    f"{LOSS} --reducer ThresholdReducer --reducer-kwargs low=a": "--loss unified: its first call: .*'>' not supported",
    f"{LOSS} --head set --distance LpDistance": "embeddings must have the shape .A, D., got",
    "--head set": "--head set needs --loss, such as unified, or smooth_chamfer for sets",
    "--miner BatchHardMiner": "--miner BatchHardMiner needs --loss",
    f"{LOSS} --shuffle-window 5": "--shuffle-window is for our reader: add --train-data and --captions-per-image",
    "--captions-per-image first --shuffle-window 0": "--shuffle-window: shuffle_window must be an integer >= 1, got 0",
    "--head linear --head-kwargs dim=0": "--head linear: dim must be an integer >= 1, got 0",
    f"{SETS} --imagenet-val imagenet": "--head set does not support --imagenet-val",
    f"{SETS} --val-data plain.tar": "--head set: open_clip cannot validate sets: add --captions-per-image random",
    f"{LOSS} --siglip": "--loss does not support --siglip",
    "--captions-per-image first --dataset-resampled": "does not support --dataset-resampled, because an epoch of our",
    "--image-lr 0": "--image-lr: image_lr must be a finite number > 0, got 0",
    "--text-lr 1e-3 --lr 0": "--text-lr is scheduled as --lr is, which must be above 0, got 0.0",
    "--image-layer-decay 1.5": "--image-layer-decay 1.5: lower layers would be trained faster; take a number up to 1",
    "--image-lr 1e-3 --lock-image": "--image-lr has no effect: no parameter of the image is trained: remove it",
    "--save-best": "--save-best and --patience need --train-data, and --val-data that are validated",
    f"{VAL} --captions-per-image 1 --save-best rsumm": "unknown metric of --save-best 'rsumm' (did you mean 'rsum'?)",
    f"{VAL} --save-best positive_similarity": "unknown metric of --save-best 'positive_similarity'; known: clip_val",
    f"{VAL} --patience 0": "--patience: patience must be an integer >= 1, got 0",
    "--validate-first": "--validate-first needs --train-data and --val-data",
    f"{LOSS} --val-data toy-val-*.tar": "reader takes no names with *: write {000000..000009}, or add --capti",
    "--device 3": "--device 3: Invalid device string: '3'",
    "--los unified": "ambiguous option: --los could match",
}
FILES = {
    "--model-config code.json": "code.json: trust_remote_code is not supported",
    "--model-config tokenizer.json": "automap/tokenizer_config.json: auto_map is not supported",
    "--model vl-tinny": "unknown model 'vl-tinny' (did you mean 'vl-tiny'?)",
    "--model local-dir:coded": "local-dir:coded: trust_remote_code is not supported",
    "--model local-dir:automap": "automap/tokenizer_config.json: auto_map is not supported",
    "--distill-model local-dir:coded --distill-pretrained a": "local-dir:coded: trust_remote_code is not supported",
    "--model RN50 --pretrained openay": "--pretrained openay: Pretrained value 'openay' is not a known tag",
    "--pretrained foreign.npz": "--pretrained foreign.npz: ",
    "--head linear --head-kwargs dim=25 --pretrained heads.pt": "size mismatch for image_head.weight",
    "--resume no.pt": "No such file or directory: 'no.pt'",
    "--resume other_run.pt": "--resume other_run.pt: it is of another model: ",
    "--resume no_epoch.pt": "--resume no_epoch.pt: its epoch must be a number, got 'one'",
    "--resume other_optimizer.pt": "--resume other_optimizer.pt: the state of the optimizer does not fit: ",
    "--resume cut_state.pt": r"the state of the optimizer does not fit: exp_avg is \(1,\), expected ",
    "--config bracket.yaml": 'bracket.yaml: not valid YAML: while parsing .* in "bracket.yaml", line 1, column 8',
    "--config list.yaml": "list.yaml: expected flags and their values, such as 'loss: unified', got ",
    "--config object.yaml": "object.yaml: not valid YAML",
    "--config twice.yaml": "twice.yaml: not valid YAML: a key is given twice: loss, loss",
    "--config key.yaml": "unknown key in key.yaml 'los' (did you mean 'loss'?)",
    "--config value.yaml": "argument --lr: invalid float value: 'False'",
    "--config class.yaml": "files name registered losses only",
    "--config smuggled.yaml": "files name registered losses only",
    "--config smuggled_key.yaml": "argument --loss-kwargs: expected at least one argument",
}
FILES |= {
    f"--{flag} {file}.pt": f"{file}.pt: {reason}"
    for flag in ("pretrained", "resume")
    for file, reason in {
        "cut": "it is damaged",
        "harmful": "it holds more than tensors, numbers and text, namely .*print",
        "harmful_part": "it holds more than tensors, numbers and text, namely .*print",
        "pickle": "it holds more than tensors, numbers and text, namely .*print",
    }.items()
}
FILES |= {f"--{flag} no_weights.pt": f"--{flag} no_weights.pt: " for flag in ("pretrained", "resume")}
# No other data are given.
DATA = {
    "--captions-per-image first --train-data pipe:cat --dataset-type webdataset": "shards do not exist: pipe:cat",
    "--captions-per-image first --train-data missing.tsv": r"cannot read image \d, in missing.tsv \(",
    f"{LOSS} --train-data columns.tsv": "--train-data columns.tsv: it has no column 'filepath', only 'a', 'b'; ",
    "--train-data plain.tar::no-{0..1}.tar --dataset-type webdataset": "2 of 3 shards do not exist: no-0.tar",
    "--train-data columns.tsv": "--train-data columns.tsv: it has no column 'filepath', only 'a', 'b'; ",
    f"{TRAIN} {LOSS} --val-data columns.tsv": "--val-data columns.tsv: it has no column 'filepath', only 'a', 'b'; ",
    "--config pipe_in_braces.yaml": "'p{i..i}pe:echo code has run' is no local path",
    "--config pipe_in_list.yaml": "p{i,i}pe:echo code has run' is no local path",
    "--config pipe_in_capitals.yaml": "' PIPE:echo code has run' is no local path",
    "--config url.yaml": "'https://example.invalid/a.tar' is no local path",
    "--config loss_pipe.yaml": "'p{i..i}pe:echo code has run #.tar' is no local path",
    "--captions-per-image first --config loss_pipe.yaml": "1 of 1 shards do not exist: pipe:echo code has run",
}
CASES = [(f"{TRAIN} {flags}", message) for flags, message in (FLAGS | FILES).items()] + list(DATA.items())


@pytest.mark.parametrize(("flags", "message"), CASES, ids=[flags for flags, _ in CASES])
def test_one_line(flags, message, folder, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(folder)
    assert main([*TINY, "--logs", str(tmp_path / "logs"), *flags.split(" ")]) == 2
    printed = capfd.readouterr()
    line = error_line(printed.err)
    assert message in line or re.search(message, line), line
    assert "Traceback" not in printed.err
    assert "code has run" not in printed.out.splitlines()
    assert not list(tmp_path.rglob("*.pt")), "nothing was trained"
