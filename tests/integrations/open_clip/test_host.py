"""What the launcher replaces in open_clip, and the versions that it supports."""

import open_clip_train.main
import pytest

from vl_plugins.errors import UserError
from vl_plugins.integrations.open_clip import host


def test_functions_are_put_back_also_after_an_error():
    before = dict(vars(open_clip_train.main))
    with pytest.raises(ZeroDivisionError), host.replaced(open_clip_train.main, create_loss=lambda args: 1 / args):
        open_clip_train.main.create_loss(0)
    assert vars(open_clip_train.main) == before


@pytest.mark.parametrize("name", host.OpenCLIP3.main_functions)
def test_functions_with_other_parameters_are_an_error(name, monkeypatch):
    assert type(host.installed_host()) is host.OpenCLIP3
    monkeypatch.setattr(open_clip_train.main, name, lambda weird: None)
    place = rf"open_clip_torch 3.* is not supported: open_clip_train\.main\.{name}"
    with pytest.raises(UserError, match=rf"{place} takes \(weird\), expected \(.*\); install open_clip_torch 3.3"):
        host.installed_host()
    monkeypatch.delattr(open_clip_train.main, name)
    with pytest.raises(UserError, match=f"{place} does not exist"):
        host.installed_host()


@pytest.mark.parametrize("version", ["3.2.0", "3.10.1", "5.0.0"])
def test_versions(version, monkeypatch):
    monkeypatch.setattr(host, "version", lambda distribution: version)
    if version == "3.10.1":
        host.installed_host()
        return
    message = f"^open_clip_torch {version} is not supported: .*; install open_clip_torch 3.3, .*>=3.3,<5'$"
    with pytest.raises(UserError, match=message):
        host.installed_host()
