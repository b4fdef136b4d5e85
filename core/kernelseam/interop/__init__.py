"""Array libraries that are met, never imported: each module here asks ``sys.modules`` for its library."""
