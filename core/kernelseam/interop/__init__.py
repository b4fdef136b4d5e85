"""Array libraries that are met, never imported: each module here asks ``sys.modules`` for its
library. One that extends its library (``torch_autograd``) imports it, and is imported only where
that is asked for.
"""
