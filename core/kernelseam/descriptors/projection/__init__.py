"""The projections around an attention, and their gradients: descriptors and problems."""
