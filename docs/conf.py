"""Sphinx builds the site with ``make docs``; it needs no network and trains nothing."""

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml

import vl_plugins
from vl_plugins.losses import PairLoss
from vl_plugins.registry import options_of

project = "vl_plugins"
release = vl_plugins.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
root_doc = "index"
html_theme, html_title = "furo", f"vl_plugins {release}"
html_static_path, html_css_files = ["style.css"], ["style.css"]
html_math_renderer, html_show_copyright = "mathml", False
myst_enable_extensions, myst_heading_anchors = ["dollarmath"], 4
autodoc_default_options = {"members": True}
autodoc_inherit_docstrings, autodoc_member_order = False, "bysource"
napoleon_use_ivar = True
add_module_names = False
python_maximum_signature_line_length = 88


def formula(translator, node):
    """Write a formula as MathML, which browsers render without a script."""
    translator.body.append(tex2mathml(node.astext(), as_block=isinstance(node, nodes.math_block)))
    raise nodes.SkipNode


def add_options_of_bases(app, what, name, obj, options, signature, return_annotation):
    """Show the options that a loss passes on as ``**kwargs``, such as ``reducer`` and ``distance``."""
    if what != "class" or not issubclass(obj, PairLoss):
        return None
    every = [f"{option}={default!r}" for option, default in options_of(obj).items()]
    return f"({', '.join(every)})", return_annotation


def skip_fields_of_tuples(app, what, name, obj, skip, options):
    """Skip what Python writes about the fields of a named tuple: the class describes them."""
    return skip or str(obj.__doc__).startswith("Alias for field number")


def setup(app):
    app.add_html_math_renderer("mathml", (formula, None), (formula, None))
    app.connect("autodoc-process-signature", add_options_of_bases)
    app.connect("autodoc-skip-member", skip_fields_of_tuples)
