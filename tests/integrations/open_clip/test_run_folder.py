"""One training at a time in a run's folder; a failed start leaves the name free."""

import pytest

from vl_plugins.errors import UserError
from vl_plugins.integrations.open_clip.run_folder import check_is_free, occupied

STARTED = "2026-01-01 | INFO | Model:\n"
TRAINED = STARTED + "2026-01-01 | INFO | Train Epoch: 0 [ 16/64 (25%)] Loss: 0.5\n"


def write(file, text=""):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.mark.parametrize(
    ("files", "is_free"),
    [
        pytest.param({}, True, id="nothing"),
        pytest.param({"out.log": STARTED, "params.txt": "", "checkpoints/.x": ""}, True, id="a failed start"),
        pytest.param({"out.log": TRAINED}, False, id="a step"),
        pytest.param({"checkpoints/epoch_1.pt": ""}, False, id="a checkpoint"),
        pytest.param({"out.log": STARTED, "checkpoints/results.jsonl": ""}, False, id="an evaluation"),
    ],
)
def test_a_failed_start_does_not_occupy_a_name(tmp_path, files, is_free):
    folder = tmp_path / "run"
    for name, text in files.items():
        write(folder / name, text)
    if is_free:
        check_is_free(folder)
        with occupied(folder, resumes=False):
            assert not (folder / "out.log").exists(), "the trainer would not start"
        return
    for check in (check_is_free, occupied(folder, resumes=False).__enter__):
        with pytest.raises(UserError, match=r"^--name run: .* holds an earlier run; give another name, or --resume"):
            check(*([folder] if check is check_is_free else []))
    with occupied(folder, resumes=True):
        assert all((folder / name).read_text() == text for name, text in files.items())


@pytest.mark.parametrize("resumes", [False, True])
def test_one_process_at_a_time(tmp_path, resumes):
    folder = tmp_path / "run"
    with occupied(folder, resumes=False):
        write(folder / "out.log", STARTED)
        with pytest.raises(UserError, match=f"^another process is writing to {folder}"):
            occupied(folder, resumes=resumes).__enter__()
        assert (folder / "out.log").exists()
    with occupied(folder, resumes=True):
        pass
