"""Each help starts with one or two examples that the real parsers accept, and fits into 80 columns."""

import argparse
import contextlib
import io
import shlex

import pytest

from vl_plugins.cli import build_parser
from vl_plugins.integrations.open_clip.flags import parse_args
from vl_plugins.integrations.pytorch_metric_learning.command_line import build_parser as build_pml_parser


def all_parsers(parser):
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for subparser in action.choices.values():
                yield from all_parsers(subparser)


HELPS = {parser.prog: parser.format_help for parser in (*all_parsers(build_parser()), build_pml_parser())}


def open_clip_help():
    """Without the flags of open_clip."""
    with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
        parse_args(["--help"])
    return text.getvalue().partition("\noptions:")[0] + text.getvalue().partition("\nvl_plugins options:")[2]


HELPS["open_clip"] = open_clip_help
PARSE = {
    "vl-plugins": build_parser().parse_args,
    "vl_plugins.integrations.pytorch_metric_learning": build_pml_parser().parse_args,
    "vl_plugins.integrations.open_clip": parse_args,
}


@pytest.mark.parametrize("program", HELPS)
def test_examples_come_first_and_work(program, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = HELPS[program]()
    assert max(map(len, text.splitlines())) <= 80
    heading, examples = text.split("\n\n")[1].split("\n", 1)
    commands = [shlex.split(line) for line in examples.replace("\\\n", " ").splitlines()]
    assert (heading, len(commands)) in [("example:", 1), ("examples:", 2)]
    for command in commands:
        (start,) = (place for place, word in enumerate(command) if word in PARSE)
        PARSE[command[start]]([word for word in command[start + 1 :] if word != "--"])
