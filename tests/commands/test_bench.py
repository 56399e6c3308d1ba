import csv

import pytest
import torch

from vl_plugins.benchmarks import measurement
from vl_plugins.benchmarks.names import LOSSES, PEERS, SETS
from vl_plugins.cli import build_parser, main

SMALL = ["--batch-sizes", "24", "16", "--dimensions", "8", "--rounds", "1"]


@pytest.fixture(autouse=True)
def little_to_copy(monkeypatch):
    monkeypatch.setattr(measurement, "COPIED_BYTES", 2**16)


def bench(*arguments):
    return main(["bench", *SMALL, *arguments])


def test_table_and_files(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    files = {kind: tmp_path / "new" / f"bench.{suffix}" for kind, suffix in (("csv", "csv"), ("markdown", "md"))}
    files["plot"] = tmp_path / "bench.png"
    flags = [argument for kind, file in files.items() for argument in (f"--{kind}", str(file))]
    status = bench("--losses", "unified", "--backends", "dense", "tiled", "--peers", "clip", "memeff", *flags)
    assert status == 0
    output = capsys.readouterr()
    assert "unified (dense) / clip" in output.out
    assert "unified (tiled) / clip" in output.out
    assert output.out.index("B 16, D 8") < output.out.index("B 24, D 8")
    assert "skipped memeff: needs a CUDA GPU" in output.out
    assert output.err.splitlines() == [f"B {size}, D 8, float32: 4 contestants, 1 rounds" for size in (16, 24)]
    with files["csv"].open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert {(row["contestant"], row["peer"], row["batch_size"]) for row in rows} == {
        (name, peer, size)
        for size in ("16", "24")
        for name, peer in (
            ("unified (dense)", "clip"),
            ("unified (tiled)", "clip"),
            ("clip", ""),
            ("three-products", ""),
        )
    }
    assert "| unified (dense) / clip |" in files["markdown"].read_text()
    assert files["plot"].read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["bench.csv", "bench.md", "bench.png", "new"]


def test_sets_and_types(capsys):
    assert bench("--losses", SETS, "--elements", "3", "--dtypes", "float32", "bfloat16") == 0
    output = capsys.readouterr().out
    for dtype in ("float32", "bfloat16"):
        assert f"B 24, K 3, D 8, {dtype}" in output
    for peer in ("lp-pooling", "average-pooling", "reshape-and-sum"):
        assert f"{SETS} / {peer}" in output


def test_threads_are_those_asked_for_and_set_back(monkeypatch, capsys):
    used = []

    def run(contestants, *arguments):
        used.append(torch.get_num_threads())
        return measure([], *arguments)

    measure = measurement.measure
    monkeypatch.setattr(measurement, "measure", run)
    before = torch.get_num_threads()
    assert bench("--threads", "2", "--losses", "vlc", "--peers") == 2  # nothing was measured
    assert used == [2, 2]
    assert torch.get_num_threads() == before


def test_all_and_no_peers(capsys):
    assert bench("--losses", "vlc", SETS, "--peers") == 0
    assert " / " not in capsys.readouterr().out.partition("B 16")[2]
    assert bench("--losses", SETS, "--peers", "all") == 0
    output = capsys.readouterr().out
    assert all((f"/ {name}" in output) == PEERS[name].of_sets for name in PEERS)


def test_the_seed_is_used(monkeypatch):
    seeds = []
    make_inputs = measurement.make_inputs
    monkeypatch.setattr(
        measurement, "make_inputs", lambda setting, seed: seeds.append(seed) or make_inputs(setting, seed)
    )
    assert bench("--losses", "vlc", "--peers", "--seed", "5") == 0
    assert seeds == [5, 5]


def test_the_memory_limit_is_in_gb(capsys):
    """16 MB are for tiles, whatever the size."""
    assert bench("--losses", "vlc", "--peers", "--memory-limit", "0.018") == 0
    assert bench("--losses", "vlc", "--peers", "--memory-limit", "0.016") == 2
    assert (
        "error: nothing to measure (vlc: needs about 0.0168 GB, more than the limit of 0.016 GB"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--losses", "unifed"], "unknown loss 'unifed' (did you mean 'unified'?); known: "),
        (["--backends", "dens"], "unknown backend 'dens' (did you mean 'dense'?)"),
        (["--peers", "clib"], "unknown peer 'clib' (did you mean 'clip'?)"),
        (["--peers", "clip", "all"], "unknown peer 'all'"),
        (["--dtypes", "float8"], "unknown dtype 'float8'"),
        (["--peers", "lp-pooling"], f"--peers lp-pooling needs something to compare it with: add --losses {SETS}"),
        (["--losses", SETS, "--peers", "clip"], "--peers clip needs something to compare it with: add a loss other"),
        (["--batch-sizes", "16", "1"], "--batch-sizes must be at least 2, got 1"),
        (["--dimensions", "0"], "--dimensions must be at least 1, got 0"),
        (["--elements", "0"], "--elements must be at least 1, got 0"),
        (["--threads", "0"], "--threads must be at least 1, got 0"),
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["--memory-limit", "0"], "--memory-limit must be a number of GB above 0, got 0"),
        (["--memory-limit", "nan"], "--memory-limit must be a number of GB above 0, got nan"),
        (["--device", "tpu9"], "--device tpu9: "),
        (["--device", "meta"], "--device meta: cpu and cuda can be measured"),
        (["--plot", "bench.txt"], "the picture must end in .png, .pdf or .svg, got bench.txt"),
        (["--csv", "."], "cannot write .: it is a folder"),
    ],
)
def test_bad_options_give_one_line_before_anything_is_measured(arguments, message, capsys):
    assert bench(*arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"vl-plugins bench: error: {message}")


def test_a_disagreement_stops(monkeypatch, capsys, tmp_path):
    from open_clip.loss import ClipLoss

    forward = ClipLoss.forward
    monkeypatch.setattr(ClipLoss, "forward", lambda *arguments: 1.01 * forward(*arguments))
    assert bench("--losses", "vlc", "--peers", "clip", "--csv", str(tmp_path / "bench.csv")) == 2
    output = capsys.readouterr()
    assert "vl-plugins bench: error: clip is not 0.5 x vlc" in output.err
    assert output.out == ""
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written_does_not_hide_the_table(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert bench("--losses", "vlc", "--peers", "--csv", str(tmp_path / "file" / "bench.csv")) == 2
    output = capsys.readouterr()
    assert "B 16, D 8, float32" in output.out
    assert "cannot write" in output.err


def test_help_names_all_losses_and_peers(capsys):
    with pytest.raises(SystemExit):
        build_parser().parse_args(["bench", "--help"])
    text = capsys.readouterr().out
    for name in (*LOSSES, *PEERS):
        assert name in text
    assert max(map(len, text.splitlines())) <= 100
