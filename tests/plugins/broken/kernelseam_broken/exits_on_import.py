"""Ends the process while it is imported."""

import sys

sys.exit("the vendor's licence has run out")
