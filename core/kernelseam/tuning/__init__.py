"""Choices that were measured: ``tune`` times every way to compute a problem and keeps the fastest
for its class."""
