"""Adapters that put the losses of :mod:`vl_plugins` into training tools; one subpackage per host."""
