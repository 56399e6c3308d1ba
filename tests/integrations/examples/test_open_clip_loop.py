"""The loop learns, its gradients are those of the plain formula, and it works in several processes."""

import inspect

import torch
from torch.nn.parallel import DistributedDataParallel

from tests.helpers.processes import in_processes
from vl_plugins import create_loss
from vl_plugins.integrations.examples import open_clip_loop, scenes


def test_it_learns(capsys):
    metrics = open_clip_loop.main()
    for recall in ("image_to_text_R@1", "text_to_image_R@1"):
        assert metrics["before"][recall] < 5
        assert metrics["after"][recall] > 50
    assert capsys.readouterr().out.splitlines()[2].startswith("after ")


def test_five_captions_are_positives_for_both_towers():
    torch.manual_seed(0)
    model = open_clip_loop.make_model().double()
    (training,) = scenes.make_scenes(6)
    ((images, texts, labels),) = open_clip_loop.make_loader(training, batch_size=6)
    images = images.double()
    image_features, text_features, scale = model(images, texts)
    positives = torch.tensor([[column // 5 == row for column in range(30)] for row in range(6)])
    loss = create_loss("unified", margin=0.2)
    loss.from_similarities(image_features @ text_features.T, positives, ~positives, scale=scale).backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    assert all(gradient.any() for gradient in expected.values())
    open_clip_loop.train(model, [(images, texts, labels)], torch.optim.SGD(model.parameters(), lr=0.1), 1)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-9, atol=1e-12, msg=name)


def train_in_process(rank):
    """Return what torch says where the scale is left out, and the weights without it frozen and with it learned."""
    training = scenes.make_scenes(16, 16)[rank]
    loader = open_clip_loop.make_loader(training, batch_size=8)
    variables = {"create_loss": create_loss}
    exec(inspect.getsource(open_clip_loop.train).replace(", scale=scale", ""), variables)
    torch.manual_seed(0)
    model = open_clip_loop.make_model()

    def weights_after(train):
        train(DistributedDataParallel(model), loader, torch.optim.SGD(model.parameters(), lr=0.1), 1)
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    message = ""
    try:
        weights_after(variables["train"])
    except RuntimeError as error:
        message = str(error)
    model.logit_scale.requires_grad_(False)
    frozen = weights_after(variables["train"])
    model.logit_scale.requires_grad_(True)
    return message, frozen, weights_after(open_clip_loop.train)


def test_distributed_data_parallel_needs_the_scale_or_a_frozen_one():
    """As the README says. The processes have different data, and equal weights in the end."""
    (message, *weights), (same_message, *same_weights) = in_processes(train_in_process, 2)
    for text in (message, same_message):
        assert text.startswith("Expected to have finished reduction in the prior iteration")
    assert [*map(torch.equal, weights, same_weights)] == [True, True]
