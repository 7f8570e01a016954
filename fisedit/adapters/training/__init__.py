"""Training of reference adapters: a frozen base, pictures in pairs, and the loop around them."""
