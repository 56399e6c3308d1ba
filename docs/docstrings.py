"""Docstrings for mkdocstrings: their roles, formulas and doctests as Markdown."""

import re
import textwrap

import griffe

ROLE = re.compile(r":(?:func|class|meth|mod|attr|data|exc):`(~?)([\w.]+)`")
INLINE_FORMULA = re.compile(r":math:`([^`]+)`")
FORMULA = re.compile(r"^( *)\.\. math::(.*(?:\n\1 +\S.*|\n+(?=\1 {4}\S))*)", re.MULTILINE)
DOCTEST = re.compile(r"^( *)>>> .*(?:\n\1\S.*|\n\1 +\S.*)*", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Rewrites the docstrings of a package once all of it is loaded, so that names can be resolved."""

    def on_package(self, *, pkg: griffe.Module, **kwargs) -> None:
        objects = [pkg]
        while objects:
            item = objects.pop()
            if item.docstring is not None:
                item.docstring.value = to_markdown(item.docstring.value, item)
            objects += [member for member in item.members.values() if not member.is_alias]


def to_markdown(text: str, item: griffe.Object) -> str:
    text = DOCTEST.sub(lambda found: fence(found[0], found[1]), text)
    text = FORMULA.sub(formula, text)
    text = INLINE_FORMULA.sub(r"\\(\1\\)", text)
    text = ROLE.sub(lambda found: reference(found[1], found[2], item), text)
    return re.sub(r"::$", ":", text, flags=re.MULTILINE)


def fence(code: str, indent: str) -> str:
    return f"{indent}```pycon\n{code}\n{indent}```"


def formula(found: re.Match) -> str:
    return textwrap.indent(f"\\[\n{textwrap.dedent(found[2]).strip()}\n\\]", found[1])


def reference(shorten: str, name: str, item: griffe.Object) -> str:
    """Return a link to what a role names, which is plain code where the site has no page for it."""
    try:
        target = item.resolve(name)
    except griffe.NameResolutionError:
        target = name
    shown = name.rpartition(".")[2] if shorten else name
    return f'<autoref optional identifier="{target}"><code>{shown}</code></autoref>'
