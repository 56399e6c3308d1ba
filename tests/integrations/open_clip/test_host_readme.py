"""The training commands of open_clip's README but those of CoCa, with ``--loss unified`` added and nothing else.

Small models and data stand in for the real ones, and ``pipe:cat`` for ``pipe:aws s3 cp``.
"""

import json
import os

import open_clip_train.zero_shot
import pytest
import torch
from PIL import Image
from transformers import BertTokenizerFast, RobertaConfig, RobertaModel

from tests.helpers.open_clip_training import read_checkpoint, read_results, write_table
from tests.helpers.processes import in_processes
from vl_plugins.integrations.open_clip.launcher import main

LOSS = ["--loss", "unified"]
# What is smaller here, and the processor in place of a GPU.
SMALL = "--device cpu --epochs 1 --log-every-n-steps 1 --name run".split()
AMP = "amp" if torch.__version__ >= "2.3" else "amp_bf16"  # float16 is on the processor since torch 2.3
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "the", "red", "blue", "green", "circle", "square", "left"]
BERT = {"hidden_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}


@pytest.fixture
def folder(tmp_path, toy_scenes, toy_shards, monkeypatch):
    """A folder with a table of each split, ImageNet of five classes, shards of plain names, and a small RoBERTa."""
    monkeypatch.chdir(tmp_path)
    for split in ("train", "val"):
        write_table(tmp_path / f"{split}.csv", toy_scenes, split, number=16)
    classes = "tench goldfish shark ray cock".split()
    for number, name in enumerate(classes):
        (tmp_path / "imagenet" / name).mkdir(parents=True)
        Image.new("RGB", (64, 64), (50 * number, 80, 80)).save(tmp_path / "imagenet" / name / "a.png")
    monkeypatch.setattr(open_clip_train.zero_shot, "IMAGENET_CLASSNAMES", classes)
    # That of 3.3 fails with numpy 2.4.
    monkeypatch.setattr(open_clip_train.zero_shot, "accuracy", accuracy)
    (tmp_path / "shards").mkdir()
    for number in range(4):
        os.symlink(toy_shards / f"toy-train-{number:06d}.tar", tmp_path / f"shards/{number:05d}.tar")
    (tmp_path / "shards/sizes.json").write_text(json.dumps({f"{number:05d}.tar": 8 for number in range(4)}))
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert/vocab.txt").write_text("\n".join(WORDS))
    RobertaModel(RobertaConfig(vocab_size=len(WORDS), **BERT)).save_pretrained(tmp_path / "bert")
    BertTokenizerFast(
        vocab=str(tmp_path / "bert/vocab.txt"), vocab_file=str(tmp_path / "bert/vocab.txt")
    ).save_pretrained(tmp_path / "bert")
    text = {"hf_model_name": str(tmp_path / "bert"), "hf_tokenizer_name": str(tmp_path / "bert"), "context_length": 16}
    vision = {"image_size": 32, "patch_size": 16, "width": 32, "head_width": 16, "layers": 1}
    text |= {"hf_model_pretrained": False, "hf_proj_type": "mlp", "hf_pooler_type": "mean_pooler"}
    (tmp_path / "small-roberta.json").write_text(json.dumps({"embed_dim": 16, "vision_cfg": vision, "text_cfg": text}))
    return tmp_path


def accuracy(output, target, topk):
    ranked = output.topk(max(topk)).indices
    return [(ranked[:, :k] == target[:, None]).any(dim=1).sum().item() for k in topk]


def losses_of(folder, name="run"):
    return (folder / "logs" / name / "out.log").read_text().count(" Unified_loss: ")


def test_a_table_with_imagenet_and_resumed(folder):
    flags = (
        "--save-frequency 1 --zeroshot-frequency 1 --report-to tensorboard --train-data=train.csv --val-data=val.csv "
    )
    flags += "--csv-img-key filepath --csv-caption-key title --imagenet-val=imagenet --warmup 10000 --batch-size=4 "
    flags += "--lr=1e-3 --wd=0.1 --workers=2 --model vl-tiny-resnet --precision fp32"
    assert main([*flags.split(), *SMALL, *LOSS]) == 0
    row = read_results(folder)[1]
    assert {"imagenet-zeroshot-val-top1", "image_to_text_R@1", "clip_val_loss"} < row.keys()
    assert "rsum" not in row, "--loss changes no validation"
    assert losses_of(folder) == 4
    resumed = "--train-data=train.csv --val-data=val.csv --resume logs/run/checkpoints/epoch_1.pt".split()
    resumed += ["--model", "vl-tiny-resnet", *SMALL, "--epochs", "2", "--name", "resumed", "--batch-size", "4"]
    assert main([*resumed, "--workers", "0", "--precision", "fp32", *LOSS]) == 0
    assert losses_of(folder, "resumed") == 4


def start(rank, folder, flags):
    os.chdir(folder)
    assert main(flags) == 0


def test_shards_on_several_processes(folder):
    """Of one node; of several nodes and by SLURM the trainer gets other variables of the environment only."""
    flags = "--train-data shards/{00000..00003}.tar --train-num-samples 24 --dataset-type webdataset --batch-size 4 "
    flags += f"--precision {AMP} --workers 1 --model vl-tiny --dist-backend gloo --imagenet-val imagenet"
    in_processes(start, 2, folder, [*flags.split(), *SMALL, *LOSS, "--zeroshot-frequency", "0"], joined=False)
    assert losses_of(folder) == 3


def test_the_script_of_the_largest_models(folder):
    """Whose shards have a ``sizes.json``."""
    flags = "--save-frequency 1 --report-to tensorboard --train-data=shards/{00000..00003}.tar --warmup 2000 "
    flags += "--batch-size=4 --workers=1 --model vl-tiny --seed 0 --local-loss --gather-with-grad --precision fp32"
    in_processes(start, 2, folder, [*flags.split(), *SMALL, *LOSS, "--dist-backend", "gloo"], joined=False)
    assert losses_of(folder) == 4


@pytest.mark.parametrize("precision", ["fp32", AMP])
def test_a_language_model_and_programs_as_shards(folder, precision):
    flags = ["--train-data=pipe:cat shards/{00000..00002}.tar", "--val-data=pipe:cat shards/00003.tar"]
    flags += "--train-num-samples 24 --val-num-samples 8 --dataset-type webdataset --batch-size 4 --warmup 2000".split()
    flags += "--lr 5e-4 --workers 1 --model small-roberta --model-config small-roberta.json".split()
    flags += ["--lock-text", "--lock-text-unlocked-layers", "1", "--report-to", "tensorboard", "--precision", precision]
    assert main([*flags, *SMALL, *LOSS]) == 0
    assert losses_of(folder) == 6
    assert "image_to_text_R@1" in read_results(folder)[1]


def test_several_sources(folder):
    sources = "shards/{00000..00001}.tar::shards/{00002..00003}.tar"
    flags = f"--train-data {sources} --dataset-resampled --train-data-upsampling-factors=0.001::0.01 --batch-size 4"
    flags += " --train-num-samples 24 --workers 1 --model vl-tiny --precision fp32"
    assert main([*flags.split(), *SMALL, *LOSS]) == 0
    assert losses_of(folder) == 6


def test_compiled(folder, monkeypatch):
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, **options: compiled(model, backend="eager"))
    flags = "--train-data train.csv --batch-size 4 --workers 0 --model vl-tiny --precision fp32 --torchcompile"
    assert main([*flags.split(), *SMALL, *LOSS]) == 0
    assert losses_of(folder) == 4
    weights = read_checkpoint(folder)["state_dict"]
    assert not any("_orig_mod" in name for name in weights)
