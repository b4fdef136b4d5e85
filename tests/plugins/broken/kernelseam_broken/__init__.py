"""Plugins that break the contract, each in its own way."""
