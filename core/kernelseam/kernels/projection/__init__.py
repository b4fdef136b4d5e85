"""The projections before and after an attention: the GEMM with other epilogues and other views."""
