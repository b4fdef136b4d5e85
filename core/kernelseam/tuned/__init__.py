"""Tuned choices, as dispatch asks for them: which problems share one, and where they are kept."""
