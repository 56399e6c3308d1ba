"""The guard, on its own and in open_clip's trainer."""

import logging
import re

import pytest
import torch

from vl_plugins.integrations.open_clip.launcher import main
from vl_plugins.integrations.open_clip.loss import build_loss
from vl_plugins.integrations.open_clip.non_finite import NonFiniteGuard, NonFiniteLossError
from vl_plugins.integrations.open_clip.options import PluginOptions
from vl_plugins.integrations.open_clip.training import RememberingLoader, Training
from vl_plugins.utils.errors import UserError

B, D = 4, 8


class Model(torch.nn.Linear):
    """The smallest thing with open_clip's output."""

    def __init__(self):
        torch.manual_seed(1)
        super().__init__(D, D)

    def forward(self, images, texts):
        return {
            "image_features": super().forward(images),
            "text_features": super().forward(texts),
            "logit_scale": torch.tensor(14.0),
        }


def batch(seed, captions=1):
    generator = torch.Generator().manual_seed(seed)
    keys = [f"image-{seed}-{number}" for number in range(B)]
    return (
        torch.randn(B, D, generator=generator),
        torch.randn(captions * B, D, generator=generator),
        torch.arange(B),
        keys,
    )


class Run:
    """open_clip's train step, with what the launcher puts around it."""

    def __init__(self, action, batches, accum_freq=1, scaler=None, steps_before=0):
        self.loader = RememberingLoader(batches, len(batches), B * len(batches), accum_freq)
        self.training = Training(steps_before=steps_before, loader=self.loader)
        self.model, self.scaler, self.accum_freq = Model(), scaler, accum_freq
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, weight_decay=0.5)
        options = PluginOptions(loss="unified", loss_kwargs={"scale": 5})
        self.guard = NonFiniteGuard(build_loss(options), action, self.training, calls_per_step=accum_freq)
        self.training.before_step = self.guard.before_step
        self.weights = []

    def __call__(self):
        batches = []
        with self.training.steps_watched(self.optimizer):
            for images, texts in self.loader:
                batches.append((images, texts))
                if len(batches) < self.accum_freq:
                    continue
                self.optimizer.zero_grad()
                for number in range(self.accum_freq):
                    with torch.no_grad():
                        outputs = [self.model(*each) for each in batches]
                    outputs[number] = self.model(*batches[number])
                    features = {
                        f"{tower}_features": torch.cat([output[f"{tower}_features"] for output in outputs])
                        for tower in ("image", "text")
                    }
                    losses = self.guard(**features, logit_scale=outputs[0]["logit_scale"], output_dict=True)
                    self.backward(sum(losses.values()))
                self.step()
                batches = []
                self.weights.append(self.model.weight.detach().clone())
        return self.weights

    def backward(self, loss):
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def step(self):
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()


def with_nan(batches, number, of="texts", row=2):
    images, texts, *rest = batches[number]
    side = (images if of == "images" else texts).clone()
    side[row, 0] = torch.nan
    batches[number] = (side, texts, *rest) if of == "images" else (images, side, *rest)
    return batches


def test_a_finite_loss_is_left_as_it_is():
    run = Run("stop", [batch(seed) for seed in range(4)])
    plain = Run("stop", [batch(seed) for seed in range(4)])
    plain.guard, plain.training.before_step = plain.guard.loss, None
    for one, other in zip(run(), plain(), strict=True):
        assert torch.equal(one, other)


def test_stop_names_step_keys_and_similarities(caplog):
    batches = with_nan([batch(seed) for seed in range(5)], 3)
    run = Run("stop", batches, steps_before=100)
    with pytest.raises(NonFiniteLossError) as raised:
        run()
    message = str(raised.value)
    assert isinstance(raised.value, UserError)
    assert message.startswith(
        "step 103: the loss is not finite (unified_loss nan); 1 of 4 text features are not finite; "
    )
    images, texts, _, keys = batches[3]
    outputs = run.model(images, texts[[0, 1, 3]])
    products = outputs["image_features"] @ outputs["text_features"].T
    least, most = re.search(r"similarities of finite features from (\S+) to (\S+);", message).groups()
    torch.testing.assert_close(
        torch.tensor([float(least), float(most)]), torch.stack(products.aminmax()), rtol=1e-3, atol=0
    )
    assert "logit scale 14; keys of these: image-3-2. " in message
    assert message.endswith("--on-nan skip leaves such steps out")
    assert len(run.weights) == 3
    assert torch.equal(run.model.weight, run.weights[-1]), "stopped before the step"
    assert f"keys of the batch: {' '.join(keys)}" in caplog.text


def test_the_image_of_a_caption_is_named():
    batches = with_nan([batch(0, captions=3)], 0, row=7)
    with pytest.raises(NonFiniteLossError, match=r"1 of 12 text features are not finite.*keys of these: image-0-2"):
        Run("stop", batches)()


def test_without_features_that_are_not_finite_all_keys_are_named():
    run = Run("stop", [batch(seed) for seed in range(2)])
    run.guard.loss.pair_loss.scale = torch.nan
    with pytest.raises(NonFiniteLossError, match="batch keys: image-0-0, image-0-1, image-0-2, image-0-3"):
        run()


