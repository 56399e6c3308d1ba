from pytorch_metric_learning.losses import BaseMetricLossFunction

from vl_plugins.cli import main
from vl_plugins.commands import losses
from vl_plugins.errors import UserError
from vl_plugins.registry import list_losses, options_of


def test_a_paragraph_for_each_loss(capsys, monkeypatch):
    """With an error in place of one that cannot be loaded, and the options of all losses at the end."""
    find = losses.find

    def broken(kind, name):
        if name == "vlc":
            raise UserError("loss 'vlc' is provided by two distributions")
        return find(kind, name)

    monkeypatch.setattr(losses, "find", broken)
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["losses"]) == 0
    output = capsys.readouterr().out
    assert max(map(len, output.splitlines())) <= 100
    paragraphs = output.strip().split("\n\n")
    assert [paragraph.partition("\n")[0] for paragraph in paragraphs[:-2]] == list(list_losses())
    summary, options, *_, equation, title, end = paragraphs[list_losses().index("unified")].splitlines()[1:]
    assert summary.startswith("  Contrastive loss with the margin of the triplet loss")
    assert options.startswith("  options   margin=0.2, scale=50.0, weights=None, relative=None, learn_scale=False,")
    assert (equation, title[:29], end) == (
        "  equation  Eq. 5, 24-27",
        "  paper     Li et al. 2022, U",
        " " * 12 + "Retrieval",
    )
    assert "vlc\n  error     loss 'vlc' is provided by two distributions" in paragraphs
    shared = " ".join(paragraphs[-2].split())
    assert all(f"{name}={default}" in shared for name, default in options_of(BaseMetricLossFunction).items())
    assert "such as NTXentLoss" in paragraphs[-1]
