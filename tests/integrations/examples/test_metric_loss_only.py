"""The script learns."""

from vl_plugins.integrations.examples import metric_loss_only


def test_it_learns(capsys):
    precisions = metric_loss_only.main()
    assert precisions["before"] < 0.5
    assert precisions["after"] > 0.9
    assert "precision@1" in capsys.readouterr().out
