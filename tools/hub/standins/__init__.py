"""What the package needs of distributions that the hub's rules do not allow, under their names."""
