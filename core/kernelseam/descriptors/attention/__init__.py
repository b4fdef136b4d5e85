"""Attention, its gradients and the merge of its parts: descriptors and problems."""
