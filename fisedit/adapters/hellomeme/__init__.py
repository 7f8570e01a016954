"""HelloMeme's control networks and motion modules (arXiv 2410.22901)."""
