"""Row-column attention (arXiv 2410.22901) of reference adapters, dense and sparse."""
