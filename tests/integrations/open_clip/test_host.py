import argparse
import contextlib
import inspect
import sys

import open_clip_train.main
import open_clip_train.params
import pytest
import torch

from tests.integrations.open_clip import open_clip_4
from vl_plugins.integrations.open_clip import host, host_3, host_4, launcher
from vl_plugins.utils.errors import UserError


def test_patched_replaces_and_restores():
    before = dict(vars(open_clip_train.main))
    with host.patched({"create_loss": lambda args: "ours"}) as main:
        assert main.create_loss(None) == "ours"
        with pytest.raises(RuntimeError, match="already patched"), host.patched({}):
            pass
        assert main.create_loss(None) == "ours", "the refused second patch must not have undone the first"
    assert vars(open_clip_train.main) == before


def test_patched_restores_after_an_error():
    before = dict(vars(open_clip_train.main))
    with pytest.raises(ZeroDivisionError), host.patched({"evaluate": lambda: None}):
        raise ZeroDivisionError
    assert vars(open_clip_train.main) == before


VERSIONS = {"3": contextlib.nullcontext, "4": open_clip_4.installed}


@pytest.mark.parametrize("version", VERSIONS)
def test_known_versions(version):
    with VERSIONS[version]():
        assert host.trainer() is sys.modules["open_clip_train.main"]
        assert host.adapter() is {"3": host_3, "4": host_4}[version]


CHECKED = [
    (version, module, name)
    for version, adapter in (("3", host_3), ("4", host_4))
    for module, functions in adapter.CHECKED.items()
    for name in functions
]


@pytest.mark.parametrize(("version", "module", "name"), CHECKED)
def test_unknown_signatures_are_refused(version, module, name, monkeypatch):
    with VERSIONS[version]():
        for function, found in [(lambda weird: None, r"takes \(weird\)"), (lambda: None, r"takes \(\)")]:
            monkeypatch.setattr(sys.modules[module], name, function)
            place = f"open_clip_torch {version}.* is not supported: {module}.{name}"
            with pytest.raises(UserError, match=f"{place} {found}, expected .*; install open_clip_torch 3.3, "):
                host.trainer()
        monkeypatch.delattr(sys.modules[module], name)
        with pytest.raises(UserError, match=f"{name} does not exist|has neither create_loss, .*, nor create_task"):
            host.trainer()
        monkeypatch.undo()


@pytest.mark.parametrize(
    ("version", "name", "function", "found"),
    [
        ("3", "create_loss", lambda args, model: None, r"\(args, model\)"),
        ("3", "evaluate", lambda model, data, epoch, args, tb_writer: None, r"\(model, data, epoch, args, tb_writer\)"),
        ("4", "create_task", lambda args, model, dist_model=None: None, r"\(args, model, dist_model\)"),
        ("4", "create_task", lambda args, model, dist_model, naflex_data_config, ema: None, r"\(.*, ema\)"),
    ],
)
def test_a_parameter_more_or_less_is_refused(version, name, function, found, monkeypatch):
    with VERSIONS[version]() as main:
        monkeypatch.setattr(main or open_clip_train.main, name, function)
        with pytest.raises(UserError, match=rf"open_clip_train\.main\.{name} takes {found}"):
            host.trainer()


def test_a_trainer_with_both_or_neither_is_refused(monkeypatch):
    monkeypatch.setattr(open_clip_train.main, "create_task", lambda args: None, raising=False)
    with pytest.raises(
        UserError, match=r"main has both create_loss, as that of 3\.x, and create_task, as that of 4\.x"
    ):
        host.trainer()
    monkeypatch.delattr(open_clip_train.main, "create_task")
    monkeypatch.delattr(open_clip_train.main, "create_loss")
    with pytest.raises(
        UserError, match=r"main has neither create_loss, as that of 3\.x, nor create_task, as that of 4"
    ):
        host.trainer()


def test_the_task_of_4_is_looked_for(monkeypatch):
    with open_clip_4.installed():
        monkeypatch.delitem(sys.modules, "open_clip.task")
        with pytest.raises(
            UserError, match=r"4\.0\.0\.dev0 is not supported: open_clip\.task\.CLIPTask does not exist"
        ):
            host.trainer()


@pytest.mark.parametrize(
    ("version", "difference"),
    [
        ("2.32.0", "it is older than what was tried"),
        ("3.2.0", "it is older than what was tried"),
        ("3.3.0", None),
        ("3.10.1", None),
        ("4.0.0.dev0", None),
        ("5.0.0", "it is newer than what was tried"),
    ],
)
def test_versions(version, difference, monkeypatch, capsys):
    monkeypatch.setattr(host, "version", lambda distribution: version)
    if difference is None:
        host.trainer()
        return
    assert launcher.main(["--train-data", "x.tar"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"vl_plugins: error: open_clip_torch {version} is not supported: {difference}; install open_cl"
    )
    assert line.endswith("pip install 'open_clip_torch[training]>=3.3,<5'")


def test_both_versions_offer_the_same():
    assert host_3.__all__ == host_4.__all__
    for name in host_3.__all__:
        of_3, of_4 = getattr(host_3, name), getattr(host_4, name)
        assert callable(of_3) == callable(of_4)
        if callable(of_3):
            assert inspect.signature(of_3) == inspect.signature(of_4)


def test_parser_is_the_one_open_clip_parses_with():
    argv = ["--train-data", "x.tar", "--lr", "0.5", "--accum-freq", "3", "--aug-cfg", "scale=(0.9, 1.0)", "--siglip"]
    # parse_args fills the optimizer's defaults in after parsing.
    expected = vars(open_clip_train.params.parse_args(argv)) | {"beta1": None, "beta2": None, "eps": None}
    assert vars(host.parser().parse_args(argv)) == expected
    assert open_clip_train.params.argparse is argparse


def test_data_parallel_on_cpu():
    stock = torch.nn.parallel.DistributedDataParallel
    with host.data_parallel_on_cpu():
        replaced = torch.nn.parallel.DistributedDataParallel
        assert issubclass(replaced, stock)
        assert list(inspect.signature(replaced.__init__).parameters)[:3] == ["self", "module", "device_ids"]
    assert torch.nn.parallel.DistributedDataParallel is stock
