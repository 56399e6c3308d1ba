"""The guide runs as it stands, with a tiny CLIP in the place of OpenAI's."""

import re
from pathlib import Path

import pytest

reason = "needs pip install 'vl_plugins[sentence-transformers]'"
host = pytest.importorskip("sentence_transformers", minversion="6.0", reason=reason)
ROOT = Path(__file__).parents[3]
GUIDE = ROOT / "docs" / "guides" / "sentence_transformers.md"
MODEL = "openai/clip-vit-base-patch32"


def test_the_guide(clip_folder, toy_shards, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    Path("toy-shards").symlink_to(toy_shards)
    text = GUIDE.read_text(encoding="utf-8").replace(MODEL, clip_folder)
    snippets = re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    assert len(snippets) == 5
    variables = {}
    data, training, cached, sets, metric = (compile(snippet, GUIDE.name, "exec") for snippet in snippets)
    exec(data, variables)
    assert variables["train"].column_names == ["png", *(f"caption_{number}" for number in range(5))]
    exec(training, variables)
    assert "toy_rsum" in (tmp_path / "clip-toy" / "final" / "README.md").read_text(encoding="utf-8")
    columns = [
        variables["model"].preprocess(list(variables["train"][name][:4])) for name in variables["train"].column_names
    ]
    value = variables["loss"](columns)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (diff,) = re.findall(r"^```diff\n( model = .*?)^```", readme, flags=re.MULTILINE | re.DOTALL)
    changed = "".join(line[1:] for line in diff.splitlines(keepends=True) if line[0] != "-")
    others = dict(variables)
    exec(changed.replace(MODEL, clip_folder), others)
    assert 0 < others["trainer"].loss(columns).item() < 100
    exec(cached, variables)
    assert variables["loss"](columns).item() == pytest.approx(value.item(), rel=1e-5)
    exec(sets, variables)
    arguments = host.MultiVectorEncoderTrainingArguments("sets", max_steps=1, report_to="none", use_cpu=True)
    parts = (variables[name] for name in ("encoder", "train", "loss", "evaluator"))
    encoder, train, loss, evaluator = parts
    host.MultiVectorEncoderTrainer(encoder, arguments, train_dataset=train, loss=loss, evaluator=evaluator).train()
    assert 0 < evaluator(encoder)["rsum"] < 600
    exec(metric, variables)