def test_skip_leaves_weights_and_optimizer_as_they_are(caplog):
    damaged, clean = [batch(seed) for seed in range(4)], [batch(seed) for seed in (0, 1, 3)]
    run, expected = Run("skip", with_nan(damaged, 2, of="images")), Run("skip", clean)
    with caplog.at_level(logging.WARNING):
        weights = run()
    assert torch.equal(weights[1], weights[2])
    for one, other in zip([*weights[:2], weights[3]], expected(), strict=True):
        assert torch.equal(one, other)
    (state,) = {int(state["step"]) for state in run.optimizer.state.values()}
    assert state == 3
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.message.startswith("step 2: the loss is not finite")
    assert warning.message.endswith("The step is skipped")


def test_skipping_forever_is_stopped():
    batches = [batch(seed) for seed in range(60)]
    for number in [*range(3, 22), *range(25, 60)]:  # 19 in a row, then many
        with_nan(batches, number)
    run = Run("skip", batches)
    with pytest.raises(NonFiniteLossError, match="20 steps in a row were skipped"):
        run()
    assert len(run.weights) == 25 + 19


@pytest.mark.parametrize("bad", [0, 1])
def test_accumulated_batches_are_one_step(bad):
    batches = with_nan([batch(seed) for seed in range(6)], 2 + bad)
    run = Run("skip", batches, accum_freq=2)
    weights = run()
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[2])
    with pytest.raises(NonFiniteLossError, match=f"^step 1: .*keys of these: image-{2 + bad}-2"):
        Run("stop", batches, accum_freq=2)()


@pytest.mark.parametrize("values", [(torch.nan, 1.0), (1.0, torch.inf)])
def test_any_call_of_a_step_may_be_the_one_that_is_not_finite(values):
    """The features of a batch are computed anew in its own call, and by other random numbers."""
    guard = NonFiniteGuard(Term(), "stop", Training(), calls_per_step=2)
    for value in (1.0, 1.0):
        guard(value=torch.tensor(value))
    guard.before_step(None)
    for value in values:
        guard(value=torch.tensor(value))
    with pytest.raises(NonFiniteLossError, match=r"^step 1: the loss is not finite"):
        guard.before_step(None)


class Term(torch.nn.Module):
    def forward(self, value):
        return value


def make_scaler():
    if not hasattr(torch.amp, "GradScaler"):
        pytest.skip(f"torch {torch.__version__} has no gradient scaler for the CPU")
    return torch.amp.GradScaler("cpu", init_scale=4.0)


def test_a_gradient_scaler_skips_by_itself_and_it_is_reported_at_the_next_step(caplog):
    batches = with_nan([batch(seed) for seed in range(4)], 1)
    run = Run("skip", batches, scaler=make_scaler())
    weights = run()
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[2])
    assert "step 1: the loss is not finite" in caplog.text
    assert "keys of these: image-1-2. The step is skipped" in caplog.text
    stopped = Run("stop", batches, scaler=make_scaler())
    with pytest.raises(NonFiniteLossError, match="step 1: "):
        stopped()
    assert len(stopped.weights) == 2


def test_evaluation_is_not_watched():
    run = Run("stop", with_nan([batch(0)], 0))
    images, texts = next(iter(run.loader))
    with torch.no_grad():
        run.guard(**run.model(images, texts), output_dict=True)
    assert run.guard._is_finite is None


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


# Weights of this size are infinite after a step or two.
EXPLODING = "--model vl-tiny --device cpu --precision fp32 --batch-size 16 --workers 0 --epochs 6 --warmup 0 --lr 1e30"


@pytest.mark.parametrize(
    ("flags", "message", "skipped"),
    [
        ("--loss unified", "--on-nan skip leaves such steps out", 0),
        # All in the first epoch: at its end the weights are looked at.
        ("--loss unified --on-nan skip --batch-size 2", "20 steps in a row were skipped", 19),
        ("--on-nan stop", "batch keys are not known", 0),
    ],
)
def test_a_training_that_explodes(folder, toy_shards, flags, message, skipped, capfd):
    shards = f"{toy_shards}/toy-train-{{000000..000007}}.tar"
    assert main([*EXPLODING.split(), "--train-data", shards, "--name", "run", *flags.split()]) == 2
    output = capfd.readouterr().err
    (line,) = [line for line in output.splitlines() if line.startswith("vl_plugins: error: ")]
    found = re.fullmatch(r"vl_plugins: error: step (\d+): the loss is not finite .*similarit.*", line)
    assert found, line
    assert message in line
    first = int(found[1]) - skipped
    assert 0 < first < 8
    steps = [int(step) for step in re.findall(r"step (\d+): the loss is not finite.*The step is skipped", output)]
    assert list(dict.fromkeys(steps)) == list(range(first, first + skipped))
    assert f"on_nan: {'skip' if skipped else 'stop'}\n" in (folder / "logs/run/params.txt").read_text()


def test_nothing_is_watched_afterwards():
    training = Training()
    calls = []
    training.before_step = calls.append
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    with training.steps_watched(optimizer):
        optimizer.step()
    optimizer.step()
    assert calls == [optimizer]
    assert "step" not in vars(optimizer)


def test_a_compiled_training_is_watched():
    """torch 2.2 turns the hooks of optimizers off once anything is compiled."""
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    run = Run("skip", with_nan([batch(seed) for seed in range(3)], 1))
    weights = run()
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[1], weights[2])
