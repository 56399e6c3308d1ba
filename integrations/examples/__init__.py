"""Training loops to copy from, each with a small model and made-up data; they run in seconds.

``open_clip_loop``, ``transformers_trainer`` and ``metric_loss_only`` use the loss classes in a loop or trainer of your
own. ``cross_attention`` trains a model without embeddings by its similarity matrix. Each is run by
``python -m vl_plugins.integrations.examples.NAME``.
"""
