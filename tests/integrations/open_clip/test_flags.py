"""Flags of the launcher and of open_clip on one command line, and in files."""

import open_clip_train.data

from vl_plugins.integrations.open_clip.flags import parse_args


def changed(argv):
    """Return the options that differ from their defaults."""
    defaults = vars(parse_args([]))
    return {name: value for name, value in vars(parse_args(argv)).items() if value != defaults[name]}


def test_abbreviations_of_open_clip():
    assert changed(["--accum", "3"]) == {"accum_freq": 3}


def test_the_limit_of_pixels_is_that_of_open_clip_where_it_has_one():
    has_own = hasattr(open_clip_train.data, "decode_pil_rgb")
    assert parse_args([]).max_image_pixels == (25_000_000 if has_own else 89_000_000)
    assert parse_args(["--max-image-pixels", "0"]).max_image_pixels == 0


def test_files_set_flags_of_both_and_the_command_line_wins(tmp_path):
    (tmp_path / "run.yaml").write_text(
        """
        model: RN101
        train_data: shards/a-{000000..000003}.tar
        lr: 1e-5
        epochs: 10
        gather-with-grad: true
        local-loss: false
        name: null
        image-mean: [0.1, 0.2, 0.3]
        aug-cfg: {scale: [0.9, 1.0]}
        loss: unified
        loss-kwargs: {margin: 0.1, scale: 5e+1}
        captions-per-image: all
        """
    )
    config = ["--config", str(tmp_path / "run.yaml")]
    found = changed([*config, "--epochs", "2", "--loss-kwargs", "margin=0.3"])
    assert found == {
        "config": config[1],
        "model": "RN101",
        "train_data": "shards/a-{000000..000003}.tar",
        "lr": 1e-5,
        "epochs": 2,
        "gather_with_grad": True,
        "image_mean": [0.1, 0.2, 0.3],
        "aug_cfg": {"scale": [0.9, 1.0]},
        "loss": "unified",
        "loss_kwargs": {"margin": 0.3, "scale": 50.0},
        "captions_per_image": "all",
    }
    other = parse_args([*config, "--loss", "triplet_hn", "--loss-kwargs", "margin=0.1"])
    assert other.loss_kwargs == {"margin": 0.1}, "options of another loss"
    piped = parse_args([*config, "--loss", "vlc", "--train-data", "pipe:cat a.tar"])
    assert piped.train_data == "pipe:cat a.tar", "the command line may name programs"
