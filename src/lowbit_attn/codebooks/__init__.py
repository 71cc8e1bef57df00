"""Codebooks of a model's KV caches: made once by a calibration, kept in one file, attached to every cache."""

from lowbit_attn.codebooks.file import Codebooks, LayerCodebooks

__all__ = ["Codebooks", "LayerCodebooks"]
