"""A run that is resumed continues with the loss of its checkpoint: a learned scale, and the step of a warm-up."""

import warnings
from functools import partial

import pytest
import torch

from tests.helpers.processes import in_processes
from vl_plugins.errors import InputWarning

reason = "needs pip install 'vl_plugins[sentence-transformers]'"
host = pytest.importorskip("sentence_transformers", minversion="6.0", reason=reason)
ours = pytest.importorskip("vl_plugins.integrations.sentence_transformers", exc_type=ImportError, reason=reason)
losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
transformers = pytest.importorskip("transformers")
example = pytest.importorskip("vl_plugins.integrations.examples.sentence_transformers_trainer", exc_type=ImportError)


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    """A data set of 8 images."""
    return example.read_scenes(tmp_path_factory.mktemp("scenes"), train=8, val=1, test=1)[0]


def learned_scale(model):
    return ours.RetrievalLoss(model, "unified", num_positives=5, learn_scale=True, scale=20)


def warmup(model, kind=ours.RetrievalLoss):
    return kind(model, "triplet_hn", num_positives=5, warmup_steps=3)


def in_another_loss(model):
    return losses.MatryoshkaLoss(model, learned_scale(model), [64, 32])


def by_data_set(model):
    return {"scenes": learned_scale(model), "more scenes": warmup(model)}


class Watch(transformers.TrainerCallback):
    """Notes the state of the losses at the beginning of each step, and at the end."""

    def __init__(self, loss):
        self.losses = loss.values() if isinstance(loss, dict) else [loss]
        self.seen = []

    def on_step_begin(self, *_, **__):
        states = [loss.state_dict() for loss in self.losses]
        values = [(name, float(value)) for state in states for name, value in state.items() if "model." not in name]
        self.seen.append(values)

    on_train_end = on_step_begin


def train(folder, data, output, make_loss, steps=4, resume=None, is_kept=True, **options):
    """Return the states of the losses, and the weights of the model at the end."""
    model = host.SentenceTransformer(folder, device="cpu")
    loss = make_loss(model)
    defaults = {"max_steps": steps, "save_steps": 2, "save_strategy": "steps", "learning_rate": 0.01, "seed": 1}
    defaults |= {"per_device_train_batch_size": 8, "lr_scheduler_type": "constant", "report_to": "none"}
    arguments = host.SentenceTransformerTrainingArguments(
        output_dir=str(output), use_cpu=True, disable_tqdm=True, **defaults | options
    )
    watch = Watch(loss)
    callbacks = [ours.LossStateCallback(loss), watch] if is_kept else [watch]
    if isinstance(loss, dict):
        data = {name: data.select(range(8)) for name in loss}  # each gets a transform of its own
    trainer = host.SentenceTransformerTrainer(model, arguments, train_dataset=data, loss=loss, callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume and str(resume))
    return watch.seen, {name: value.detach() for name, value in model.named_parameters()}


CASES = [learned_scale, warmup, partial(warmup, kind=ours.CachedRetrievalLoss), in_another_loss, by_data_set]


