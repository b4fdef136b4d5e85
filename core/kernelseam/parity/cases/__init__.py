"""What is tried, written down as data: a class of cases for each operation, and lists of them."""
