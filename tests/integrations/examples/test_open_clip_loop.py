"""The loop learns, its gradients are those of the plain formula, and it works in several processes."""

import inspect

import torch
from torch.nn.parallel import DistributedDataParallel

from tests.processes import in_processes
from vl_plugins import create_loss
from vl_plugins.functional import unified_loss
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
    unified_loss(image_features @ text_features.T, positives, ~positives, margin=0.2, scale=scale).backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    assert all(gradient.any() for gradient in expected.values())
    open_clip_loop.train(model, [(images, texts, labels)], torch.optim.SGD(model.parameters(), lr=0.1), 1)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-9, atol=1e-12, msg=name)


def train_in_process(rank):
    """Return the weights at the end, and what torch says where the scale is left out of the loop."""
    training = scenes.make_scenes(16, 16)[rank]
    torch.manual_seed(0)
    model = DistributedDataParallel(open_clip_loop.make_model())
    arguments = open_clip_loop.make_loader(training, batch_size=8), torch.optim.SGD(model.parameters(), lr=0.1), 1
    open_clip_loop.train(model, *arguments)
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    variables = {"create_loss": create_loss}
    exec(inspect.getsource(open_clip_loop.train).replace(", scale=scale", ""), variables)
    try:
        variables["train"](model, *arguments)
    except RuntimeError as error:
        return weights, str(error)


def test_distributed_data_parallel_needs_a_gradient_of_the_scale():
    """As the README says. The processes have different data, and equal weights in the end."""
    (weights, message), (same_weights, same_message) = in_processes(train_in_process, 2)
    assert torch.equal(weights, same_weights)
    for text in (message, same_message):
        assert text.startswith("Expected to have finished reduction in the prior iteration")