@pytest.mark.parametrize("make_loss", CASES, ids=["scale", "warmup", "cached", "Matryoshka", "dict"])
def test_a_resumed_run_ends_as_the_whole_run(make_loss, clip_folder, scenes, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error", InputWarning)
        whole, right = train(clip_folder, scenes, tmp_path, make_loss)
        resumed, found = train(clip_folder, scenes, tmp_path / "resumed", make_loss, resume=tmp_path / "checkpoint-2")
    assert len(whole) == 5
    assert whole[0] != whole[2] != whole[4]
    assert resumed[0] == whole[2]
    assert resumed == whole[2:]
    torch.testing.assert_close(found, right, rtol=0, atol=0)


def scale_of_all(model, kind=ours.CachedRetrievalLoss):
    return kind(model, "unified", num_positives=5, gather_across_devices=True, learn_scale=True, scale=20)


def resume_in_process(rank, folder, pictures, output):
    """Return the scales at each step of a whole run and of a resumed one."""
    data, _ = example.read_scenes(pictures, train=8, val=1, test=1)
    options = {"per_device_train_batch_size": 4}
    whole, _ = train(folder, data, output, scale_of_all, **options)
    plain = partial(scale_of_all, kind=ours.RetrievalLoss)
    resumed, _ = train(folder, data, f"{output}/resumed", plain, resume=f"{output}/checkpoint-2", **options)
    return [whole, resumed]


def test_a_learned_scale_in_two_processes(clip_folder, scenes, tmp_path):
    """It is that of one process with all rows, with gradient caching, and after a checkpoint, without."""
    whole, _ = train(clip_folder, scenes, tmp_path / "one", scale_of_all)
    right = [pytest.approx(values[0][1], abs=1e-5) for values in whole]
    assert whole[0] != whole[2] != whole[4]
    for scales in in_processes(
        resume_in_process, 2, clip_folder, str(tmp_path / "scenes"), str(tmp_path), joined=False
    ):
        assert [values[0][1] for values in scales[0]] == right
        assert [values[0][1] for values in scales[1]] == right[2:]


def test_a_loss_whose_state_is_not_in_the_checkpoints(clip_folder, scenes, tmp_path):
    """A warning in the first step tells of it, and one when a run with the callback resumes from such a checkpoint."""
    with pytest.warns(InputWarning, match="^the trainer's checkpoints do not have the parameters or .* of UnifiedLoss"):
        train(clip_folder, scenes, tmp_path, learned_scale, steps=2, is_kept=False)
    checkpoint = tmp_path / "checkpoint-2"
    with pytest.warns(InputWarning, match="^the checkpoint of step 2 has no state of the loss, which starts anew"):
        seen, _ = train(clip_folder, scenes, tmp_path, learned_scale, resume=checkpoint)
    assert seen[0] == [("loss.log_scale", pytest.approx(2.995732))]
    train(clip_folder, scenes, tmp_path / "model", learned_scale, steps=2, save_only_model=True)
    with pytest.warns(InputWarning, match="^the checkpoint of step 2 has no state of the loss, which starts anew"):
        train(clip_folder, scenes, tmp_path, learned_scale, resume=tmp_path / "model" / "checkpoint-2")


def test_a_loss_without_state_needs_no_callback(clip_folder, scenes, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error", InputWarning)
        train(clip_folder, scenes, tmp_path, partial(ours.RetrievalLoss, num_positives=5), steps=2, is_kept=False)
        checkpoint = tmp_path / "checkpoint-2"
        train(clip_folder, scenes, tmp_path, partial(ours.RetrievalLoss, num_positives=5), resume=checkpoint)


def test_another_loss_is_an_error(clip_folder, scenes, tmp_path):
    plain = partial(ours.RetrievalLoss, num_positives=5)
    train(clip_folder, scenes, tmp_path, plain, steps=2)
    with pytest.raises(ValueError, match=r"^the checkpoint is of another loss: .* Warmup: .*; resume with the loss"):
        train(clip_folder, scenes, tmp_path, warmup, resume=tmp_path / "checkpoint-2")
    train(clip_folder, scenes, tmp_path, warmup, steps=2)
    train(clip_folder, scenes, tmp_path, plain, resume=tmp_path / "checkpoint-2")  # after a warm-up, without it


def test_what_holds_no_loss_of_this_package_is_an_error():
    with pytest.raises(ValueError, match=r"^loss must be a RetrievalLoss, or hold one, got Linear\("):
        ours.LossStateCallback(torch.nn.Linear(1, 1))


def test_a_second_training_goes_on(clip_folder, scenes, tmp_path):
    """Without a checkpoint: neither the first state nor that of the first training returns."""
    model = host.SentenceTransformer(clip_folder, device="cpu")
    loss = warmup(model)
    arguments = host.SentenceTransformerTrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, max_steps=2, per_device_train_batch_size=8, report_to="none"
    )
    callbacks = [ours.LossStateCallback(loss)]
    trainer = host.SentenceTransformerTrainer(model, arguments, train_dataset=scenes, loss=loss, callbacks=callbacks)
    trainer.train()
    trainer.train()
    assert loss.loss.step == 4
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert loss.loss.step == 4
