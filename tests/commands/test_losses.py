import argparse
import json

import pytest

from vl_plugins.commands import losses
from vl_plugins.commands.losses import describe_loss, format_descriptions, register
from vl_plugins.registry import list_losses
from vl_plugins.utils.errors import UserError


def run(*arguments):
    parser = argparse.ArgumentParser()
    register(parser.add_subparsers())
    parsed = parser.parse_args(["losses", *arguments])
    return parsed.run(parsed)


def test_every_loss_with_options_equation_and_paper(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert run() == 0
    paragraphs = capsys.readouterr().out.strip().split("\n\n")
    assert [paragraph.partition("\n")[0] for paragraph in paragraphs[:-1]] == list(list_losses())
    assert paragraphs[list_losses().index("unified")] == (
        "unified\n"
        "  Contrastive loss with the margin of the triplet loss, over all negatives of an anchor.\n"
        "  options   margin=0.2, scale=50.0, weights=None, relative=None, symmetric=True, backend=None\n"
        "  equation  Eq. 5, 24-27\n"
        "  paper     Li et al. 2022, Unified Loss of Pair Similarity Optimization for Vision-Language Retrieval"
    )
    assert (
        "options base='triplet_hn', alpha=16.0, set_size=1, mmd_weight=0.01, diversity_weight=0.01, backend=None; "
        "with these defaults also margin=0.2, warmup_steps=0, symmetric=True equation"
    ) in " ".join(paragraphs[list_losses().index("smooth_chamfer")].split())
    assert "reducer=None, distance=None" in " ".join(paragraphs[-1].split())


@pytest.mark.parametrize("width", [60, 80, 120])
def test_lines_fit_the_terminal(width):
    text = format_descriptions([describe_loss(name) for name in list_losses()], width)
    lines = text.splitlines()
    assert len(lines) > 20
    assert max(map(len, lines)) <= width


def test_json(capsys):
    assert run("--json") == 0
    descriptions = {description.pop("name"): description for description in json.loads(capsys.readouterr().out)}
    assert tuple(descriptions) == list_losses()
    unified = descriptions["unified"]
    assert unified["equation"] == "Eq. 5, 24-27"
    assert unified["paper"].startswith("Li et al. 2022")
    assert unified["without_default"] == unified["forwarded"] == []
    smooth_chamfer = descriptions["smooth_chamfer"]
    assert smooth_chamfer["options"]["margin"] == 0.2
    assert set(smooth_chamfer["forwarded"]) == set(smooth_chamfer["options"]) - {
        *("base", "alpha", "set_size", "mmd_weight", "diversity_weight", "distance", "backend")
    }
    assert unified["options"]["margin"] == 0.2
    assert unified["options"]["distance"] is None


class ForeignLoss:
    """A loss of another package.

    More about it.
    """

    def __init__(self, weights, margin=0.1):
        pass


def test_loss_without_equation_and_paper(monkeypatch):
    monkeypatch.setattr(losses, "load_loss", lambda name: ForeignLoss)
    description = describe_loss("foreign")
    assert description == {
        "name": "foreign",
        "summary": "A loss of another package.",
        "options": {"margin": 0.1},
        "without_default": ["weights"],
        "forwarded": [],
        "equation": None,
        "paper": None,
    }
    assert format_descriptions([description], 80).startswith(
        "foreign\n  A loss of another package.\n  options   weights, margin=0.1\n\n"
    )


def test_unusable_loss_does_not_hide_the_others(monkeypatch):
    load_loss = losses.load_loss

    def broken(name):
        if name == "vlc":
            raise UserError("loss 'vlc' is provided by two distributions")
        return load_loss(name)

    monkeypatch.setattr(losses, "load_loss", broken)
    text = format_descriptions([describe_loss(name) for name in list_losses()], 80)
    assert "\n\nunified\n" in text
    assert "\n\nvlc\n  error     loss 'vlc' is provided by two distributions\n\n" in text


def test_loss_whose_base_is_unusable(monkeypatch):
    def broken(name, /, **given):
        raise UserError(f"loss {name!r} is provided by two distributions")

    monkeypatch.setattr("vl_plugins.losses.smooth_chamfer.loss_options", broken)
    message = "loss 'triplet_hn' is provided by two distributions"
    assert describe_loss("smooth_chamfer") == {"name": "smooth_chamfer", "error": message}
    assert "options" in describe_loss("vlc")
