"""Training loops to copy from, each with a small model; they run in seconds.

``accelerate_loop``, ``lightning_module`` and ``transformers_trainer`` train on shards.
``sentence_transformers_trainer``, ``metric_loss_only`` and ``cross_attention``, which has a similarity matrix instead
of embeddings, make up their data. Each is run by
``python -m vl_plugins.integrations.examples.NAME``.
"""
