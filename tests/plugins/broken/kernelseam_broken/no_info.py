"""Says nothing about itself."""
