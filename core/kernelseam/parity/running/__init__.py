"""Cases on implementations: one, or many beside each other."""
