"""What the descriptors share: operands, lists of addresses, the rules of their fields."""
