import pytest

from vl_plugins.errors import UserError
from vl_plugins.integrations.open_clip.options import PluginOptions, format_help, parse_arguments


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_own_flags_are_taken_out_and_the_rest_passed_on():
    options, host_options, rest = parse_arguments(
        "--model ViT-B-32 --loss unified --loss-kwargs margin=0.1 scale=learned flag=true --epochs 3 "
        "--miner BatchHardMiner --reducer ThresholdReducer --reducer-kwargs low=1e-3 --captions-per-image 5 "
        "--allow-duplicate-captions --on-read-error raise".split()
    )
    assert options == PluginOptions(
        loss="unified",
        loss_kwargs={"margin": 0.1, "scale": "learned", "flag": True},
        miner="BatchHardMiner",
        reducer="ThresholdReducer",
        reducer_kwargs={"low": 0.001},
        captions_per_image="5",
        allow_duplicate_captions=True,
        on_read_error="raise",
    )
    assert rest == ["--model", "ViT-B-32", "--epochs", "3"]
    assert (host_options.model, host_options.epochs) == ("ViT-B-32", 3)


def test_no_own_flags():
    options, _, rest = parse_arguments(["--accum", "3"])
    assert options == PluginOptions()
    assert (options.allow_duplicate_captions, options.on_read_error) == (False, "skip")
    assert rest == ["--accum", "3"], "open_clip's own abbreviations keep working"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--los", "unified"], "unknown option --los; did you mean --loss"),
        (["--lss", "unified"], "unrecognized arguments: --lss unified"),
        (["--loss"], "--loss: expected one argument"),
        (["--loss-kwargs", "margin"], "--loss-kwargs: expected key=value, got 'margin'"),
        (["--epochs", "many"], "argument --epochs: invalid int value: 'many'"),
        (["--on-read-error", "stop"], "argument --on-read-error: invalid choice: 'stop' (choose from"),
        (["--config", "no-such.yaml"], "--config: no such file: no-such.yaml"),
    ],
)
def test_wrong_command_lines(argv, message):
    with pytest.raises(UserError) as raised:
        parse_arguments(argv)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_config_file_sets_flags_of_both_and_the_command_line_wins(tmp_path):
    config = write(
        tmp_path / "run.yaml",
        """
        model: ViT-B-32
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
        allow-duplicate-captions: true
        on-read-error: raise
        """,
    )
    options, host_options, _ = parse_arguments(["--config", config, "--epochs", "2", "--loss-kwargs", "margin=0.3"])
    assert options == PluginOptions(
        loss="unified",
        loss_kwargs={"margin": 0.3, "scale": 50.0},
        captions_per_image="all",
        allow_duplicate_captions=True,
        on_read_error="raise",
    )
    assert host_options.train_data == "shards/a-{000000..000003}.tar"
    assert (host_options.lr, host_options.epochs, host_options.name) == (1e-5, 2, None)
    assert (host_options.gather_with_grad, host_options.local_loss) == (True, False)
    assert host_options.image_mean == [0.1, 0.2, 0.3]
    assert host_options.aug_cfg == {"scale": [0.9, 1.0]}


def test_another_loss_on_the_command_line_drops_the_configured_options(tmp_path):
    config = write(tmp_path / "run.yaml", "loss: unified\nloss-kwargs: {scale: 60}\nminer: A\nminer-kwargs: {x: 1}\n")
    options, _, _ = parse_arguments(["--config", config, "--loss", "triplet_hn", "--loss-kwargs", "margin=0.1"])
    assert (options.loss, options.loss_kwargs) == ("triplet_hn", {"margin": 0.1})
    assert (options.miner, options.miner_kwargs) == ("A", {"x": 1})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("loss: [", "not valid YAML"),
        ("- loss\n", "expected a mapping of flag names to values, got list"),
        ("los: unified\n", "unknown key in {path} 'los' (did you mean 'loss'?)"),
        ("loss-kwargs: 5\n", "{path}: loss-kwargs must be a mapping such as {{margin: 0.2}}, got 5"),
        ("siglip: 1\n", "{path}: siglip must be true or false, got 1"),
        ("lr: false\n", "{path}: lr must be a value, got False"),
        ("epochs: many\n", "argument --epochs: invalid int value: 'many'"),
    ],
)
def test_wrong_config_files(tmp_path, text, message):
    path = write(tmp_path / "run.yaml", text)
    with pytest.raises(UserError) as raised:
        parse_arguments(["--config", path])
    assert message.format(path=path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_help_shows_both():
    text = format_help()
    for flag in (
        "--loss NAME",
        "--captions-per-image",
        "--allow-duplicate-captions",
        "--on-read-error {skip,raise}",
        "--config",
        "--train-data TRAIN_DATA",
        "--accum-freq",
        "--siglip",
    ):
        assert flag in text
    assert text.count("show this help") == 1
