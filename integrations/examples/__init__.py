"""Small models that any loss of :mod:`vl_plugins.functional` trains, given nothing but their similarity matrix.

They run in seconds, on made-up data: ``python -m vl_plugins.integrations.examples.cross_attention``, ``.video_text``.
"""
